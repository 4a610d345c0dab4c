// Numbers that the CTAs of a cluster send one another, each into the receiver's shared memory.
//
// Nobody waits for a barrier of all at the end, whose release would wait for all of a CTA's writes:
// a receiver counts the bytes that have come.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/ptx.h"

namespace anyflash::sm90 {

class ClusterInbox {
 public:
  // By one thread, before cluster_arrive() and fence_barrier_init().
  ANYFLASH_DEVICE void expect(int bytes) { expect_sent(&state_, bytes); }
  // After cluster_wait(). `to` and this inbox are those of this CTA: CTA `rank` gets the number in
  // the same place of its shared memory.
  template <class Number>  // float, float4
  ANYFLASH_DEVICE void send(float* to, const Number& value, int rank) {
    send_to_cta(to, value, rank, &state_);
  }
  // Until all of it has come.
  ANYFLASH_DEVICE void wait() { wait_for_sent(&state_); }

 private:
  uint64_t state_;  // an mbarrier
};

}  // namespace anyflash::sm90
