// Warpgroups of different roles: consumers compute, and a producer has TMA bring what they read.
#pragma once

#include "common/macros.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Of 64 K registers; setmaxnreg hands them from the producer to the consumers.
struct RegisterSplit {
  int producer;
  int consumer;
};

// A CTA of kConsumers consumer warpgroups and a producer. Consumers come first, so that what
// numbers threads by accumulators sees threadIdx.x.
template <int kConsumers_>
struct Warpgroups {
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kThreads = kConsumers * kWarpgroupThreads;  // of the consumers
  static constexpr int kConsumerWarps = kThreads / 32;
  static constexpr int kCtaThreads = kThreads + kWarpgroupThreads;
};

// The producer's threads call produce(), and those of the consumers consume(warpgroup).
template <class Traits, class Produce, class Consume>
ANYFLASH_DEVICE void run_roles(const Produce& produce, const Consume& consume) {
  // Threads begin with equal shares, of whole eights.
  constexpr int kWarpgroups = Traits::kConsumers + 1;
  constexpr int kShare = 64 * 1024 / (kWarpgroups * kWarpgroupThreads) / 8 * 8;
  static_assert(Traits::kRegisters.producer + Traits::kConsumers * Traits::kRegisters.consumer <=
                    kWarpgroups * kShare,
                "else a warpgroup waits for registers forever");
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == Traits::kConsumers) {
    release_registers<Traits::kRegisters.producer>();
    produce();
  } else {
    acquire_registers<Traits::kRegisters.consumer>();
    consume(warpgroup);
  }
}

// Of the producer: one thread.
template <class Traits>
ANYFLASH_DEVICE bool is_loading_thread() {
  return threadIdx.x / 32 == Traits::kConsumerWarps && elect_lane();
}

}  // namespace anyflash::sm90
