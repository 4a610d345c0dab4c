// How the warps of a CTA wait for each other and for TMA: mbarriers, rings of buffers, named
// barriers, and the registers that warpgroups hand over.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/ptx.h"

namespace anyflash::sm90 {

// Named barriers; 0 is that of __syncthreads().
enum class NamedBarrier : int {
  kConsumers = 1,
  kGuard = 2,         // of the forward
  kBlock = 2,         // of decoding
  kPingPong = 3,      // and one more a warpgroup
  kRows = 3,          // of decoding, and one more a warpgroup
  kProbabilities = 5  // of decoding, and one more a warpgroup
};

// In shared memory. Phases count from 0; each ends when all arrivals that init() was told and all
// bytes that were announced have come.
class Mbarrier {
 public:
  ANYFLASH_DEVICE void init(int arrivals) { mbarrier_init(&state_, arrivals); }
  ANYFLASH_DEVICE void arrive() { mbarrier_arrive(&state_); }
  // Arrives, and announces bytes that TMA will bring.
  ANYFLASH_DEVICE void arrive_expect(int bytes) { mbarrier_arrive_expect(&state_, bytes); }

  // Waits for the end of a phase, by its parity: of the current one, or of the one before, which
  // has ended. So a thread has to follow every phase, or to know otherwise that no other one can
  // be meant. There was one before the first.
  ANYFLASH_DEVICE void wait(uint32_t parity) {
#if defined(ANYFLASH_WATCHDOG)
    for (int i = 0; i < ANYFLASH_WATCHDOG && !mbarrier_try_wait(&state_, parity); ++i) {
    }
#else
    while (!mbarrier_try_wait(&state_, parity)) {
    }
#endif
  }

  // For instructions that arrive by themselves.
  ANYFLASH_DEVICE const uint64_t* state() const { return &state_; }

 private:
  uint64_t state_;
};

// For a warp whose lanes have all done with a buffer.
ANYFLASH_DEVICE void release(Mbarrier& empty) {
  if (threadIdx.x % 32 == 0) empty.arrive();
}

template <int kThreads>
ANYFLASH_DEVICE void sync_consumers() {
  sync_named(static_cast<int>(NamedBarrier::kConsumers), kThreads);
}

// A ring of buffers: the producer waits for `empty` and fills, consumers wait for `full` and
// release.
template <int kStages>
struct Ring {
  Mbarrier full[kStages];
  Mbarrier empty[kStages];

  // A buffer is full after so many arrivals of producers; every consumer warp releases it.
  ANYFLASH_DEVICE void init(int consumer_warps, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumer_warps);
    }
  }
};

// Which buffer of a ring is the next, and in which phase: everyone counts alone.
template <int kStages>
class RingPlace {
 public:
  ANYFLASH_DEVICE int stage() const { return static_cast<int>(count_ % kStages); }
  ANYFLASH_DEVICE uint32_t parity() const { return count_ / kStages & 1; }
  ANYFLASH_DEVICE uint32_t count() const { return count_; }
  ANYFLASH_DEVICE void advance(int buffers = 1) { count_ += buffers; }
  ANYFLASH_DEVICE RingPlace next() const {
    RingPlace place = *this;
    place.advance();
    return place;
  }

 private:
  uint32_t count_ = 0;
};

}  // namespace anyflash::sm90
