// The sums of the backward that are not products: delta of each row before, dsinks and
// dalibi_slopes after.
#pragma once

#include <math.h>

#include <cstdint>

#include "cpu/backward/scratch.h"
#include "cpu/simd/convert.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline void write_number(const GradientOutput& x, std::int64_t at, double value) {
  switch (x.dtype) {
    case DType::kFloat64:
      return from_compute(value, static_cast<double*>(x.data) + at);
    case DType::kFloat16:
      return from_compute(static_cast<float>(value), static_cast<Half*>(x.data) + at);
    case DType::kBFloat16:
      return from_compute(static_cast<float>(value), static_cast<BFloat16*>(x.data) + at);
    default:
      return from_compute(value, static_cast<float*>(x.data) + at);
  }
}

// delta = rowsum(dO out) - dlse of a block of rows of one head after the other. Packed sequences
// are one long one here.
template <typename E>
class DeltaTasks {
 public:
  using T = typename Compute<E>::Type;

  DeltaTasks(const BackwardParams& p, const RowSums<T>& sums, const BackwardScratch<T>& scratch)
      : p_(p), a_(p.attention), sums_(sums), dout_(scratch.s), out_(scratch.ds) {}

  static std::int64_t tasks(const BackwardParams& p, const RowSums<T>& sums) {
    return p.attention.heads * blocks(sums);
  }

  void run(std::int64_t number) const {
    const int head = static_cast<int>(number / blocks(sums_));
    const std::int64_t first = number % blocks(sums_) * kRows;
    const std::int64_t end = first + kRows < sums_.rows ? first + kRows : sums_.rows;
    for (std::int64_t i = first; i < end; ++i) {
      const bool packed = a_.cu_seqlens_q != nullptr;
      const std::int64_t batch = packed ? 0 : i / a_.seqlen_q;
      sum_row(head, batch, packed ? i : i % a_.seqlen_q, head * sums_.rows + i);
    }
  }

 private:
  static constexpr int kRows = 64;
  static constexpr int kChunk = kBlockM * kBlockN;  // columns that fit the buffers

  static std::int64_t blocks(const RowSums<T>& sums) { return (sums.rows + kRows - 1) / kRows; }

  void sum_row(int head, std::int64_t batch, std::int64_t row, std::int64_t to) const {
    const auto offset = [&](const Strides& stride) {
      return batch * stride.batch + row * stride.row + head * stride.head;
    };
    const T lse = static_cast<T>(p_.lse[offset(p_.lse_stride)]);
    // A NaN is kept: the row's gradients become NaN.
    const bool sees = lse != T(kInfinity) && lse != T(-kInfinity);
    sums_.lse[to] = sees ? lse : T(kInfinity);
    sums_.delta[to] = T(0);
    if (!sees) return;
    double sum = 0;
    for (int c = 0; c < a_.head_dim_v; c += kChunk) {
      const int count = a_.head_dim_v - c < kChunk ? a_.head_dim_v - c : kChunk;
      load(p_.dout, p_.dout_dtype, offset(p_.dout_stride), p_.dout_stride.col, c, count, dout_);
      load(p_.out, p_.out_dtype, offset(p_.out_stride), p_.out_stride.col, c, count, out_);
      for (int i = 0; i < count; ++i) {
        // With a sink, the lse of a row that sees no key is finite: its output is 0, its dout may
        // be anything. Where a key is seen, dP holds what dout holds.
        if (out_[i] != T(0)) sum += static_cast<double>(dout_[i]) * static_cast<double>(out_[i]);
      }
    }
    if (p_.dlse != nullptr) sum -= static_cast<double>(p_.dlse[offset(p_.dlse_stride)]);
    sums_.delta[to] = static_cast<T>(sum);
  }

  void load(const void* data, DType dtype, std::int64_t at, std::int64_t stride, int first,
            int count, T* to) const {
    if (dtype == DType::kFloat32) {
      load_row(static_cast<const float*>(data) + at + first * stride, stride, count, to);
    } else {
      load_row(static_cast<const E*>(data) + at + first * stride, stride, count, to);
    }
  }

  const BackwardParams& p_;
  const Attention& a_;
  const RowSums<T> sums_;
  T* dout_;
  T* out_;
};

// dsinks and dalibi_slopes of one head after the other.
template <typename T>
class HeadSums {
 public:
  HeadSums(const BackwardParams& p, const RowSums<T>& sums) : p_(p), a_(p.attention), sums_(sums) {}

  void run(std::int64_t number) const {
    const int head = static_cast<int>(number);
    if (p_.dsinks.data != nullptr) sum_sinks(head);
    if (p_.dalibi_slopes.data != nullptr) sum_slopes(head);
  }

 private:
  // dsink = -sum e^(sink - lse) delta
  void sum_sinks(int head) const {
    const double sink = read_number(a_.sinks, head * a_.sinks.stride.head);
    double sum = 0;
    for (std::int64_t index = 0; index < a_.batch; ++index) {
      const Sequence sequence = sequence_of(a_, index);
      const std::int64_t first = sums_.offset(p_, sequence, head);
      for (std::int64_t i = first; i < first + sequence.seqlen_q; ++i) {
        if (sums_.lse[i] == T(kInfinity)) continue;
        sum -=
            ::exp(sink - static_cast<double>(sums_.lse[i])) * static_cast<double>(sums_.delta[i]);
      }
    }
    write_number(p_.dsinks, head * p_.dsinks.stride.head, sum);
  }

  void sum_slopes(int head) const {
    const Strides& stride = p_.dalibi_slopes.stride;
    const auto write = [&](std::int64_t index, double sum) {
      write_number(p_.dalibi_slopes, index * stride.batch + head * stride.head, sum);
    };
    double sum = 0;
    for (std::int64_t index = 0; index < a_.batch; ++index) {
      const Sequence sequence = sequence_of(a_, index);
      const double* const slope = sums_.slope + sums_.offset(p_, sequence, head);
      for (int i = 0; i < sequence.seqlen_q; ++i) sum += slope[i];
      if (stride.batch == 0) continue;  // one slope for all sequences
      write(index, sum);
      sum = 0;
    }
    if (stride.batch == 0) write(0, sum);
  }

  const BackwardParams& p_;
  const Attention& a_;
  const RowSums<T> sums_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
