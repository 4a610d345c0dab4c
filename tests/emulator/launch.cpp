#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "block.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif
#ifdef EMU_TSAN
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kSharedBytes = 256 * 1024;

}  // namespace

// A page boundary, more than kernels ask for, so that it can be mapped anew between blocks.
alignas(4096) unsigned char anyflash_smem[kSharedBytes];

// The objects behind the constants of emu.hpp: the same symbols, but writable.
uint3 g_thread_idx asm("threadIdx");
uint3 g_block_idx asm("blockIdx");
dim3 g_block_dim asm("blockDim");
dim3 g_grid_dim asm("gridDim");

namespace emu {
namespace {

std::mutex g_launch_mutex;
Counters g_counters;
size_t g_shared_bytes = 0;

Options initial_options() {
  Options result;
  if (const char* seed = std::getenv("EMU_SEED")) result.seed = std::strtoull(seed, nullptr, 10);
  return result;
}

std::string text(dim3 d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

void check_launch(dim3 grid, dim3 block, int cluster, size_t shared_bytes) {
  const std::string what = "launch of grid " + text(grid) + ", block " + text(block) + ": ";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) throw Failure(what + "the grid is empty");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw Failure(what + "a grid is at most (2147483647,65535,65535)");
  }
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || threads % kWarpSize != 0) {
    throw Failure(what + "a block has a multiple of 32 threads, at most 1024");
  }
  if (cluster > 1 && options().compute_capability < 90) {
    throw Failure(what + "the device has no clusters");
  }
  if (cluster < 1 || cluster > kMaxCluster || grid.x % cluster != 0) {
    throw Failure(what + "a cluster of " + std::to_string(cluster) +
                  " blocks; it has at most 8, and the grid whole ones");
  }
  if (shared_bytes > options().shared_memory_limit || shared_bytes > kSharedBytes) {
    throw Failure(what + std::to_string(shared_bytes) +
                  " bytes of shared memory, but the device has " +
                  std::to_string(options().shared_memory_limit));
  }
}

// Ascending for even seeds; descending or shuffled for odd ones.
std::vector<uint64_t> block_order(uint64_t count, uint64_t seed) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (seed % 4 == 1) std::reverse(order.begin(), order.end());
  if (seed % 4 == 3) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

// Fresh shared memory up to the launch's size; what is beyond it is out of bounds.
void prepare_shared_memory(const Policy& policy) {
#ifdef EMU_TSAN
  // Mapped anew, so that Thread Sanitizer forgets the block before: blocks share global memory
  // without order, which it shall see, but not this array.
  mmap(anyflash_smem, kSharedBytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS,
       -1, 0);
#endif
  std::memset(anyflash_smem, policy.looks_right ? kLooksRight : kPoison, g_shared_bytes);
}

// Sets up what a launch shares between its blocks, and takes it down again.
class LaunchScope {
 public:
  LaunchScope(dim3 grid, dim3 block, size_t shared_bytes) {
    if (options().flushes_subnormals) flush_subnormals();
    g_grid_dim = grid;
    g_block_dim = block;
    g_shared_bytes = shared_bytes;
#ifdef EMU_ASAN
    __asan_poison_memory_region(anyflash_smem + shared_bytes, kSharedBytes - shared_bytes);
#endif
  }
  ~LaunchScope() {
    restore_subnormals();
    g_shared_bytes = 0;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(anyflash_smem, kSharedBytes);
#endif
  }

 private:
#if defined(__SSE__)
  void flush_subnormals() {
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(modes_ | kFlushToZero | kDenormalsAreZero);
  }
  void restore_subnormals() { _mm_setcsr(modes_); }

  const unsigned modes_ = _mm_getcsr();
#else
  void flush_subnormals() {}
  void restore_subnormals() {}
#endif
};

}  // namespace

// The blocks of a cluster, which take turns at the one array of shared memory.
class Cluster {
 public:
  Cluster(uint64_t first, int size, const Policy& policy) : policy_(policy), members_(size) {
    for (int rank = 0; rank < size; ++rank) members_[rank].index = first + rank;
  }

  void run(dim3 block, uint64_t seed, Block::Body body, void* arg) {
    std::vector<int> order(members_.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(seed ^ members_.front().index);
    g_cluster = this;
    while (
        std::any_of(members_.begin(), members_.end(), [](const Member& m) { return !m.ended; })) {
      std::shuffle(order.begin(), order.end(), random);
      for (const int rank : order) {
        Member& member = members_[rank];
        if (member.ended) throw Failure(name_of_block() + ": a block of its cluster has ended");
        if (!member.block) {
          member.block =
              std::make_unique<Block>(block, rank, policy_, seed ^ (member.index << 32), body, arg);
        }
        advance(member);
      }
    }
    g_cluster = nullptr;
    g_counters.blocks += members_.size();
  }

  const void* in_cta(const void* pointer, int rank) const {
    const auto* const own = static_cast<const unsigned char*>(pointer);
    if (own < anyflash_smem || own >= anyflash_smem + g_shared_bytes) {
      fail("an address of another block's shared memory, from one that is not in shared memory");
    }
    if (rank < 0 || rank >= static_cast<int>(members_.size())) {
      fail("block " + std::to_string(rank) + " of a cluster of " + std::to_string(members_.size()));
    }
    const Member& member = members_[rank];
    if (&member == running_) return pointer;
    if (member.ended) fail("shared memory of a block that has ended");
    if (!member.is_kept) fail("shared memory of a block that has not been at a barrier");
    return kept_[rank] + (own - anyflash_smem);
  }

  void expect(int bytes) { own().expected += bytes; }
  void send(float* to, const float* values, int count, int rank) {
    auto* const place = static_cast<float*>(const_cast<void*>(in_cta(to, rank)));
    std::copy(values, values + count, place);
    members_[rank].sent += count * sizeof(*values);
  }
  void check_sent() {
    const Member& member = own();
    if (member.sent != member.expected) {
      fail("a block that expects " + std::to_string(member.expected) + " bytes got " +
           std::to_string(member.sent));
    }
  }

  static Cluster* current() { return g_cluster; }

 private:
  struct Member {
    uint64_t index = 0;  // of the block in the grid
    std::unique_ptr<Block> block;
    bool is_kept = false;  // its memory, in kept_
    bool ended = false;
    int64_t expected = 0;  // bytes from blocks of the cluster
    int64_t sent = 0;
  };
  Member& own() { return members_[running_ - members_.data()]; }

  void advance(Member& member) {
    unsigned char* const kept = kept_[&member - members_.data()];
    const dim3 grid = g_grid_dim;
    g_block_idx = {static_cast<unsigned>(member.index % grid.x),
                   static_cast<unsigned>(member.index / grid.x % grid.y),
                   static_cast<unsigned>(member.index / grid.x / grid.y)};
    prepare_shared_memory(policy_);
    if (member.is_kept) copy(anyflash_smem, kept);
    tsan_release(&g_cluster_barrier);  // which the block's threads leave after this
    running_ = &member;
    member.block->run();
    running_ = nullptr;
    member.ended = member.block->has_ended();
    if (member.ended) return;
    copy(kept, anyflash_smem);
    member.is_kept = true;
  }

  // Not seen by Thread Sanitizer: the blocks' threads do not do this.
#ifdef EMU_TSAN
  __attribute__((no_sanitize("thread"), noinline))
#endif
  static void copy(unsigned char* to, const unsigned char* from) {
    for (size_t i = 0; i < g_shared_bytes; ++i)
      static_cast<volatile unsigned char*>(to)[i] = from[i];
  }

  static inline Cluster* g_cluster = nullptr;
  // Shared memory while other blocks run. Never freed, which Thread Sanitizer would see.
  static inline unsigned char kept_[kMaxCluster][kSharedBytes];
  Policy policy_;
  std::vector<Member> members_;
  const Member* running_ = nullptr;
};

void launch(dim3 grid, dim3 block, size_t dynamic_smem_bytes, int cluster, void (*body)(void*),
            void* arg) {
  if (Block::inside_kernel()) fail("a kernel cannot launch a kernel");
  const std::lock_guard<std::mutex> lock(g_launch_mutex);
  check_launch(grid, block, cluster, dynamic_smem_bytes);
  const LaunchScope scope(grid, block, dynamic_smem_bytes);
  ++g_counters.launches;
  const uint64_t seed = options().seed;
  const Policy policy = policy_of(options());
  for (uint64_t i : block_order(uint64_t{grid.x} * grid.y * grid.z / cluster, seed)) {
    Cluster(i * cluster, cluster, policy).run(block, seed, body, arg);
  }
  tsan_acquire(&g_launch_end);  // from here on the host may read what the threads wrote
}

std::string name_of_block() {
  return "block " + text({g_block_idx.x, g_block_idx.y, g_block_idx.z});
}

Options& options() {
  static Options result = initial_options();
  return result;
}

const void* in_cta(const void* pointer, int rank) {
  Block::current();
  return Cluster::current()->in_cta(pointer, rank);
}

void expect_sent(int bytes) { Cluster::current()->expect(bytes); }
void send_to_cta(float* to, const float* values, int count, int rank) {
  check_shared("st.async", to, count * sizeof(*values), count * sizeof(*values));
  Cluster::current()->send(to, values, count, rank);
}
void wait_for_sent(const char* file, int line) {
  cluster_sync(file, line);
  Cluster::current()->check_sent();
}

char g_launch_end = 0;
char g_cluster_barrier = 0;

Counters& mutable_counters() { return g_counters; }
const Counters& counters() { return g_counters; }
void reset_counters() { g_counters = {}; }

unsigned char* shared_memory() { return anyflash_smem; }
size_t shared_memory_bytes() { return g_shared_bytes; }

}  // namespace emu

extern "C" {
void emu_set_options(uint64_t seed, int burst, size_t shared_memory_limit) {
  emu::options().seed = seed;
  emu::options().burst = burst;
  emu::options().shared_memory_limit = shared_memory_limit;
}
__attribute__((visibility("default"))) void emu_flush_subnormals(int flushes) {
  emu::options().flushes_subnormals = flushes != 0;
}
void emu_get_counters(emu::Counters* result) { *result = emu::counters(); }
void emu_reset_counters(void) { emu::reset_counters(); }
}
