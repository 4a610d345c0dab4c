// The device functions of CUDA that kernels call by name. Included by emu.hpp.
//
// Fast variants are as exact as their slow ones here: ex2.approx and its like are not modelled, so
// tolerances stay those of a GPU.
#pragma once

#include <cuda_fp16.h>
#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emu.hpp"

// -- Barriers and fences ------------------------------------------------------------------------

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emu::syncthreads_count(false, file, line);
}
inline int __syncthreads_count(int predicate, const char* file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
  return emu::syncthreads_count(predicate != 0, file, line);
}
inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
  return emu::syncthreads_count(predicate != 0, file, line) != 0;
}
inline int __syncthreads_and(int predicate, const char* file = __builtin_FILE(),
                             int line = __builtin_LINE()) {
  return emu::syncthreads_count(predicate == 0, file, line) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::syncwarp(mask); }

// Order between blocks comes from the integer atomics below.
inline void __threadfence() {}
inline void __threadfence_block() {}

// -- Warp-wide exchange -------------------------------------------------------------------------

namespace emu {

template <class T>
T shuffle_value(uint32_t mask, const T& value, int source_lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source_lane);
  T result;
  std::memcpy(static_cast<void*>(&result), &bits, sizeof(T));
  return result;
}

// `width` cuts the warp into segments; a source outside of the lane's own means the lane itself.
inline int segment_begin(int lane, int width) { return lane & ~(width - 1); }

}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int begin = emu::segment_begin(emu::lane_index(), width);
  return emu::shuffle_value(mask, value, begin + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::lane_index();
  const int source = lane - static_cast<int>(delta);
  return emu::shuffle_value(mask, value, source < emu::segment_begin(lane, width) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::lane_index();
  const int source = lane + static_cast<int>(delta);
  const int end = emu::segment_begin(lane, width) + width;
  return emu::shuffle_value(mask, value, source < end ? source : lane);
}
// Unlike the others, xor may reach into earlier segments, only not into later ones.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = emu::lane_index();
  const int source = lane ^ lane_mask;
  const int end = emu::segment_begin(lane, width) + width;
  return emu::shuffle_value(mask, value, source < end ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emu::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emu::ballot(mask, !predicate) == 0; }

inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  unsigned result = 0;
  for (int bit = 0; bit < 32; ++bit) {
    if (emu::ballot(mask, (value >> bit & 1) != 0) != 0) result |= 1u << bit;
  }
  return result;
}

// -- Atomics: real ones, so that Thread Sanitizer tells them from plain accesses -----------------

namespace emu {

// Floating-point atomics add up results and order nothing. Integer ones may be the counter or the
// lock of a protocol whose fences (__threadfence) Thread Sanitizer does not know, so they order.
template <class T>
inline constexpr int kAtomicOrder =
    std::is_floating_point_v<T> ? __ATOMIC_RELAXED : __ATOMIC_ACQ_REL;

template <class T, class Combine>
T atomic_update(T* address, Combine combine) {
  constexpr int kLoadOrder = std::is_floating_point_v<T> ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE;
  T old;
  __atomic_load(address, &old, kLoadOrder);
  T desired = combine(old);
  while (!__atomic_compare_exchange(address, &old, &desired, false, kAtomicOrder<T>, kLoadOrder)) {
    desired = combine(old);
  }
  return old;
}

template <class T>
using SameType = std::common_type_t<T>;  // keeps an argument out of deduction

}  // namespace emu

template <class T>
T atomicAdd(T* address, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
inline void atomicAdd(float4* address, const float4& value) {
  for (int i = 0; i < 4; ++i) atomicAdd(&address->x + i, (&value.x)[i]);
}
template <class T>
T atomicMax(T* address, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicOr(T* address, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T old) { return static_cast<T>(old | value); });
}
template <class T>
T atomicMin(T* address, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicExch(T* address, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, emu::SameType<T> compare, emu::SameType<T> value) {
  return emu::atomic_update(address, [=](T old) { return old == compare ? value : old; });
}

// -- Memory and bits ----------------------------------------------------------------------------

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, const emu::SameType<T>& value) {
  *address = value;
}

namespace emu {
template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace emu

inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (static_cast<uint64_t>(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = (selector >> (4 * i)) & 7;
    result |= static_cast<unsigned>((bytes >> (8 * byte)) & 0xff) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>((both << (shift & 31)) >> 32);
}

// -- Arithmetic -----------------------------------------------------------------------------------

// glibc's <math.h> declares these names without exporting them, hence the linkage.
extern "C" {
inline float __expf(float x) noexcept { return expf(x); }
inline float __exp10f(float x) noexcept { return powf(10.0f, x); }
inline float __logf(float x) noexcept { return logf(x); }
inline float __log2f(float x) noexcept { return log2f(x); }
inline float __log10f(float x) noexcept { return log10f(x); }
inline float __sinf(float x) noexcept { return sinf(x); }
inline float __cosf(float x) noexcept { return cosf(x); }
inline float __powf(float x, float y) noexcept { return powf(x, y); }
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// Named by CUTLASS's headers, so it has to exist.
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  const float2 a = __half22float2(x), b = __half22float2(y), c = __half22float2(z);
  return __floats2half2_rn(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// Without a template, as in CUDA: mixed arguments convert instead of failing.
#define EMU_MIN_MAX(T)                                       \
  inline constexpr T min(T a, T b) { return b < a ? b : a; } \
  inline constexpr T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
