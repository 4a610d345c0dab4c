// A task in panels of query rows, rows in lanes (gemm.h). The keys of a task pass through packed
// blocks of kBlockN, which all its panels share.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/convert.h"
#include "cpu/dropped.h"
#include "cpu/exp.h"
#include "cpu/gemm.h"
#include "cpu/rows.h"
#include "cpu/scores.h"
#include "cpu/simd.h"
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

  explicit PanelTask(Rows& rows) : rows_(rows), p_(rows.params), scratch_(rows.scratch) {
    natural_ = rows.modifier.active();
    scale_ = static_cast<T>(natural_ ? rows.modifier.scale() : p_.softmax_scale * kLog2E);
  }

  void run() {
    const int panels = (rows_.rows + kPanel - 1) / kPanel;
    for (int panel = 0; panel < panels; ++panel) load_panel(panel);
    const int end = rows_.seen.end;
    for (int block = rows_.seen.first / kBlockN * kBlockN; block < end; block += kBlockN) {
      if (!rows_.begin_block(block)) continue;
      const int keys = end - block < kBlockN ? end - block : kBlockN;
      const int skipped = rows_.seen.first - block;
      const int first = skipped > 0 ? skipped / kGroupPad * kGroupPad : 0;
      pack_keys(block, first, keys);
      pack_values(block, first, keys);
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
    for (int panel = 0; panel < panels; ++panel) store_panel(panel);
  }

 private:
  static constexpr int kPanel = kPanelRows<T>;
  static constexpr double kLog2E = 1.4426950408889634074;
  static constexpr double kLn2 = 0.69314718055994530942;

  int panel_rows(int panel) const {
    const int rest = rows_.rows - panel * kPanel;
    return rest < kPanel ? rest : kPanel;
  }
  int vectors(int panel) const { return (panel_rows(panel) + S::kLanes - 1) / S::kLanes; }
  int padded_dim_v() const { return round_up(p_.head_dim_v, kColumnPad<T>); }
  T* q_panel(int panel) const { return scratch_.q + std::int64_t{panel} * kPanel * p_.head_dim; }
  T* o_panel(int panel) const { return scratch_.o + std::int64_t{panel} * kPanel * padded_dim_v(); }

  // Q^T of a panel, zeros behind its last row; O = 0.
  void load_panel(int panel) {
    const int rows = panel_rows(panel);
    const int width = vectors(panel) * S::kLanes;
    T* const q = q_panel(panel);
    for (int r = 0; r < width; ++r) {
      if (r < rows) {
        load_row(rows_.query_row(panel * kPanel + r), p_.q_stride.col, p_.head_dim, scratch_.row);
      }
      for (int c = 0; c < p_.head_dim; ++c) {
        q[static_cast<std::int64_t>(c) * width + r] = r < rows ? scratch_.row[c] : T(0);
      }
    }
    rows_.fill_zero(o_panel(panel), std::int64_t{width} * padded_dim_v());
  }

  void store_panel(int panel) {
    const int width = vectors(panel) * S::kLanes;
    const T* const o = o_panel(panel);
    for (int r = 0; r < panel_rows(panel); ++r) {
      for (int c = 0; c < p_.head_dim_v; ++c) {
        scratch_.row[c] = o[static_cast<std::int64_t>(c) * width + r];
      }
      rows_.finish(panel * kPanel + r, scratch_.row, natural_ ? 1.0 : kLn2);
    }
  }

  // Keys block + [first, keys) in the compute type; zeros up to a whole group.
  void pack_keys(int block, int first, int keys) {
    const std::int64_t d = p_.head_dim;
    for (int j = first; j < keys; ++j) rows_.load_key(rows_.k, block + j, scratch_.k + j * d);
    rows_.fill_zero(scratch_.k + keys * d, (round_up(keys, kGroupPad) - keys) * d);
  }

  // Columns of v in groups of kGroupPad, each group (keys, kGroupPad): PV then reads on and on.
  void pack_values(int block, int first, int keys) {
    const int padded = padded_dim_v();
    rows_.fill_zero(scratch_.row + p_.head_dim_v, padded - p_.head_dim_v);
    for (int j = first; j < keys; ++j) {
      rows_.load_key(rows_.v, block + j, scratch_.row);
      for (int c = 0; c < padded; c += kGroupPad) {
        std::memcpy(scratch_.v + (std::int64_t{c} * kBlockN + j * kGroupPad), scratch_.row + c,
                    kGroupPad * sizeof(T));
      }
    }
  }

  // One block of keys for one panel: the equations of forward.h.
  template <int NV>
  void visit(int panel, int block, Zones zones) {
    constexpr int kRows = NV * S::kLanes;
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
      scores<NV>(panel, block, zones, seen(panel), range);
    }
    // A score of -inf is a mask too.
    bool hidden = false;
    for (int n = 0; n < NV; ++n) hidden |= S::any_equal(range.min[n], T(-kInfinity));
    if (hidden) zones.full_begin = zones.full_end = zones.begin;

    const Vec to_log2 = S::broadcast(T(natural_ ? kLog2E : 1.0));
    Vec alpha[NV];
    Vec base[NV];
    for (int n = 0; n < NV; ++n) {
      base[n] = rows_.finite_base(range.max[n]);
      alpha[n] = exp2_nonpositive<T>((S::load(m + n * S::kLanes) - base[n]) * to_log2);
      S::store(m + n * S::kLanes, range.max[n]);
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
    if (p_.dropout_threshold != 0) {
      drop_panel<T, NV>(p_, rows_.task.index, scratch_.rows + panel * kPanel, panel_rows(panel),
                        block, zones.begin, zones.end, scratch_.s);
    }
    for (int c = 0; c < p_.head_dim_v; c += scalar_group(NV)) {
      const T* const v = scratch_.v + std::int64_t{c / kGroupPad} * kGroupPad * kBlockN;
      output_group<T, NV>(v + c % kGroupPad, scratch_.s, zones, alpha,
                          o_panel(panel) + std::int64_t{c} * kRows);
    }
  }

  KeysWithin<Int> seen(int panel) const {
    return {scratch_.seen_first + panel * kPanel, scratch_.seen_end + panel * kPanel};
  }

  // S^T of a panel and a block of keys, and its range.
  template <int NV, typename Visible>
  void scores(int panel, int block, const Zones& zones, const Visible& visible,
              ScoreRange<T, NV>& range_out) {
    constexpr int kGroup = scalar_group(NV);
    constexpr int kRows = NV * S::kLanes;
    const T* const q = q_panel(panel);
    ScoreRange<T, NV> range = range_out;
    for (int j = zones.begin / kGroup * kGroup; j < zones.end; j += kGroup) {
      const T* const k = scratch_.k + std::int64_t{j} * p_.head_dim;
      T* const s = scratch_.s + j * kRows;
      if (zones.full_begin <= j && j < zones.full_end) {
        score_group<T, NV>(k, q, p_.head_dim, scale_, block + j, EveryKey{}, s, range);
      } else {
        score_group<T, NV>(k, q, p_.head_dim, scale_, block + j, visible, s, range);
      }
    }
    range_out = range;
  }

  // The same with softcap, ALiBi and bias. False if the bias hides the block.
  template <int NV>
  bool modified_scores(int panel, int block, const Zones& zones, ScoreRange<T, NV>& range) {
    const QueryRow<T>* const rows = scratch_.rows + panel * kPanel;
    if (rows_.modifier.has_bias() &&
        !load_bias(rows_.modifier, rows, NV * S::kLanes, block, zones.begin, zones.end,
                   scratch_.bias, NV * S::kLanes)) {
      return false;
    }
    ScoreRange<T, NV> unused = range;
    scores<NV>(panel, block, zones, EveryKey{}, unused);
    modify_panel<T, NV>(rows_.modifier, rows, block, zones, seen(panel), scratch_.bias, scratch_.s,
                        range);
    return true;
  }

  // P^T of a block, and its row sums.
  template <int NV, bool kNatural>
  void probabilities(const Zones& zones, const Vec (&base)[NV], Vec (&sum_out)[NV]) {
    constexpr int kRows = NV * S::kLanes;
    const Vec hidden = S::broadcast(T(-kInfinity));
    Vec sum[NV] = {};
    const auto step = [&](int j, auto hiding) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        T* const at = scratch_.s + j * kRows + n * S::kLanes;
        const Vec s = S::load(at);
        Vec x = s - base[n];
        if constexpr (kNatural) x = x * T(kLog2E);
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
  bool natural_;  // scores in natural units, else in units of log2 e
  T scale_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
