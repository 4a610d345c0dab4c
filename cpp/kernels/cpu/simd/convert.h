// Rows of a tensor to and from the type that the arithmetic runs in.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd/vector.h"
#include "params.h"

#if defined(__F16C__) && defined(__GNUC__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#endif

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

// Of a boolean bias: any byte but 0 keeps the key.
struct Keep {
  unsigned char value;
};

// The type of scores, probabilities and sums for elements of type E.
template <typename E>
struct Compute {
  using Type = float;
};
template <>
struct Compute<double> {
  using Type = double;
};

ANYFLASH_CPU_INLINE std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

ANYFLASH_CPU_INLINE float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The conversions of 16-bit types have no branch, so that the compiler vectorises loops over them.

ANYFLASH_CPU_INLINE float to_compute(float x) { return x; }
ANYFLASH_CPU_INLINE double to_compute(double x) { return x; }

ANYFLASH_CPU_INLINE float to_compute(Keep x) { return x.value != 0 ? 0.0f : -kInfinity; }

ANYFLASH_CPU_INLINE float to_compute(BFloat16 x) {
  return bits_float(static_cast<std::uint32_t>(x.bits) << 16);
}

ANYFLASH_CPU_INLINE float to_compute(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  // Exponent 1 to 30: move the field, change the bias from 15 to 127. 31 (inf, NaN): to 255.
  const std::uint32_t bias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
  const std::uint32_t normal = (magnitude << 13) + bias;
  // Exponent 0: the mantissa counts units of 2^-24; exact in a float.
  const std::uint32_t small =
      float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  return bits_float(sign | (magnitude < 0x400u ? small : normal));
}

ANYFLASH_CPU_INLINE void from_compute(float x, float* out) { *out = x; }
ANYFLASH_CPU_INLINE void from_compute(double x, double* out) { *out = x; }
ANYFLASH_CPU_INLINE void from_compute(double x, float* out) { *out = static_cast<float>(x); }

// Round to nearest even: add half a unit of the last kept bit, less one where that bit is even.
ANYFLASH_CPU_INLINE void from_compute(float x, BFloat16* out) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // A NaN whose payload is in the low half would turn into infinity: keep it quiet instead.
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

ANYFLASH_CPU_INLINE void from_compute(float x, Half* out) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal: bias 127 to 15, 23 mantissa bits to 10; a carry into the exponent is right, up to inf.
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: 1/2 has units of 2^-24, as half's subnormals have, and the addition rounds.
  const std::uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t finite = magnitude < (113u << 23) ? small : normal;
  // 65520 is the least number that rounds to infinity.
  out->bits = static_cast<std::uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
}

// Contiguous elements to the compute type.
template <typename E, typename T>
ANYFLASH_CPU_INLINE void load_contiguous(const E* src, int n, T* dst) {
  for (int i = 0; i < n; ++i) {
    dst[i] = static_cast<T>(to_compute(src[i]));
  }
}

// One instruction for a vector of halves, where the portable code takes about ten.
#if defined(__F16C__) && defined(__GNUC__)
ANYFLASH_CPU_INLINE void load_contiguous(const Half* src, int n, float* dst) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    __m256i x;
    std::memcpy(&x, src + i, sizeof(x));
    const __m512 y = _mm512_maskz_cvtph_ps(0xffff, x);  // GCC 12 warns in the other form
    std::memcpy(dst + i, &y, sizeof(y));
  }
#endif
  for (; i + 8 <= n; i += 8) {
    __m128i x;
    std::memcpy(&x, src + i, sizeof(x));
    const __m256 y = _mm256_cvtph_ps(x);
    std::memcpy(dst + i, &y, sizeof(y));
  }
  for (; i < n; ++i) {
    dst[i] = to_compute(src[i]);
  }
}
#elif defined(__aarch64__) && defined(__GNUC__)
ANYFLASH_CPU_INLINE void load_contiguous(const Half* src, int n, float* dst) {
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    float16x4_t x;
    std::memcpy(&x, src + i, sizeof(x));
    vst1q_f32(dst + i, vcvt_f32_f16(x));
  }
  for (; i < n; ++i) {
    dst[i] = to_compute(src[i]);
  }
}
#endif

// dst[i] = src[i * stride]
template <typename E, typename T>
inline void load_row(const E* src, std::int64_t stride, int n, T* dst) {
  if (stride == 1) {
    load_contiguous(src, n, dst);
    return;
  }
  for (int i = 0; i < n; ++i) {
    dst[i] = static_cast<T>(to_compute(src[i * stride]));
  }
}

// The same without a conversion.
template <typename E>
inline void copy_row(const E* src, std::int64_t stride, int n, E* dst) {
  if (stride == 1) {
    // Parts of a constant size need no call of a function.
    constexpr int kPart = kVectorBytes / static_cast<int>(sizeof(E));
    int i = 0;
    for (; i + kPart <= n; i += kPart) std::memcpy(dst + i, src + i, kVectorBytes);
    for (; i < n; ++i) dst[i] = src[i];
    return;
  }
  for (int i = 0; i < n; ++i) dst[i] = src[i * stride];
}

// dst[i * stride] = src[i], rounded to nearest even
template <typename E, typename T>
inline void store_row(const T* src, int n, E* dst, std::int64_t stride) {
  if (stride == 1) {
    for (int i = 0; i < n; ++i) {
      from_compute(src[i], dst + i);
    }
    return;
  }
  for (int i = 0; i < n; ++i) {
    from_compute(src[i], dst + i * stride);
  }
}

// Element `at` of a tensor of numbers.
inline double read_number(const BroadcastTensor& x, std::int64_t at) {
  switch (x.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(x.data)[at];
    case DType::kFloat16:
      return to_compute(static_cast<const Half*>(x.data)[at]);
    case DType::kBFloat16:
      return to_compute(static_cast<const BFloat16*>(x.data)[at]);
    default:
      return static_cast<const float*>(x.data)[at];
  }
}

// dst[i] = element at + i * stride of a bias; of a boolean one 0 where the key is kept, else -inf.
template <typename T>
inline void read_bias(const BroadcastTensor& x, std::int64_t at, std::int64_t stride, int n,
                      T* dst) {
  switch (x.dtype) {
    case DType::kFloat64:
      return load_row(static_cast<const double*>(x.data) + at, stride, n, dst);
    case DType::kFloat16:
      return load_row(static_cast<const Half*>(x.data) + at, stride, n, dst);
    case DType::kBFloat16:
      return load_row(static_cast<const BFloat16*>(x.data) + at, stride, n, dst);
    case DType::kFloat32:
      return load_row(static_cast<const float*>(x.data) + at, stride, n, dst);
    default:
      break;
  }
  load_row(static_cast<const Keep*>(x.data) + at, stride, n, dst);
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
