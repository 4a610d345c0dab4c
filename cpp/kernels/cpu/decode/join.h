// Results of parts of the keys, and how they become one:
//   lse = log(e^sink + sum_s e^lse_s),  out = sum_s e^(lse_s - lse) out_s
// (Milakov and Gimelshein, arXiv 1805.02867). A part without keys has lse_s = -inf, and its out_s
// is not looked at.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>

#include "cpu/query_rows.h"
#include "cpu/scratch.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// In the scratch memory; nothing where the keys are not split.
template <typename T>
struct PartialResults {
  T* out;       // (split, batch, heads, rows, head_dim_v)
  double* lse;  // (split, batch, heads, rows)
  std::int64_t batch;
  int heads;
  std::int64_t rows;  // seqlen_q; packed: total_q, and batch is 1
  int head_dim_v;
  int splits;
  std::size_t size;

  bool used() const { return splits > 1; }

  std::int64_t row(int split, const ResultRow& at) const {
    return ((split * batch + at.batch) * heads + at.head) * rows + at.first_q + at.query;
  }
  T* out_row(std::int64_t row) const { return out + row * head_dim_v; }

  static PartialResults carve(const Attention& a, int splits, char* base) {
    PartialResults x;
    const bool packed = a.cu_seqlens_q != nullptr;
    x.batch = packed ? 1 : a.batch;
    x.heads = a.heads;
    x.rows = packed ? a.total_q : a.seqlen_q;
    x.head_dim_v = a.head_dim_v;
    x.splits = splits;
    const std::int64_t all = splits > 1 ? splits * x.batch * x.heads * x.rows : 0;
    Carver carver(base);
    carver.take(x.out, all * a.head_dim_v);
    carver.take(x.lse, all);
    x.size = carver.size();
    return x;
  }
};

// One thread's work on the (sequence, head) pairs; packed sequences are one.
template <typename E>
class Joiner {
 public:
  using T = typename Compute<E>::Type;

  Joiner(const ForwardParams& p, const PartialResults<T>& partial, T* o)
      : p_(p), partial_(partial), o_(o) {}

  void run(std::int64_t number) {
    const std::int64_t index = number / p_.attention.heads;
    const int head = static_cast<int>(number % p_.attention.heads);
    for (std::int64_t row = 0; row < partial_.rows; ++row) join({index, row, head, 0});
  }

 private:
  void join(const ResultRow& row) {
    const double infinity = static_cast<double>(kInfinity);
    double top = -infinity;
    for (int split = 0; split < partial_.splits; ++split) {
      const double lse = partial_.lse[partial_.row(split, row)];
      top = lse > top ? lse : top;
    }
    double sum = 0;
    for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] = T(0);
    for (int split = 0; split < partial_.splits; ++split) {
      const std::int64_t at = partial_.row(split, row);
      if (partial_.lse[at] == -infinity) continue;
      const double weight = ::exp(partial_.lse[at] - top);
      const T factor = static_cast<T>(weight);
      const T* const out = partial_.out_row(at);
      for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] += factor * out[c];
      sum += weight;
    }
    const RowEnd end = end_row(top, sum, read_sink(p_, row.head));
    const T divisor = static_cast<T>(end.divisor);
    // + 0: as TaskRows::finish(), so that a divisor of infinity gives no -0.
    for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] = o_[c] / divisor + T(0);
    store_result<E>(p_, row, o_, end.lse);
  }

  const ForwardParams& p_;
  const PartialResults<T>& partial_;
  T* const o_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
