// Every instruction of compute capability 8.0 that kernels use, against its scalar definition. The
// definitions are written from the PTX manual's formulas, not from the emulator.
#include <cutlass/numeric_types.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <utility>

#include "device.h"

namespace {

using cute::uint128_t;
using device::Array;

int g_failures = 0;

void expect(bool ok, const char* what, long index, double got, double want) {
  if (ok) return;
  if (++g_failures <= 20) std::printf("%s [%ld]: got %g, want %g\n", what, index, got, want);
}

template <class T>
void expect_equal(const char* what, Array<T>& got, size_t i, T want) {
  expect(got[i] == want, what, static_cast<long>(i), static_cast<double>(got[i]),
         static_cast<double>(want));
}

// Small multiples of 1/4: their products and short sums are exact in any order of addition.
float sample(int i) { return static_cast<float>((i * 37 + 11) % 23 - 11) / 4; }

// -- mma.sync -------------------------------------------------------------------------------------

template <class T>
__device__ uint32_t pack(const T* matrix, int first, int second) {
  return static_cast<uint32_t>(matrix[first].raw()) | static_cast<uint32_t>(matrix[second].raw())
                                                          << 16;
}

// PTX, "Matrix Fragments for mma.m16n8k16 with .f16/.bf16": row and column of register pairs.
template <class Atom, int kK, class T>
__global__ void mma_kernel(const T* a, const T* b, const float* c, float* d) {
  const int lane = threadIdx.x % 32, group = lane >> 2, in_group = lane % 4;
  const auto a_pair = [&](int i) {
    const int row = i % 2 == 0 ? group : group + 8;
    const int column = in_group * 2 + (i >= 2 ? 8 : 0);
    return pack(a, row * kK + column, row * kK + column + 1);
  };
  const auto b_pair = [&](int i) {
    const int row = in_group * 2 + (i >= 1 ? 8 : 0);
    return pack(b, row * 8 + group, (row + 1) * 8 + group);
  };
  const auto c_index = [&](int i) {
    return (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1);
  };
  const float c0 = c[c_index(0)], c1 = c[c_index(1)], c2 = c[c_index(2)], c3 = c[c_index(3)];
  float r0, r1, r2, r3;
  if constexpr (kK == 16) {
    Atom::fma(r0, r1, r2, r3, a_pair(0), a_pair(1), a_pair(2), a_pair(3), b_pair(0), b_pair(1), c0,
              c1, c2, c3);
  } else {
    Atom::fma(r0, r1, r2, r3, a_pair(0), a_pair(1), b_pair(0), c0, c1, c2, c3);
  }
  d[c_index(0)] = r0, d[c_index(1)] = r1, d[c_index(2)] = r2, d[c_index(3)] = r3;
}

template <class Atom, int kK, class T>
void test_mma(const char* name) {
  Array<T> a(16 * kK), b(kK * 8);
  Array<float> c(16 * 8), d(16 * 8);
  for (int i = 0; i < 16 * kK; ++i) a[i] = T(sample(i));
  for (int i = 0; i < kK * 8; ++i) b[i] = T(sample(3 * i + 5));
  for (int i = 0; i < 16 * 8; ++i) c[i] = sample(7 * i + 1);
  device::launch(1, 32, 0, &mma_kernel<Atom, kK, T>, a.data(), b.data(), c.data(), d.data());
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float want = c[m * 8 + n];
      for (int k = 0; k < kK; ++k) {
        want += static_cast<float>(a[m * kK + k]) * static_cast<float>(b[k * 8 + n]);
      }
      expect_equal(name, d, m * 8 + n, want);
    }
  }
}

// Subnormal, infinite and NaN operands: one product each, on the diagonal of A times a column of B.
void test_mma_special_values() {
  using T = cutlass::half_t;
  const uint16_t bits[] = {0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00};
  constexpr int kCases = sizeof(bits) / sizeof(bits[0]);
  Array<T> a(16 * 16), b(16 * 8);
  Array<float> c(16 * 8), d(16 * 8);
  for (int i = 0; i < kCases; ++i) a[i * 16 + i] = T::bitcast(bits[i]);
  for (int i = 0; i < 16 * 8; ++i) b[i] = T(1.0f);
  device::launch(1, 32, 0, &mma_kernel<cute::SM80_16x8x16_F32F16F16F32_TN, 16, T>, a.data(),
                 b.data(), c.data(), d.data());
  for (int i = 0; i < kCases; ++i) {
    const float want = static_cast<float>(T::bitcast(bits[i]));
    const float got = d[i * 8];
    expect(got == want || (got != got && want != want), "mma of a needs_masked_loop value", i, got,
           want);
  }
}

// -- ldmatrix -------------------------------------------------------------------------------------

// Shared memory holds 32 rows of eight 16-bit values, each its own index; rows are handed to the
// lanes in a permuted order.
__device__ __host__ int permuted_row(int lane) { return (lane * 5 + 3) % 32; }

template <class Atom, int kCount>
__global__ void ldmatrix_kernel(uint32_t* result) {
  auto* elements = reinterpret_cast<uint16_t*>(anyflash_smem);
  for (int i = threadIdx.x; i < 32 * 8; i += 32) elements[i] = static_cast<uint16_t>(i);
  __syncthreads();
  // Lanes whose address is not used provide nothing sensible.
  const int lane = threadIdx.x, row = lane < 8 * kCount ? permuted_row(lane) : 0;
  const auto& source = *reinterpret_cast<const uint128_t*>(elements + row * 8);
  uint32_t r[4] = {};
  if constexpr (kCount == 1) Atom::copy(source, r[0]);
  if constexpr (kCount == 2) Atom::copy(source, r[0], r[1]);
  if constexpr (kCount == 4) Atom::copy(source, r[0], r[1], r[2], r[3]);
  for (int i = 0; i < kCount; ++i) result[i * 32 + lane] = r[i];
}

template <class Atom, int kCount>
void test_ldmatrix(const char* name, bool transposed) {
  Array<uint32_t> result(32 * kCount);
  device::launch(1, 32, 32 * 8 * 2, &ldmatrix_kernel<Atom, kCount>, result.data());
  for (int matrix = 0; matrix < kCount; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      // A lane receives row lane / 4, columns 2 * (lane % 4) and the next; of the transpose if so.
      uint32_t want = 0;
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4, column = lane % 4 * 2 + half;
        if (transposed) std::swap(row, column);
        want |= static_cast<uint32_t>(permuted_row(matrix * 8 + row) * 8 + column) << (16 * half);
      }
      expect_equal(name, result, matrix * 32 + lane, want);
    }
  }
}

// -- cp.async -------------------------------------------------------------------------------------

template <class Atom, class Word, bool kZeroFill>
__global__ void cp_async_kernel(const Word* source, Word* result) {
  auto* shared = reinterpret_cast<Word*>(anyflash_smem);
  const int i = threadIdx.x;
  if constexpr (kZeroFill) {
    Atom::copy(source[i], shared[i], i % 3 != 0);
  } else {
    Atom::copy(source[i], shared[i]);
  }
  cute::cp_async_fence();
  cute::cp_async_wait<0>();
  __syncthreads();
  result[i] = shared[63 - i];
}

template <class Atom, class Word, bool kZeroFill>
void test_cp_async(const char* name) {
  constexpr int kThreads = 64, kBytes = sizeof(Word);
  Array<Word> source(kThreads), result(kThreads);
  auto* bytes = reinterpret_cast<unsigned char*>(source.data());
  for (int i = 0; i < kThreads * kBytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + 1);
  device::launch(1, kThreads, kThreads * kBytes, &cp_async_kernel<Atom, Word, kZeroFill>,
                 source.data(), result.data());
  const auto* got = reinterpret_cast<unsigned char*>(result.data());
  for (int i = 0; i < kThreads * kBytes; ++i) {
    const int from = 63 - i / kBytes;
    const int want = kZeroFill && from % 3 == 0 ? 0 : bytes[from * kBytes + i % kBytes];
    expect(got[i] == want, name, i, got[i], want);
  }
}

// A ring of three stages: wait_group<1> has to deliver all groups but the latest.
__global__ void cp_async_groups_kernel(const uint32_t* source, uint32_t* result) {
  constexpr int kStages = 3, kTiles = 8, kThreads = 64;
  auto* shared = reinterpret_cast<uint32_t*>(anyflash_smem);
  const int i = threadIdx.x;
  const auto load = [&](int tile) {
    if (tile < kTiles) {
      cute::SM80_CP_ASYNC_CACHEALWAYS<uint32_t>::copy(source[tile * kThreads + i],
                                                      shared[tile % kStages * kThreads + i]);
    }
    cute::cp_async_fence();  // empty at the end, so that the count of groups stays right
  };
  load(0);
  load(1);
  for (int tile = 0; tile < kTiles; ++tile) {
    cute::cp_async_wait<1>();
    __syncthreads();
    result[tile * kThreads + i] = shared[tile % kStages * kThreads + (i ^ 33)];
    load(tile + 2);
  }
  cute::cp_async_wait<0>();
}

void test_cp_async_groups() {
  Array<uint32_t> source(8 * 64), result(8 * 64);
  for (int i = 0; i < 8 * 64; ++i) source[i] = 1000 + i;
  device::launch(1, 64, 3 * 64 * 4, &cp_async_groups_kernel, source.data(), result.data());
  for (int i = 0; i < 8 * 64; ++i) expect_equal("cp.async groups", result, i, source[i ^ 33]);
}

// -- shfl and vote --------------------------------------------------------------------------------

constexpr int kShuffles = 10;

__global__ void shuffle_kernel(int* result) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, value = 100 + threadIdx.x;
  int* out = result + threadIdx.x * kShuffles;
  out[0] = __shfl_sync(kAll, value, 5);
  out[1] = __shfl_sync(kAll, value, lane * 3, 8);
  out[2] = __shfl_xor_sync(kAll, value, 3);
  out[3] = __shfl_up_sync(kAll, value, 2, 16);
  out[4] = __shfl_down_sync(kAll, value, 5, 16);
  out[5] = static_cast<int>(__shfl_xor_sync(kAll, 0.5f * value, 16));
  // The halves of a warp shuffle by themselves.
  if (lane < 16) {
    out[6] = __shfl_xor_sync(0x0000ffffu, value, 1);
    out[9] = static_cast<int>(__reduce_or_sync(0x0000ffffu, lane == 3 ? 0x90000000u : lane & 5));
  } else {
    out[6] = __shfl_sync(0xffff0000u, value, 16 + (lane + 1) % 16);
    out[9] = static_cast<int>(__reduce_or_sync(0xffff0000u, lane == 30 ? 6 : 0));
  }
  out[7] = static_cast<int>(__ballot_sync(kAll, lane % 3 == 0));
  out[8] = __any_sync(kAll, lane == 31) + 2 * __all_sync(kAll, lane < 31) +
           4 * __all_sync(kAll, lane < 32) + 8 * __any_sync(kAll, lane > 31);
}

void test_shuffles() {
  constexpr int kThreads = 64;
  Array<int> result(kThreads * kShuffles);
  device::launch(1, kThreads, 0, &shuffle_kernel, result.data());
  for (int thread = 0; thread < kThreads; ++thread) {
    const int lane = thread % 32, base = 100 + thread - lane, half = lane / 16 * 16;
    const int up = lane - half < 2 ? lane : lane - 2;
    const int down = lane - half + 5 < 16 ? lane + 5 : lane;
    const int partner = half == 0 ? lane ^ 1 : 16 + (lane + 1) % 16;
    const int want[kShuffles] = {base + 5,
                                 base + lane / 8 * 8 + lane * 3 % 8,
                                 base + (lane ^ 3),
                                 base + up,
                                 base + down,
                                 (base + (lane ^ 16)) / 2,
                                 base + partner,
                                 0x49249249,
                                 1 + 4,
                                 half == 0 ? static_cast<int>(0x90000005u) : 6};
    for (int i = 0; i < kShuffles; ++i) {
      expect_equal("shfl or vote", result, thread * kShuffles + i, want[i]);
    }
  }
}

// -- Barriers and atomics
// ---------------------------------------------------------------------------

// Each round passes every value on to another warp's thread.
__global__ void syncthreads_kernel(int* result) {
  auto* shared = reinterpret_cast<int*>(anyflash_smem);
  const int threads = blockDim.x, i = threadIdx.x;
  int value = i + 1000 * blockIdx.x;
  for (int round = 0; round < 5; ++round) {
    shared[i] = value;
    __syncthreads();
    value = shared[(i + 37) % threads];
    __syncthreads();
  }
  result[blockIdx.x * threads + i] = value;
}

__global__ void vote_kernel(int* result) {
  const int i = threadIdx.x;
  int* out = result + i * 4;
  out[0] = __syncthreads_count(i % 5 == 0);
  out[1] = __syncthreads_or(i == 77) + 2 * __syncthreads_or(i > 1000);
  out[2] = __syncthreads_and(i != 77) + 2 * __syncthreads_and(i < 1000);
  out[3] = __syncthreads_count(i < 3);
}

__global__ void syncwarp_kernel(int* result) {
  auto* shared = reinterpret_cast<volatile int*>(anyflash_smem);
  const int i = threadIdx.x, lane = i % 32;
  shared[i] = i;
  __syncwarp();
  int value = shared[i ^ 31];
  if (lane < 8) {
    // Not to shared[i], which lanes that have not come this far may still read.
    shared[blockDim.x + i] = value + 100;
    __syncwarp(0xffu);
    value = shared[blockDim.x + (i ^ 7)];
  }
  result[i] = value;
}

void test_barriers() {
  constexpr int kThreads = 128, kBlocks = 3;
  Array<int> result(kBlocks * kThreads), warps(kThreads);
  device::launch(kBlocks, kThreads, kThreads * 4, &syncthreads_kernel, result.data());
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int want = (i % kThreads + 5 * 37) % kThreads + 1000 * (i / kThreads);
    expect_equal("__syncthreads", result, i, want);
  }
  Array<int> votes(kThreads * 4);
  device::launch(1, kThreads, 0, &vote_kernel, votes.data());
  for (int i = 0; i < kThreads * 4; ++i) {
    const int want[] = {26, 1, 2, 3};
    expect_equal("__syncthreads_count, _or or _and", votes, i, want[i % 4]);
  }
  device::launch(1, kThreads, 2 * kThreads * 4, &syncwarp_kernel, warps.data());
  for (int i = 0; i < kThreads; ++i) {
    const int want = i % 32 < 8 ? (i ^ 7 ^ 31) + 100 : i ^ 31;
    expect_equal("__syncwarp", warps, i, want);
  }
}

__global__ void atomics_kernel(float* sums, unsigned* counts, int* extremes) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&sums[i % 4], 0.5f * (i % 8));
  atomicAdd(&counts[i % 3], 1u);
  atomicMax(&extremes[0], (i * 7) % 101);
  atomicMin(&extremes[1], 50 - (i * 7) % 101);
}

void test_atomics() {
  constexpr int kThreads = 64, kBlocks = 3;
  Array<float> sums(4), want_sums(4);
  Array<unsigned> counts(3), want_counts(3);
  Array<int> extremes(2);
  device::launch(kBlocks, kThreads, 0, &atomics_kernel, sums.data(), counts.data(),
                 extremes.data());
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    want_sums[i % 4] += 0.5f * (i % 8);
    want_counts[i % 3] += 1;
  }
  for (int i = 0; i < 4; ++i) expect_equal("atomicAdd of float", sums, i, want_sums[i]);
  for (int i = 0; i < 3; ++i) expect_equal("atomicAdd of unsigned", counts, i, want_counts[i]);
  expect_equal("atomicMax", extremes, 0, 100);
  expect_equal("atomicMin", extremes, 1, -50);
}

void test_all() {
  using namespace cute;
  test_mma<SM80_16x8x16_F32F16F16F32_TN, 16, cutlass::half_t>("mma.m16n8k16.f16");
  test_mma<SM80_16x8x16_F32BF16BF16F32_TN, 16, cutlass::bfloat16_t>("mma.m16n8k16.bf16");
  test_mma<SM80_16x8x8_F32F16F16F32_TN, 8, cutlass::half_t>("mma.m16n8k8.f16");
  test_mma<SM80_16x8x8_F32BF16BF16F32_TN, 8, cutlass::bfloat16_t>("mma.m16n8k8.bf16");
  test_mma_special_values();
  test_ldmatrix<SM75_U32x1_LDSM_N, 1>("ldmatrix.x1", false);
  test_ldmatrix<SM75_U32x2_LDSM_N, 2>("ldmatrix.x2", false);
  test_ldmatrix<SM75_U32x4_LDSM_N, 4>("ldmatrix.x4", false);
  test_ldmatrix<SM75_U16x2_LDSM_T, 1>("ldmatrix.x1.trans", true);
  test_ldmatrix<SM75_U16x4_LDSM_T, 2>("ldmatrix.x2.trans", true);
  test_ldmatrix<SM75_U16x8_LDSM_T, 4>("ldmatrix.x4.trans", true);
  test_cp_async<SM80_CP_ASYNC_CACHEALWAYS<uint32_t>, uint32_t, false>("cp.async.ca 4");
  test_cp_async<SM80_CP_ASYNC_CACHEALWAYS<uint64_t>, uint64_t, false>("cp.async.ca 8");
  test_cp_async<SM80_CP_ASYNC_CACHEALWAYS<uint128_t>, uint128_t, false>("cp.async.ca 16");
  test_cp_async<SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>, uint128_t, false>("cp.async.cg 16");
  test_cp_async<SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>, uint32_t, true>("cp.async.ca 4 zfill");
  test_cp_async<SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint64_t>, uint64_t, true>("cp.async.ca 8 zfill");
  test_cp_async<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, uint128_t, true>("cp.async.cg zfill");
  test_cp_async_groups();
  test_shuffles();
  test_barriers();
  test_atomics();
}

}  // namespace

int main() {
#if defined(ANYFLASH_EMULATED)
  for (uint64_t seed = 0; seed < 12; ++seed) {
    emu::options().seed = seed;
    test_all();
  }
#else
  test_all();
#endif
  if (g_failures != 0) std::printf("%d values are wrong\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
