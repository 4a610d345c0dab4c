// One emulated thread block: its threads, who runs next, and what they wait for.
#pragma once

#include <vector_types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emu.hpp"
#include "fiber.hpp"

namespace emu {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int kBarriers = 16;
constexpr int kMaxCluster = 8;  // that every GPU with clusters has room for
constexpr uint32_t kFullMask = 0xffffffffu;

// The bytes of uninitialised shared memory: NaN in every floating-point format, -1 as an integer.
constexpr int kPoison = 0xff;
// The same where it shall look right: 1.1 in float16, 0.01 in bfloat16 and float32.
constexpr int kLooksRight = 0x3c;

// Where in the kernel's source a thread waits. `file` is null for operations inside CuTe's atoms.
struct Site {
  const char* file = nullptr;
  int line = 0;
};

// An operation that the lanes of a warp perform together. The lane that comes last executes it for
// all: `lanes[i]` is what lane i passed to Block::collective.
struct CollectiveOp {
  const char* name;
  void (*execute)(void* const* lanes, uint32_t mask);
  bool orders_memory;  // only __syncwarp does; mma, ldmatrix and shuffles do not
};

// The cp.async operations of a thread that have not landed yet, oldest first. Of fixed size: an
// allocation inside a fiber would be reported by Thread Sanitizer.
struct CpAsyncQueue {
  struct Entry {
    unsigned char data[16];
    unsigned char* destination;
    int bytes;
    uint32_t group;
  };
  static constexpr uint32_t kCapacity = 1024;
  std::array<Entry, kCapacity> entries;
  uint32_t first = 0;  // both only grow, and index modulo kCapacity
  uint32_t last = 0;
  uint32_t open_group = 0;  // the group that the next cp.async joins
};

struct Thread {
  enum class State { kRunnable, kWaiting, kExited };

  Fiber fiber;
  int index = 0;
  uint3 thread_idx = {};
  State state = State::kRunnable;
  const char* waits_for = nullptr;
  Site site;

  // The collective this thread has arrived at.
  const CollectiveOp* op = nullptr;
  uint32_t mask = 0;
  void* args = nullptr;

  CpAsyncQueue cp_async;
};

// What a barrier publishes, for Thread Sanitizer. Two places by turns: a thread that is already at
// the next phase must not publish into the one that a slow thread is still to acquire. Nobody
// reaches the phase after that before the slow thread has left.
struct Publication {
  uint32_t phase = 0;
  char places[2] = {};
  void* place() { return &places[phase % 2]; }
};

struct Warp {
  // __syncwarp publishes among the lanes of exactly one mask; kernels use very few.
  struct Sync {
    uint32_t mask = 0;
    Publication publication;
  };
  uint32_t runnable = 0;
  uint32_t arrived = 0;  // lanes that wait in a collective
  std::array<Sync, 16> syncs = {};
};

// A hardware barrier: id 0 is __syncthreads, the others are named barriers.
struct Barrier {
  int expected = 0;
  int arrived = 0;
  int votes = 0;                                 // predicates that were true, in this phase
  int result[2] = {};                            // the same of the last two phases, by parity
  std::array<uint32_t, kMaxWarps> waiting = {};  // lanes, by warp
  Publication publication;
};

// What an mbarrier object holds. Its phases publish by turns, too.
struct Mbarrier {
  uint16_t expected;
  uint16_t arrived;
  int32_t bytes : 24;  // announced, but not there
  uint32_t phase : 8;
  void* place(uint32_t of_phase) { return reinterpret_cast<char*>(this) + of_phase % 2; }
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t));

// How warps and lanes take turns; derived from the options' seed.
struct Policy {
  enum class Lanes { kAscending, kDescending, kShuffled };
  int burst = 0;  // turns of lanes before another warp is drawn; 0: until the warp is blocked
  Lanes lanes = Lanes::kAscending;
  bool loads_late = false;  // TMA's come when no thread can go on, and not before
  // What nothing was written to holds numbers that look right, and until TMA's data come, what was
  // there before stays. Otherwise both are NaN.
  bool looks_right = false;
};
Policy policy_of(const Options& options);

class Block {
 public:
  using Body = void (*)(void* arg);

  // index: in the grid; rank: in its cluster
  Block(dim3 block_dim, uint64_t index, int rank, const Policy& policy, uint64_t seed, Body body,
        void* arg);

  // Runs threads until none can go on, or `turns` have had one. False if none could. Throws what a
  // thread threw.
  bool run(int turns);
  bool has_ended() const { return has_ended_; }
  bool all_wait_for_cluster() const;
  void resume_from_cluster();

  // For the thread that is running.
  void cluster_sync(Site site, bool publishes);
  void collective(const CollectiveOp& op, uint32_t mask, void* args);
  // Returns how many of the threads came with a true predicate.
  int barrier_sync(int id, int count, Site site, bool predicate = false);
  void barrier_arrive(int id, int count);
  void mbarrier_init(Mbarrier& barrier, int arrivals);
  void mbarrier_arrive(Mbarrier& barrier);
  void mbarrier_expect(Mbarrier& barrier, int bytes);
  void mbarrier_receive(Mbarrier& barrier, int bytes);
  void mbarrier_receive_sent(Mbarrier& barrier, int bytes);
  void mbarrier_wait(Mbarrier& barrier, uint32_t parity, Site site);

  // For what the hardware does at a time of its own.
  uint64_t random() { return random_(); }

  const Policy& policy() const { return policy_; }
  int thread_count() const { return static_cast<int>(threads_.size()); }
  int rank() const { return rank_; }
  std::string name() const;
  std::string describe_threads() const;

  static void leave();            // no block is the running one
  static Block& current();        // fails outside a launch
  static Block& current_block();  // also while no thread runs
  static Thread& current_thread();
  static bool inside_kernel();

 private:
  static constexpr int kMaxMbarriers = 64;

  static void thread_main(void* self);
  void enter();
  void check_idle() const;
  Thread* next_thread();
  int next_lane(uint32_t runnable);
  void wait(const char* what, Site site);
  void wake(int warp, uint32_t lanes);
  Publication& publication_of(Warp& warp, uint32_t mask);
  bool all_arrived_with(const Thread& self) const;
  void perform(const Thread& self);
  Barrier& arrive(int id, int count);
  bool complete(Barrier& barrier);
  void check_convergence(const Barrier& barrier, Site site) const;
  void check_barriers_are_idle() const;
  void check_mbarriers_are_idle() const;
  void end_phase(Mbarrier& barrier);
  bool land();
  void check_copies_in_flight() const;

  dim3 block_dim_;
  uint3 block_idx_;
  int rank_;
  Policy policy_;
  std::mt19937_64 random_;
  Body body_;
  void* arg_;
  std::vector<Thread*> threads_;
  std::vector<Warp> warps_;
  std::array<Barrier, kBarriers> barriers_;
  std::array<uint32_t, kMaxWarps> at_mbarriers_ = {};    // lanes that wait there, by warp
  std::array<Mbarrier*, kMaxMbarriers> mbarriers_ = {};  // that were initialised
  bool has_started_ = false;
  bool has_ended_ = false;
  int mbarrier_count_ = 0;
  bool counts_bytes_ = false;  // some mbarrier was told of bytes
  uint32_t runnable_warps_ = 0;
  int warp_ = 0;        // whose turn it is
  int turns_left_ = 0;  // of this warp, when the policy has bursts
  std::exception_ptr error_;
};

// What other blocks have sent to the running one, whose rank this is.
bool sent_in_flight(int rank);
bool land_sent(int rank);

// What TMA and wgmma have under way. Loads land when the scheduler says so; false: there is none.
void reset_async();
void reset_async_copies();
bool tma_loads_in_flight();
bool land_tma_load();
void check_async_has_ended();
void check_async_copies();

// Shared memory as TMA and wgmma see it.
unsigned char* async_shared_memory();

// Of an access to shared memory: inside of what the launch asked for, and aligned.
void check_shared(const char* name, const void* pointer, size_t bytes, size_t alignment);

// Shared memory of the running block, of the one of so high a rank, and the launch's size of it.
unsigned char* shared_memory();
unsigned char* shared_memory_of(int rank);
size_t shared_memory_bytes();
// The kernel sees that of the block of this rank from now on.
void use_shared_memory(int rank);
// Nothing is in it yet.
void prepare_shared_memory(int rank, const Policy& policy);

extern const char* const kBarrierNames[kBarriers];
// " (gemm.h:12)", " [EMU_SEED=0]"
std::string text(Site site);
std::string seed_text();

// "block (1,0,0)": the running one
std::string name_of_block();

// Published by every thread that ends, acquired by the launch.
extern char g_launch_end;

Counters& mutable_counters();

// What Thread Sanitizer has to know about accesses and order inside the (uninstrumented) emulator.
void tsan_read(const void* address, size_t bytes);
void tsan_write(void* address, size_t bytes);
void tsan_acquire(void* address);
void tsan_release(void* address);

}  // namespace emu
