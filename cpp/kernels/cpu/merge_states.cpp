// See merge_states.h: rows of all batches and heads, divided among threads.
#define ANYFLASH_CPU_ISA portable
#define ANYFLASH_SHARED_NAMESPACE anyflash::cpu::portable
#include "merge_states.h"

#include <cstdint>
#include <type_traits>

#include "common/merge.h"
#include "cpu/simd/convert.h"
#include "threads.h"

namespace anyflash {

namespace cpu::portable {

namespace {

double read_lse(const void* lse, DType dtype, int64_t at) {
  return dtype == DType::kFloat64 ? static_cast<const double*>(lse)[at]
                                  : double{static_cast<const float*>(lse)[at]};
}

void write_lse(void* lse, DType dtype, int64_t at, double value) {
  if (dtype == DType::kFloat64) static_cast<double*>(lse)[at] = value;
  else static_cast<float*>(lse)[at] = static_cast<float>(value);
}

template <class T, class Part, class Out>
void merge_row(const MergeParams& p, int64_t batch, int64_t row, int64_t head) {
  const auto offset = [&](const Strides& s) {
    return batch * s.batch + row * s.row + head * s.head;
  };
  const Merge<T> merge(static_cast<T>(read_lse(p.lse_a, p.lse_dtype, offset(p.lse_a_stride))),
                       static_cast<T>(read_lse(p.lse_b, p.lse_dtype, offset(p.lse_b_stride))));
  const Part* const a = static_cast<const Part*>(p.out_a) + offset(p.out_a_stride);
  const Part* const b = static_cast<const Part*>(p.out_b) + offset(p.out_b_stride);
  Out* const out = static_cast<Out*>(p.out) + offset(p.out_stride);
  for (int64_t col = 0; col < p.columns; ++col) {
    const T x = merge.out(static_cast<T>(to_compute(a[col * p.out_a_stride.col])),
                          static_cast<T>(to_compute(b[col * p.out_b_stride.col])));
    if constexpr (sizeof(Out) == sizeof(double)) {
      out[col * p.out_stride.col] = x;
    } else {
      from_compute(static_cast<float>(x), out + col * p.out_stride.col);
    }
  }
  if (p.lse != nullptr) {
    write_lse(p.lse, p.lse_out_dtype, offset(p.lse_stride), static_cast<double>(merge.lse()));
  }
}

// As threads_worth() counts it, from times beside the forward's: 0.4 ns an element, and of 16-bit
// types, which are converted one by one, 1.8.
template <class Part>
constexpr double kElementWork = sizeof(Part) == 2 ? 190 : 40;

template <class Part, class Out>
void merge_all(const MergeParams& p, int num_threads) {
  constexpr bool kWide = sizeof(Part) == sizeof(double) || sizeof(Out) == sizeof(double);
  using T = std::conditional_t<kWide, double, float>;
  const bool wide_lse = p.lse_dtype == DType::kFloat64;
  const int64_t count = p.batch * p.rows * p.heads;
  const double work = static_cast<double>(count * p.columns) * kElementWork<Part>;
  for_each_on_threads(count, threads_worth(num_threads, work), [&](int64_t i) {
    const int64_t batch = i / p.heads / p.rows;
    const int64_t row = i / p.heads % p.rows;
    if (wide_lse) merge_row<double, Part, Out>(p, batch, row, i % p.heads);
    else merge_row<T, Part, Out>(p, batch, row, i % p.heads);
  });
}

// Calls function(element) with an element of the type.
template <class Function>
void with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(double{});
    case DType::kFloat16:
      return function(Half{});
    case DType::kBFloat16:
      return function(BFloat16{});
    default:
      return function(float{});
  }
}

}  // namespace

}  // namespace cpu::portable

void merge_states_on_cpu(const MergeParams& params, int num_threads) {
  using namespace cpu::portable;
  with_type(params.part_dtype, [&](auto part) {
    with_type(params.out_dtype,
              [&](auto out) { merge_all<decltype(part), decltype(out)>(params, num_threads); });
  });
}

}  // namespace anyflash
