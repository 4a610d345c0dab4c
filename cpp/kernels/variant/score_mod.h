// What happens to a score between the product and the softmax: softcap, bias, ALiBi.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/softmax.h"
#include "params.h"
#include "variant/broadcast_tensor.h"
#include "variant/sequence.h"

namespace anyflash {

// How much of ScoreMod a loop over tiles holds: less code runs faster, also than code skipped.
enum class ScoreOps {
  kNone,
  kAlibi,         // with slopes that are not negative
  kAnyAlibi,      // with any slopes
  kRanges,        // key ranges, of which ScoreMod knows nothing
  kAlibiRanges,   // both
  kSoftcap,       // not a large one
  kSoftcapAlibi,  // any softcap and any slope
  kAll,           // and a bias
};

// Whether scores may be near the ends of fp32's range: its lowest number is a common bias.
constexpr bool has_wide_range(ScoreOps ops) { return ops == ScoreOps::kAll; }

// s = scale * qk;  s = softcap * tanh(s / softcap);  s += bias - slope * |i + shift - j|, with
// the sequence's shift. A bias of -inf, or a boolean one that says no, hides the key whatever qk
// is.
//
// Scores come in units of their own: `unit` is the natural value of 1, and scale what a product is
// multiplied by to get there. Tensors of scores are (row, col) views of accumulators, `coordinates`
// their places relative to (row0, col0), which are the same offsets from a thread's first place in
// every thread. For a bias, a thread's columns come in runs of eight neighbouring keys that begin
// at multiples of eight. A variant asks for that (kKeysInRuns), and the family orders keys so.
class ScoreMod {
 public:
  ANYFLASH_DEVICE ScoreMod(const Attention& p, const Sequence& sequence, int64_t batch, int head,
                           float scale, float unit)
      : scale_(scale),
        softcap_(static_cast<float>(p.softcap) / unit),
        accurate_(p.softcap > kAccurateSoftcap),
        bias_dtype_(p.bias.dtype),
        bias_row_bytes_(p.bias.stride.row * bias_bytes()),
        bias_col_stride_(static_cast<int>(p.bias.stride.col)),
        seqlen_q_(sequence.seqlen_q),
        seqlen_k_(sequence.seqlen_k),
        shift_(sequence.shift) {
    if (p.bias.data != nullptr) {
      const int64_t offset = batch * p.bias.stride.batch + head * p.bias.stride.head;
      bias_ = static_cast<const unsigned char*>(p.bias.data) + offset * bias_bytes();
      // Runs of eight are one or two aligned loads.
      const int64_t places = reinterpret_cast<int64_t>(bias_) | bias_row_bytes_;
      bias_vectors_ = bias_col_stride_ == 1 && places % min(16, 8 * bias_bytes()) == 0;
    }
    if (p.alibi_slopes.data != nullptr) {
      const Strides& stride = p.alibi_slopes.stride;
      slope_ = load_float(p.alibi_slopes, batch * stride.batch + head * stride.head) / unit;
    }
  }

  // Without bias and ALiBi.
  ANYFLASH_DEVICE ScoreMod(const Attention& p, float scale)
      : scale_(scale),
        softcap_(static_cast<float>(p.softcap)),
        accurate_(p.softcap > kAccurateSoftcap),
        bias_dtype_(DType::kFloat32),
        bias_row_bytes_(0),
        bias_col_stride_(0),
        seqlen_q_(0),
        seqlen_k_(0),
        shift_(0) {}

  // Whether code with `part` of the operations alone, kAlibi or kSoftcap, does all that is asked.
  ANYFLASH_DEVICE bool covered_by(ScoreOps part) const {
    if (accurate_ || slope_ < 0.0f || bias_ != nullptr) return false;
    return part == ScoreOps::kAlibi ? softcap_ == 0.0f : slope_ == 0.0f && softcap_ > 0.0f;
  }

  // The scale and the softcap alone.
  template <class Scores>
  ANYFLASH_DEVICE void scale_and_cap(Scores& scores) const {
    if (accurate_) cap_accurately(scores);
    else if (softcap_ > 0.0f) cap(scores);
    else multiply(scores);
  }

  // Whether a bias may hide keys, in any tile.
  ANYFLASH_DEVICE bool may_hide_anywhere() const { return bias_ != nullptr; }

  // Whether the bias leaves the key visible.
  ANYFLASH_DEVICE bool keep(int row, int col) const {
    if (bias_ == nullptr) return true;
    const uint32_t raw = load(row, col);
    return bias_dtype_ == DType::kBool ? raw != 0 : decode(raw) != -INFINITY;
  }

  // Asks for the biases of a thread's scores, so that they arrive while the scores are computed.
  // Each run of eight is packed into the first of the eight words of `raw` at its place. kEdge:
  // keys of the tile may not exist.
  template <bool kEdge, class Raw, class Coordinates>
  ANYFLASH_DEVICE void prefetch(Raw& raw, const Coordinates& coordinates, int row0,
                                int col0) const {
    using namespace cute;
    if (bias_ == nullptr) return;
    with_bias_type([&](auto type) {
      CUTE_UNROLL
      for (int i = 0; i < size<0>(raw); ++i) {
        const int row = min(row0 + get<0>(coordinates(i, 0)), seqlen_q_ - 1);
        const auto* const data =
            reinterpret_cast<const decltype(type)*>(bias_ + row * bias_row_bytes_);
        CUTE_UNROLL
        for (int run = 0; run < size<1>(raw); run += 8) {
          const int col = col0 + get<1>(coordinates(i, run));
          if (kEdge || !bias_vectors_) load_elements(raw, i, run, data, col);
          else load_vectors(raw, i, run, data + col);
        }
      }
    });
  }

  // kScale: scale is not 1.
  template <ScoreOps kOps, bool kScale, class Scores, class Raw, class Coordinates>
  ANYFLASH_DEVICE void apply(Scores& scores, const Raw& raw, const Coordinates& coordinates,
                             int row0, int col0) const {
    constexpr bool kAny = kOps == ScoreOps::kSoftcapAlibi || kOps == ScoreOps::kAll;
    if constexpr (kOps == ScoreOps::kSoftcap) {
      cap(scores);
      return;
    }
    constexpr bool kCaps = kOps != ScoreOps::kAlibi && kOps != ScoreOps::kAnyAlibi;
    if (kAny && accurate_) cap_accurately(scores);
    else if (kCaps && softcap_ > 0.0f) cap(scores);
    else if (kScale) multiply(scores);
    add<kOps, kScale>(scores, raw, coordinates, row0, col0);
  }

  // For the backward: the whole of apply<kAll, true>(), and the slope of the softcap,
  //   d(softcap tanh(s / softcap)) / ds = 1 - tanh(s / softcap)^2,
  // at each score where caps().
  template <class Scores, class Slopes, class Raw, class Coordinates>
  ANYFLASH_DEVICE void apply(Scores& scores, Slopes& slopes, const Raw& raw,
                             const Coordinates& coordinates, int row0, int col0) const {
    if (!caps()) {
      multiply(scores);
    } else {
      if (accurate_) cap_accurately(scores);
      else cap(scores);
      const float inverse = 1.0f / softcap_;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        const float x = scores(i) * inverse;
        slopes(i) = 1.0f - x * x;
      }
    }
    add<ScoreOps::kAll, true>(scores, raw, coordinates, row0, col0);
  }
  ANYFLASH_DEVICE bool caps() const { return softcap_ > 0.0f; }

  // -|i + shift - j|, what a slope is multiplied by.
  ANYFLASH_DEVICE float slope_factor(int row, int col) const {
    return -fabsf(static_cast<float>(row + shift_ - col));
  }

 private:
  // What is added to a score.
  template <ScoreOps kOps, bool kScale, class Scores, class Raw, class Coordinates>
  ANYFLASH_DEVICE void add(Scores& scores, const Raw& raw, const Coordinates& coordinates, int row0,
                           int col0) const {
    if constexpr (kOps == ScoreOps::kAll) {
      if (bias_ != nullptr) add_bias(scores, raw);
    }
    // With nothing else to do there is a slope, for sure; the generic kernel may have a block map.
    constexpr bool kSlopeOnly = kOps == ScoreOps::kAlibi && !kScale;
    if (kSlopeOnly || slope_ > 0.0f) {
      add_slope(scores, coordinates, row0, col0, [](float s, float t) { return s - fabsf(t); });
    } else if (kOps != ScoreOps::kAlibi && slope_ < 0.0f) {
      add_slope(scores, coordinates, row0, col0, [](float s, float t) { return s + fabsf(t); });
    }
  }

  ANYFLASH_DEVICE int bias_bytes() const {
    return bias_dtype_ == DType::kFloat32 ? 4 : bias_dtype_ == DType::kBool ? 1 : 2;
  }

  ANYFLASH_DEVICE uint32_t load(int row, int col) const {
    const int64_t offset = row * bias_row_bytes_ + int64_t{col} * bias_col_stride_ * bias_bytes();
    const unsigned char* const address = bias_ + offset;
    if (bias_dtype_ == DType::kFloat32) return *reinterpret_cast<const uint32_t*>(address);
    if (bias_dtype_ == DType::kBool) return *address;
    return *reinterpret_cast<const uint16_t*>(address);
  }

  ANYFLASH_DEVICE float decode(uint32_t raw) const {
    if (bias_dtype_ == DType::kFloat32) return __uint_as_float(raw);
    if (bias_dtype_ == DType::kBFloat16) return __uint_as_float(raw << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
  }

  // Calls function(unsigned integer of an element's size).
  template <class Function>
  ANYFLASH_DEVICE void with_bias_type(const Function& function) const {
    if (bias_dtype_ == DType::kFloat32) function(uint32_t{});
    else if (bias_dtype_ == DType::kBool) function(uint8_t{});
    else function(uint16_t{});
  }

  // Eight neighbouring elements by one or two loads.
  template <class Raw, class Type>
  ANYFLASH_DEVICE static void load_vectors(Raw& raw, int i, int run, const Type* data) {
    constexpr int kWords = 8 * sizeof(Type) / 4;
    constexpr int kVector = kWords < 4 ? kWords : 4;
    using Vector = cute::uint_bit_t<32 * kVector>;
    CUTE_UNROLL
    for (int first = 0; first < kWords; first += kVector) {
      auto words = cute::make_tensor<uint32_t>(cute::Int<kVector>{});
      *reinterpret_cast<Vector*>(words.data()) =
          *reinterpret_cast<const Vector*>(data + first * (4 / sizeof(Type)));
      CUTE_UNROLL
      for (int word = 0; word < kVector; ++word) raw(i, run + first + word) = words(word);
    }
  }

  // The same for any stride and alignment, one by one; keys that do not exist repeat the last.
  template <class Raw, class Type>
  ANYFLASH_DEVICE void load_elements(Raw& raw, int i, int run, const Type* data, int col) const {
    constexpr int kPerWord = 4 / sizeof(Type);
    CUTE_UNROLL
    for (int word = 0; word < 8 / kPerWord; ++word) {
      uint32_t packed = 0;
      CUTE_UNROLL
      for (int j = 0; j < kPerWord; ++j) {
        const int key = min(col + word * kPerWord + j, seqlen_k_ - 1);
        const uint32_t element = data[int64_t{key} * bias_col_stride_];
        packed |= element << (32 / kPerWord * j);
      }
      raw(i, run + word) = packed;
    }
  }

  template <class Scores>
  ANYFLASH_DEVICE void multiply(Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) scores(i) *= scale_;
  }

  // softcap * tanh(x) = softcap - 2 softcap / (1 + exp(2 x)),  x = scale * qk / softcap: exact to
  // a few units of softcap * 2^-24.
  ANYFLASH_DEVICE float capped(float qk, float factor) const {
    return softcap_ - 2.0f * softcap_ * __fdividef(1.0f, 1.0f + exp2f(qk * factor));
  }

  template <class Scores>
  ANYFLASH_DEVICE void cap(Scores& scores) const {
    const float factor = 2.0f * kLog2E * scale_ / softcap_;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) scores(i) = capped(scores(i), factor);
  }

  // For a softcap above kAccurateSoftcap, small x take the series of tanh.
  template <class Scores>
  ANYFLASH_DEVICE void cap_accurately(Scores& scores) const {
    const float inverse = 1.0f / softcap_;
    const float factor = 2.0f * kLog2E * scale_ * inverse;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      const float s = scores(i) * scale_;
      const float x = s * inverse;
      const float x2 = x * x;
      const float series =
          s + s * x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835))));
      scores(i) = fabsf(x) < 0.3f ? series : capped(scores(i), factor);
    }
  }

  // to_float(word, j) is element j of a packed word.
  template <int kPerWord, class Scores, class Raw, class ToFloat>
  ANYFLASH_DEVICE static void add_packed(Scores& scores, const Raw& raw, const ToFloat& to_float) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size<0>(scores); ++i) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(scores); ++col) {
        const float bias = to_float(raw(i, col / 8 * 8 + col % 8 / kPerWord), col % kPerWord);
        scores(i, col) = bias == -INFINITY ? -INFINITY : scores(i, col) + bias;
      }
    }
  }

  template <class Scores, class Raw>
  ANYFLASH_DEVICE void add_bias(Scores& scores, const Raw& raw) const {
    if (bias_dtype_ == DType::kFloat32) {
      add_packed<1>(scores, raw, [](uint32_t x, int) { return __uint_as_float(x); });
    } else if (bias_dtype_ == DType::kBFloat16) {
      add_packed<2>(scores, raw, [](uint32_t x, int j) {
        return __uint_as_float(j == 0 ? x << 16 : x & 0xffff0000u);
      });
    } else if (bias_dtype_ == DType::kFloat16) {
      add_packed<2>(scores, raw, [](uint32_t x, int j) {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(x >> (16 * j))));
      });
    } else {
      add_packed<4>(scores, raw, [](uint32_t x, int j) {
        return (x >> (8 * j) & 0xffu) != 0 ? 0.0f : -INFINITY;
      });
    }
  }

  // combine(s, slope * (i + shift - j)): one FFMA and one FADD, which takes the absolute value for
  // nothing, a score.
  template <class Scores, class Coordinates, class Combine>
  ANYFLASH_DEVICE void add_slope(Scores& scores, const Coordinates& coordinates, int row0, int col0,
                                 const Combine& combine) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int first = get<1>(coordinates(row, 0));
      const int diagonal = row0 + get<0>(coordinates(row, 0)) + shift_ - col0 - first;
      const float distance = static_cast<float>(diagonal) * slope_;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int offset = get<1>(coordinates(row, col)) - first;  // a constant
        scores(row, col) =
            combine(scores(row, col), distance - static_cast<float>(offset) * slope_);
      }
    }
  }

  float scale_;
  float softcap_;
  bool accurate_;
  float slope_ = 0.0f;
  const unsigned char* bias_ = nullptr;
  DType bias_dtype_;
  int64_t bias_row_bytes_;
  int bias_col_stride_;
  bool bias_vectors_ = false;
  int seqlen_q_;
  int seqlen_k_;
  int shift_;
};

}  // namespace anyflash
