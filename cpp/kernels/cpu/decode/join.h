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
  T* out;       // (split, batch, heads, seqlen_q, head_dim_v)
  double* lse;  // (split, batch, heads, seqlen_q)
  std::int64_t batch;
  int heads;
  int seqlen_q;
  int head_dim_v;
  int splits;
  std::size_t size;

  bool used() const { return splits > 1; }

  std::int64_t row(int split, std::int64_t index, int head, int query) const {
    return ((split * batch + index) * heads + head) * seqlen_q + query;
  }
  T* out_row(std::int64_t row) const { return out + row * head_dim_v; }

  static PartialResults carve(const Attention& a, int splits, char* base) {
    PartialResults x;
    x.batch = a.batch;
    x.heads = a.heads;
    x.seqlen_q = a.seqlen_q;
    x.head_dim_v = a.head_dim_v;
    x.splits = splits;
    const std::int64_t rows = splits > 1 ? splits * a.batch * a.heads * a.seqlen_q : 0;
    Carver carver(base);
    carver.take(x.out, rows * a.head_dim_v);
    carver.take(x.lse, rows);
    x.size = carver.size();
    return x;
  }
};

// One thread's work on the (sequence, head) pairs.
template <typename E>
class Joiner {
 public:
  using T = typename Compute<E>::Type;

  Joiner(const ForwardParams& p, const PartialResults<T>& partial, T* o)
      : p_(p), partial_(partial), o_(o) {}

  void run(std::int64_t number) {
    const std::int64_t index = number / p_.attention.heads;
    const int head = static_cast<int>(number % p_.attention.heads);
    for (int query = 0; query < p_.attention.seqlen_q; ++query) join(index, head, query);
  }

 private:
  void join(std::int64_t index, int head, int query) {
    const double infinity = static_cast<double>(kInfinity);
    double top = -infinity;
    for (int split = 0; split < partial_.splits; ++split) {
      const double lse = partial_.lse[partial_.row(split, index, head, query)];
      top = lse > top ? lse : top;
    }
    double sum = 0;
    for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] = T(0);
    for (int split = 0; split < partial_.splits; ++split) {
      const std::int64_t at = partial_.row(split, index, head, query);
      if (partial_.lse[at] == -infinity) continue;
      const double weight = ::exp(partial_.lse[at] - top);
      const T factor = static_cast<T>(weight);
      const T* const out = partial_.out_row(at);
      for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] += factor * out[c];
      sum += weight;
    }
    const RowEnd end = end_row(top, sum, read_sink(p_, head));
    const T divisor = static_cast<T>(end.divisor);
    for (int c = 0; c < p_.attention.head_dim_v; ++c) o_[c] = o_[c] / divisor;
    store_result<E>(p_, {index, 0, head, query}, o_, end.lse);
  }

  const ForwardParams& p_;
  const PartialResults<T>& partial_;
  T* const o_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
