#pragma once

#define NamedBarrier NamedBarrier_device
#define ClusterBarrier ClusterBarrier_device
#include_next <cutlass/arch/barrier.h>
#undef NamedBarrier
#undef ClusterBarrier

namespace cutlass::arch {

// Ids of users come after those that CUTLASS reserves, as in the original.
class NamedBarrier {
 public:
  static constexpr uint32_t ReservedNamedBarrierCount =
      static_cast<uint32_t>(ReservedNamedBarriers::FirstUserBarrier);
  static constexpr uint32_t HardwareMaxNumNamedBarriers = 16;

  NamedBarrier(uint32_t threads, ReservedNamedBarriers id)
      : threads_(threads), id_(static_cast<uint32_t>(id)) {}
  explicit NamedBarrier(uint32_t threads, uint32_t id = 0)
      : threads_(threads), id_(id + ReservedNamedBarrierCount) {}

  void arrive_and_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    emu::barrier_sync(static_cast<int>(id_), static_cast<int>(threads_), file, line);
  }
  void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    arrive_and_wait(file, line);
  }
  void arrive() const { emu::barrier_arrive(static_cast<int>(id_), static_cast<int>(threads_)); }

  template <class Id>
  static void arrive_and_wait(uint32_t threads, Id id, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    NamedBarrier(threads, id).arrive_and_wait(file, line);
  }
  template <class Id>
  static void sync(uint32_t threads, Id id, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
    NamedBarrier(threads, id).arrive_and_wait(file, line);
  }
  template <class Id>
  static void arrive(uint32_t threads, Id id) {
    NamedBarrier(threads, id).arrive();
  }

 private:
  uint32_t threads_;
  uint32_t id_;
};

// Of one block.
class ClusterBarrier {
 public:
  void init(uint32_t threads) { emu::mbarrier_init(&state_, static_cast<int>(threads)); }
  void arrive() { emu::mbarrier_arrive(&state_); }
  void wait(uint32_t parity, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emu::mbarrier_wait(&state_, static_cast<int>(parity), file, line);
  }

 private:
  uint64_t state_;
};

}  // namespace cutlass::arch
