// The emulator has to notice what it is there for. Every case is a small kernel with one defect and
// its correct twin: the twin must pass, the defect must be noticed.
//
//   detects                    every case that needs no sanitizer, with both twins
//   detects CASE planted       one twin; a defect that is noticed ends with status 1, or with a
//   detects CASE correct       sanitizer's report
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cmath>
#include <cstring>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm75.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "exchange.h"

namespace {

using cute::uint128_t;
using device::Array;

constexpr int kThreads = 64;
constexpr size_t kSharedBytes = 4 * kThreads * sizeof(float);

float* shared_floats() { return reinterpret_cast<float*>(anyflash_smem); }

// -- What is wrong or reported in any build
// ---------------------------------------------------------

void barrier_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  shared_floats()[i] = static_cast<float>(i);
  if (!planted) __syncthreads();
  result[i] = shared_floats()[kThreads - 1 - i];
}

void overwrite_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  float sum = 0;
  for (int round = 0; round < 4; ++round) {
    shared_floats()[i] = static_cast<float>(i + 100 * round);
    __syncthreads();
    sum += shared_floats()[kThreads - 1 - i] - 100 * round;
    if (!planted) __syncthreads();  // the next round overwrites what is being read
  }
  result[i] = sum / 4;
}

// On a GPU shared memory often happens to be zero.
void uninitialised_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  if (!planted) shared_floats()[i] = 0.0f;
  result[i] = static_cast<float>(kThreads - 1 - i) + shared_floats()[i];
}

void wait_kernel(bool planted, const float* source, float* result) {
  const int i = threadIdx.x;
  for (int stage = 0; stage < 2; ++stage) {
    cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(source[i], shared_floats()[stage * kThreads + i]);
    cute::cp_async_fence();
  }
  if (planted) {
    cute::cp_async_wait<1>();
  } else {
    cute::cp_async_wait<0>();
  }
  __syncthreads();
  result[i] = shared_floats()[kThreads + kThreads - 1 - i];
}

// Without a wait it lands at any time, also on what is written there later.
void landed_late_kernel(bool planted, const float* source, float* result) {
  const int i = threadIdx.x;
  cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(source[i], shared_floats()[i]);
  if (!planted) cute::cp_async_wait<0>();
  __syncthreads();
  shared_floats()[i] = static_cast<float>(i);
  __syncthreads();
  result[i] = shared_floats()[kThreads - 1 - i];
}

// A wait makes a thread's own copies visible to itself; the others need the barrier as well.
void landed_for_one_kernel(bool planted, const float* source, float* result) {
  const int i = threadIdx.x;
  cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(source[kThreads - 1 - i], shared_floats()[i]);
  cute::cp_async_fence();
  cute::cp_async_wait<0>();
  if (!planted) __syncthreads();
  // An 8x8 matrix of 16-bit values is 32 floats: lane i receives the i-th.
  const int row = 32 * (1 - i / 32) + i % 8 * 4;
  uint32_t bits;
  cute::SM75_U32x1_LDSM_N::copy(reinterpret_cast<uint128_t&>(shared_floats()[row]), bits);
  __syncthreads();
  shared_floats()[i ^ 32] = __uint_as_float(bits);
  __syncthreads();
  result[i] = shared_floats()[i];
}

void divergent_barrier_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  if (!planted || i % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  result[i] = static_cast<float>(kThreads - 1 - i);
}

void half_barrier_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  result[i] = static_cast<float>(kThreads - 1 - i);
  if (!planted || i < 32) __syncthreads();
}

void divergent_shuffle_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  result[i] = static_cast<float>(kThreads - 1 - i);
  if (!planted || i % 32 < 16) __shfl_xor_sync(0xffffffffu, i, 1);
  __syncwarp();
}

void shared_bounds_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  uint32_t value;
  const size_t row = planted ? kSharedBytes : 0;
  cute::SM75_U32x1_LDSM_N::copy(reinterpret_cast<uint128_t&>(anyflash_smem[row]), value);
  result[i] = static_cast<float>(kThreads - 1 - i);
}

void misaligned_copy_kernel(bool planted, const float* source, float* result) {
  const int i = threadIdx.x;
  if (i == 0) {
    const float* from = planted ? source + 1 : source;
    cute::SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(from),
                                                     *reinterpret_cast<uint128_t*>(anyflash_smem));
  }
  result[i] = static_cast<float>(kThreads - 1 - i);
}

void unknown_instruction_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  float d[4];
  if (planted) cute::SM75_16x8x8_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], 0, 0, 0, 0, 0, 0, 0);
  result[i] = static_cast<float>(kThreads - 1 - i);
}

void named_barrier_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  shared_floats()[i] = static_cast<float>(i);
  // Either both warps, or (a wrong count) each warp for itself.
  cutlass::arch::NamedBarrier::sync(planted ? 32 : kThreads, planted ? i / 32 : 0);
  result[i] = shared_floats()[kThreads - 1 - i];
}

// Two rounds. The wait for the second is for the phase that ends it, or for the one before.
void mbarrier_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  auto& barrier = *reinterpret_cast<cutlass::arch::ClusterBarrier*>(shared_floats() + 2 * kThreads);
  if (i == 0) barrier.init(kThreads);
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    shared_floats()[round * kThreads + i] = static_cast<float>(round * i);
    barrier.arrive();
    barrier.wait(planted ? 0 : round);
  }
  result[i] = shared_floats()[kThreads + kThreads - 1 - i];
}

// -- What only a sanitizer sees
// -----------------------------------------------------------------------

void read_past_end_kernel(bool planted, const float* source, float* result) {
  const int i = threadIdx.x;
  // Masked afterwards, so that the result does not tell.
  const float value = source[planted ? i + 1 : i];
  result[i] = value == -1.0f ? 0.0f : static_cast<float>(kThreads - 1 - i);
}

void read_past_shared_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  shared_floats()[i] = static_cast<float>(kThreads - 1 - i);
  __syncthreads();
  const volatile float* last = shared_floats() + kSharedBytes / sizeof(float) - kThreads;
  const float value = last[planted ? i + 1 : i];
  result[i] = value == -1.0f ? 0.0f : shared_floats()[i];
}

// Ascending lanes that run until they block make this right by luck: only the order is missing.
void syncwarp_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  shared_floats()[i] = static_cast<float>(kThreads - 1 - i);
  __shfl_xor_sync(0xffffffffu, i, 1);  // brings the lanes together, but orders no memory
  if (!planted) __syncwarp();
  result[i] = shared_floats()[i ^ 1] + (i % 2 == 0 ? 1.0f : -1.0f);
}

// Two blocks add to the same number; run one after another they are right even without atomics.
void plain_add_kernel(bool planted, float* result) {
  const int i = threadIdx.x;
  const float addend = 0.5f * static_cast<float>(kThreads - 1 - i);
  if (planted) {
    result[i] += addend;
  } else {
    atomicAdd(&result[i], addend);
  }
}

// -- The cases
// --------------------------------------------------------------------------------------

using Kernel = std::function<void(bool planted, const float* source, float* result)>;
struct Case {
  const char* name;
  int blocks;  // a cluster, if there are several
  bool needs_sanitizer;
  Kernel kernel;  // leaves kThreads - 1 - i in result[i] for every thread i
};

// Drops the source from the parameters of the kernels that read none.
Kernel without_source(void (*kernel)(bool, float*)) {
  return [=](bool planted, const float*, float* result) { kernel(planted, result); };
}

std::vector<Case> all_cases() {
  return {
      {"missing_barrier", 1, false, without_source(barrier_kernel)},
      {"overwritten_too_early", 1, false, without_source(overwrite_kernel)},
      {"uninitialised_shared", 1, false, without_source(uninitialised_kernel)},
      {"wait_too_short", 1, false, wait_kernel},
      {"landed_late", 1, false, landed_late_kernel},
      {"landed_for_one", 1, false, landed_for_one_kernel},
      {"divergent_barrier", 1, false, without_source(divergent_barrier_kernel)},
      {"half_barrier", 1, false, without_source(half_barrier_kernel)},
      {"divergent_shuffle", 1, false, without_source(divergent_shuffle_kernel)},
      {"ldmatrix_out_of_bounds", 1, false, without_source(shared_bounds_kernel)},
      {"misaligned_cp_async", 1, false, misaligned_copy_kernel},
      {"unknown_instruction", 1, false, without_source(unknown_instruction_kernel)},
      {"named_barrier", 1, false, without_source(named_barrier_kernel)},
      {"mbarrier", 1, false, without_source(mbarrier_kernel)},
      {"sent_too_early", 2, false, without_source(exchange_kernel<Planted::kSentTooEarly>)},
      {"freed_too_early", 2, true, without_source(exchange_kernel<Planted::kFreedTooEarly>)},
      {"ended_too_early", 2, false, without_source(exchange_kernel<Planted::kEndedTooEarly>)},
      {"read_past_end", 1, true, read_past_end_kernel},
      {"read_past_shared", 1, true, without_source(read_past_shared_kernel)},
      {"missing_syncwarp", 1, true, without_source(syncwarp_kernel)},
      {"plain_add_of_blocks", 2, true, without_source(plain_add_kernel)},
  };
}

// True if the kernel left what it should; false, with a line that says why, if the emulator or the
// result shows the defect.
bool run(const Case& test, bool planted) {
  Array<float> source(kThreads), result(kThreads);
  for (int i = 0; i < kThreads; ++i) source[i] = static_cast<float>(i);
  emu::options().compute_capability = 90;
  try {
    const auto kernel = [&] { test.kernel(planted, source.data(), result.data()); };
    emu::launch(dim3(test.blocks), dim3(kThreads), kSharedBytes, kernel, test.blocks);
  } catch (const emu::Failure& failure) {
    std::printf("%s\n", failure.what());
    return false;
  }
  for (int i = 0; i < kThreads; ++i) {
    if (result[i] == static_cast<float>(kThreads - 1 - i)) continue;
    std::printf("result[%d] is %g\n", i, result[i]);
    return false;
  }
  return true;
}

bool check(bool ok, const std::string& what) {
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
  return ok;
}

// Some orders of the warps hide a missing barrier, but not many may. A sanitizer would report the
// planted twins that need one, and end the program.
bool test_cases() {
  constexpr int kSeeds = 12;
  bool ok = true;
  for (const Case& test : all_cases()) {
    int noticed = 0;
    for (emu::options().seed = 0; emu::options().seed < kSeeds; ++emu::options().seed) {
      ok = check(run(test, false), test.name + std::string(": the correct kernel")) && ok;
      if (!test.needs_sanitizer && !run(test, true)) ++noticed;
    }
    if (test.needs_sanitizer) continue;
    const std::string count = std::to_string(noticed) + " of " + std::to_string(kSeeds) + " seeds";
    ok = check(noticed > kSeeds / 2, test.name + std::string(": noticed with ") + count) && ok;
  }
  emu::options().seed = 0;
  return ok;
}

// -- Reports, counters, limits
// ------------------------------------------------------------------------

std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const emu::Failure& failure) {
    return failure.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool test_reports() {
  const std::string deadlock = failure_of([] {
    emu::launch(dim3(1, 2), dim3(96), 0, [] {
      if (threadIdx.x < 64 && blockIdx.y == 1) __syncthreads();
    });
  });
  bool ok = check(contains(deadlock,
                           "deadlock in block (0,1,0): threads 0-63 at __syncthreads "
                           "(detects.cpp:") &&
                      contains(deadlock, "; threads 64-95 ended"),
                  "the report of a deadlock: " + deadlock);
  const size_t limit = emu::options().shared_memory_limit;
  const auto launch_with = [](size_t bytes) { emu::launch(dim3(1), dim3(32), bytes, [] {}); };
  ok = check(failure_of([&] { launch_with(limit); }).empty(), "all of the shared memory") && ok;
  ok = check(!failure_of([&] { launch_with(limit + 1); }).empty(), "too much shared memory") && ok;
  const std::string on_host = failure_of([] { __syncthreads(); });
  return check(contains(on_host, "outside of a launch"), "a barrier on the host: " + on_host) && ok;
}

// Rows of 128 bytes, eight of them at a time: each hits the same four banks, unless 16-byte chunks
// are exchanged by row.
uint64_t conflicts(bool swizzled) {
  emu::reset_counters();
  emu::launch(dim3(1), dim3(32), 32 * 128, [=] {
    const int row = threadIdx.x, chunk = swizzled ? row % 8 : 0;
    uint32_t r[4];
    cute::SM75_U32x4_LDSM_N::copy(
        reinterpret_cast<const uint128_t&>(anyflash_smem[row * 128 + chunk * 16]), r[0], r[1], r[2],
        r[3]);
  });
  return emu::counters().ldmatrix_conflicts;
}

bool test_bank_conflicts() {
  const bool ok = check(conflicts(true) == 0, "no conflicts with a swizzle");
  return check(conflicts(false) == 4 * 7, "seven aux wavefronts a matrix without one") && ok;
}

// Host fallbacks in CuTe and CUTLASS that do nothing or return a constant, without a message.
bool test_shadowed_names() {
  constexpr int kCount = 256;
  std::vector<int> elected(kCount), warp(kCount), lane(kCount), group(kCount);
  std::vector<uint32_t> address(kCount);
  emu::launch(dim3(1), dim3(kCount), 1024, [&] {
    const int i = threadIdx.x;
    elected[i] = static_cast<int>(cute::elect_one_sync());
    warp[i] = cutlass::canonical_warp_idx_sync();
    lane[i] = cutlass::canonical_lane_idx();
    group[i] = cutlass::canonical_warp_group_idx();
    address[i] = cute::cast_smem_ptr_to_uint(&anyflash_smem[4 * i]);
  });
  bool ok = true;
  for (int i = 0; i < kCount; ++i) {
    ok = check(elected[i] == (i % 32 == 0), "elect_one_sync") && ok;
    ok = check(warp[i] == i / 32 && lane[i] == i % 32 && group[i] == i / 128, "canonical_*") && ok;
    ok = check(address[i] == 4u * i, "cast_smem_ptr_to_uint") && ok;
  }
  return ok;
}

int run_one(const std::string& name, const std::string& twin) {
  for (const Case& test : all_cases()) {
    if (name == test.name) return run(test, twin == "planted") ? 0 : 1;
  }
  std::printf("no case is called %s\n", name.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return run_one(argv[1], argv[2]);
  bool ok = test_cases();
  ok = test_reports() && ok;
  ok = test_bank_conflicts() && ok;
  ok = test_shadowed_names() && ok;
  return ok ? 0 : 1;
}
