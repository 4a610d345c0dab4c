// A kernel whose two blocks are a cluster, with the defects that the emulator has to notice.
#pragma once

#include <cstdint>

#include "device.h"

// Each of two blocks sends numbers to the other one, four times, always to the same place.
enum class Planted { kSentTooEarly, kFreedTooEarly, kEndedTooEarly };
template <Planted kDefect>
void exchange_kernel(bool planted, float* result) {
  const auto has = [&](Planted defect) { return planted && kDefect == defect; };
  const int threads = blockDim.x, i = threadIdx.x;
  auto* const numbers = reinterpret_cast<float*>(anyflash_smem);
  const int other = 1 - static_cast<int>(blockIdx.x);
  auto* const arrived = reinterpret_cast<uint64_t*>(numbers + threads);
  uint64_t* const may_send = arrived + 1;
  if (i == 0) {
    emu::mbarrier_init(arrived, 1);
    emu::mbarrier_init(may_send, threads);
  }
  __syncthreads();
  emu::cluster_meet();
  float sum = 0.0f;
  for (int round = 0; round < 4; ++round) {
    if (!has(Planted::kSentTooEarly)) {
      emu::mbarrier_wait(may_send, round % 2 ^ 1, __FILE__, __LINE__);
    }
    const float number = static_cast<float>(i + 100 * round);
    emu::send_to_cta(numbers + i, &number, 1, other, arrived);
    if (i == 0) emu::mbarrier_arrive_expect(arrived, threads * sizeof(float));
    emu::mbarrier_wait(arrived, round % 2, __FILE__, __LINE__);
    if (has(Planted::kFreedTooEarly)) emu::mbarrier_arrive_at_cta(may_send, other);
    sum += numbers[threads - 1 - i] - static_cast<float>(100 * round);
    if (!has(Planted::kFreedTooEarly)) emu::mbarrier_arrive_at_cta(may_send, other);
  }
  if (!has(Planted::kEndedTooEarly)) emu::cluster_meet();
  if (blockIdx.x == 0) result[i] = sum / 4.0f;
}
