// A task in panels of query rows, rows in lanes (gemm.h). The keys of a task pass through packed
// blocks of kPanelKeys, which all its panels share.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cpu/amx/products.h"
#include "cpu/dropped.h"
#include "cpu/forward/panel_products.h"
#include "cpu/gemm.h"
#include "cpu/query_rows.h"
#include "cpu/scores.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

template <typename Rows>
class PanelTask {
 public:
  using T = typename Rows::T;
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Int = typename S::Int;

  explicit PanelTask(Rows& rows)
      : rows_(rows),
        p_(rows.params),
        scratch_(rows.scratch),
        natural_(rows.modifier.active()),
        products_(rows, static_cast<T>(natural_ ? rows.modifier.scale()
                                                : rows.params.attention.softmax_scale *
                                                      kLog2EOf<double>)) {}

  void run() {
    const int panels = (rows_.rows + kPanel - 1) / kPanel;
    for (int panel = 0; panel < panels; ++panel) load_panel(panel);
    const int end = rows_.seen.end;
    const int step = p_.attention.block_mask.data == nullptr ? kPanelKeys : kBlockN;
    for (int block = rows_.seen.first / step * step; block < end; block += step) {
      const int keys = end - block < step ? end - block : step;
      if (!rows_.begin_block(block, keys)) continue;
      const int skipped = rows_.seen.first - block;
      const int first = skipped > 0 ? skipped / kGroupPad * kGroupPad : 0;
      products_.load_keys(block, first, keys);
      for (int panel = 0; panel < panels; ++panel) {
        const Zones zones = rows_.panel_seen[panel].zones(block, keys);
        if (zones.begin >= zones.end) continue;
        switch (vectors(panel)) {
          case 1:
            visit<1>(panel, block, zones);
            break;
          case 2:
            visit<2>(panel, block, zones);
            break;
          default:
            visit<kMaxVectors>(panel, block, zones);
            break;
        }
      }
    }
    products_.finish();
    for (int panel = 0; panel < panels; ++panel) store_panel(panel);
  }

 private:
  static constexpr int kPanel = kPanelRows<T>;

  int panel_rows(int panel) const {
    const int rest = rows_.rows - panel * kPanel;
    return rest < kPanel ? rest : kPanel;
  }
  int vectors(int panel) const { return (panel_rows(panel) + S::kLanes - 1) / S::kLanes; }

  // O = 0.
  void load_panel(int panel) {
    const int width = vectors(panel) * S::kLanes;
    products_.load_queries(panel, panel_rows(panel), width);
    rows_.fill_zero(products_.o_panel(panel), std::int64_t{width} * products_.padded_dim_v());
  }

  void store_panel(int panel) {
    const int width = vectors(panel) * S::kLanes;
    const int padded = products_.padded_dim_v();
    T* const rows = scratch_.v;  // free after the last block of keys
    for (int r = 0; r < panel_rows(panel); ++r) {
      const int lane = r % S::kLanes;
      if (lane == 0) {
        transpose_block(products_.o_panel(panel) + r, width, padded, S::kLanes, rows, padded);
      }
      rows_.finish(panel * kPanel + r, rows + lane * padded, natural_ ? 1.0 : kLn2Of<double>);
    }
  }

  // One block of keys for one panel: the equations of forward.h.
  template <int NV>
  void visit(int panel, int block, Zones zones) {
    T* const m = scratch_.m + panel * kPanel;
    T* const l = scratch_.l + panel * kPanel;
    ScoreRange<T, NV> range;
    for (int n = 0; n < NV; ++n) {
      range.max[n] = S::load(m + n * S::kLanes);
      range.min[n] = S::broadcast(T(kInfinity));
    }
    if (natural_) {
      if (!modified_scores<NV>(panel, block, zones, range)) return;
    } else {
      products_.template scores<NV>(panel, block, zones, seen(panel), range);
    }
    // A score of -inf is a mask too.
    bool hidden = false;
    for (int n = 0; n < NV; ++n) hidden |= S::any_equal(range.min[n], T(-kInfinity));
    if (hidden) zones.full_begin = zones.full_end = zones.begin;

    const Vec to_log2 = S::broadcast(natural_ ? kLog2EOf<T> : T(1));
    Vec alpha[NV];
    Vec base[NV];
    const Vec slack =
        S::broadcast(p_.max_logits == nullptr ? ProductsOf<Rows>::kLazyRescaleLimit : T(0));
    for (int n = 0; n < NV; ++n) {
      const Vec before = S::load(m + n * S::kLanes);
      const Vec top = range.max[n] > before + slack ? range.max[n] : before;
      base[n] = rows_.finite_base(top);
      alpha[n] = exp2_nonpositive<T>((before - base[n]) * to_log2);
      S::store(m + n * S::kLanes, top);
    }
    Vec sum[NV] = {};
    if (natural_) {
      probabilities<NV, true>(zones, base, sum);
    } else {
      probabilities<NV, false>(zones, base, sum);
    }
    for (int n = 0; n < NV; ++n) {
      S::store(l + n * S::kLanes, S::load(l + n * S::kLanes) * alpha[n] + sum[n]);
    }
    if (p_.attention.dropout_threshold != 0) {
      drop_panel<T, NV>(p_.attention, rows_.task.index, scratch_.rows + panel * kPanel,
                        panel_rows(panel), block, zones.begin, zones.end, scratch_.s);
    }
    products_.template add_values<NV>(panel, zones, alpha);
  }

  KeysWithin<Int> seen(int panel) const {
    return {scratch_.seen_first + panel * kPanel, scratch_.seen_end + panel * kPanel};
  }

  // S^T and its range, with softcap, ALiBi and bias. False if the bias hides the block.
  template <int NV>
  bool modified_scores(int panel, int block, const Zones& zones, ScoreRange<T, NV>& range) {
    const QueryRow<T>* const rows = scratch_.rows + panel * kPanel;
    if (rows_.modifier.has_bias() &&
        !load_bias(rows_.modifier, rows_.ranges, rows, NV * S::kLanes, block, zones.begin,
                   zones.end, scratch_.bias, NV * S::kLanes)) {
      return false;
    }
    ScoreRange<T, NV> unused = range;
    products_.template scores<NV>(panel, block, zones, EveryKey{}, unused);
    modify_panel<T, NV>(rows_.modifier, rows, block, zones, seen(panel), scratch_.bias, scratch_.s,
                        range);
    return true;
  }

  // P^T of a block, and its row sums.
  template <int NV, bool kNatural>
  void probabilities(const Zones& zones, const Vec (&base)[NV], Vec (&sum_out)[NV]) {
    constexpr int kRows = NV * S::kLanes;
    const Vec hidden = S::broadcast(T(-kInfinity));
    T* const scores = scratch_.s;
    Vec sum[NV] = {};
    const auto step = [&](int j, auto hiding) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        T* const at = scores + j * kRows + n * S::kLanes;
        const Vec s = S::load(at);
        Vec x = s - base[n];
        if constexpr (kNatural) x = x * kLog2EOf<T>;
        x = exp2_nonpositive<T>(x);
        sum[n] += x;
        if constexpr (decltype(hiding)::kValue) x = s == hidden ? S::broadcast(kHiddenKey<T>) : x;
        S::store(at, x);
      }
    };
    int j = zones.begin;
    for (; j < zones.full_begin; ++j) step(j, Hiding<true>{});
    for (; j < zones.full_end; ++j) step(j, Hiding<false>{});
    for (; j < zones.end; ++j) step(j, Hiding<true>{});
    for (int n = 0; n < NV; ++n) sum_out[n] = sum[n];
  }

  Rows& rows_;
  const ForwardParams& p_;
  const Scratch<T>& scratch_;
  const bool natural_;  // scores in natural units, else in units of log2 e
  ProductsOf<Rows> products_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
