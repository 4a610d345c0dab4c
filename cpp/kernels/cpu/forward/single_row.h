// A task of a few query rows, one by one (cpu/gemv.h).
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cpu/dropped.h"
#include "cpu/gemv.h"
#include "cpu/query_rows.h"
#include "cpu/scores.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

template <typename Rows>
class FewRowsTask {
 public:
  using T = typename Rows::T;
  using Keys = typename Rows::Keys;
  using S = Simd<T>;
  using Vec = typename S::Vec;

  explicit FewRowsTask(Rows& rows)
      : rows_(rows), p_(rows.params.attention), scratch_(rows.scratch) {
    natural_ = rows.modifier.active();
    scale_ = static_cast<T>(natural_ ? rows.modifier.scale() : p_.softmax_scale * kLog2EOf<double>);
  }

  void run() {
    const int d = padded_dim();
    const int dv = padded_dim_v();
    for (int r = 0; r < rows_.rows; ++r) {
      T* const q = scratch_.q + std::int64_t{r} * d;
      load_row(rows_.query_row(r), p_.q_stride.col, p_.head_dim, q);
      rows_.fill_zero(q + p_.head_dim, d - p_.head_dim);
      rows_.fill_zero(scratch_.o + std::int64_t{r} * dv, dv);
    }
    const int end = rows_.seen.end;
    for (int block = rows_.seen.first / kBlockN * kBlockN; block < end; block += kBlockN) {
      const int keys = end - block < kBlockN ? end - block : kBlockN;
      if (!rows_.begin_block(block, keys)) continue;
      const int skipped = rows_.seen.first - block;
      const int first = skipped > 0 ? skipped / S::kLanes * S::kLanes : 0;
      const Keys k = rows_.key_rows(rows_.k, block, first, keys, d, scratch_.k);
      const Keys v = rows_.key_rows(rows_.v, block, first, keys, dv, scratch_.v);
      for (int r = 0; r < rows_.rows; ++r) {
        const int sees = static_cast<int>(scratch_.seen_first[r]) - block;
        const int limit = static_cast<int>(scratch_.seen_end[r]) - block;
        visit(r, block, k, v, sees > 0 ? sees : 0, limit < keys ? limit : keys);
      }
    }
    for (int r = 0; r < rows_.rows; ++r) {
      rows_.finish(r, scratch_.o + std::int64_t{r} * dv, natural_ ? 1.0 : kLn2Of<double>);
    }
  }

 private:
  int padded_dim() const { return round_up(p_.head_dim, S::kLanes); }
  int padded_dim_v() const { return round_up(p_.head_dim_v, kColumnPad<T>); }

  // Keys [begin, end) of a block for one row: the equations of forward.h.
  void visit(int r, int block, const Keys& k, const Keys& v, int begin, int end) {
    if (begin >= end) return;
    T* const s = scratch_.s;
    single_row_scores(scratch_.q + r * std::int64_t{padded_dim()}, k, padded_dim(), scale_, begin,
                      end, s);
    if (natural_) {
      modify_row(rows_.modifier, rows_.ranges, scratch_.rows[r], block, begin, end, s);
    }
    const int first = begin / S::kLanes * S::kLanes;
    const int last = round_up(end, S::kLanes);
    for (int j = first; j < begin; ++j) s[j] = T(-kInfinity);
    for (int j = end; j < last; ++j) s[j] = T(-kInfinity);

    Vec best = S::broadcast(scratch_.m[r]);
    for (int j = first; j < last; j += S::kLanes) best = S::max(S::load(s + j), best);
    T lane[S::kLanes];
    S::store(lane, best);
    T new_m = scratch_.m[r];
    for (int i = 0; i < S::kLanes; ++i) new_m = lane[i] > new_m ? lane[i] : new_m;

    const Vec base = rows_.finite_base(S::broadcast(new_m));
    const Vec to_log2 = S::broadcast(natural_ ? kLog2EOf<T> : T(1));
    S::store(lane, exp2_nonpositive<T>((S::broadcast(scratch_.m[r]) - base) * to_log2));
    const T alpha = lane[0];
    const Vec hidden = S::broadcast(T(-kInfinity));
    Vec sums = {};
    Vec least = {};
    for (int j = first; j < last; j += S::kLanes) {
      const Vec score = S::load(s + j);
      const Vec x = exp2_nonpositive<T>((score - base) * to_log2);
      const Vec marked = score == hidden ? S::broadcast(kHiddenKey<T>) : x;
      S::store(s + j, marked);
      least = S::min(marked, least);
      sums += x;
    }
    S::store(lane, sums);
    T sum = lane[0];
    for (int i = 1; i < S::kLanes; ++i) sum += lane[i];
    scratch_.m[r] = new_m;
    scratch_.l[r] = scratch_.l[r] * alpha + sum;
    if (p_.dropout_threshold != 0) {
      drop_row(p_, rows_.task.index, scratch_.rows[r], block, begin, end, s);
    }
    T* const o = scratch_.o + r * std::int64_t{padded_dim_v()};
    if (S::any_equal(least, kHiddenKey<T>)) {
      single_row_output<true>(v, s, begin, end, alpha, o, padded_dim_v());
    } else {
      single_row_output<false>(v, s, begin, end, alpha, o, padded_dim_v());
    }
  }

  Rows& rows_;
  const Attention& p_;
  const Scratch<T>& scratch_;
  bool natural_;  // scores in natural units, else in units of log2 e
  T scale_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
