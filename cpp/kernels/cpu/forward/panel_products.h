// The two products of a panel (gemm.h), and what they read: Q^T of all panels of a task. K and V of
// a block of keys are shared by its panels.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/query_rows.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// By multiply-adds on vectors.
template <typename Rows>
class PanelProducts {
 public:
  using T = typename Rows::T;
  using S = Simd<T>;
  using Vec = typename S::Vec;

  // By how much scores may exceed what is subtracted from them before sums are rescaled.
  static constexpr T kLazyRescaleLimit = 0;

  // Scores are `scale` q.k.
  PanelProducts(const Rows& rows, T scale)
      : rows_(rows), p_(rows.params.attention), scratch_(rows.scratch), scale_(scale) {}

  // O^T of a panel: (head_dim_v, rows of the panel).
  T* o_panel(int panel) const { return scratch_.o + std::int64_t{panel} * kPanel * padded_dim_v(); }

  int padded_dim_v() const { return round_up(p_.head_dim_v, kColumnPad<T>); }

  // Q^T of a panel of `count` rows, zeros behind the last one, up to `width`.
  void load_queries(int panel, int count, int width) const {
    T* const q = q_panel(panel);
    for (int r = 0; r < width; ++r) {
      if (r < count) {
        load_row(rows_.query_row(panel * kPanel + r), p_.q_stride.col, p_.head_dim, scratch_.row);
      }
      for (int c = 0; c < p_.head_dim; ++c) {
        q[static_cast<std::int64_t>(c) * width + r] = r < count ? scratch_.row[c] : T(0);
      }
    }
  }

  // Keys block + [first, keys) of k and v.
  void load_keys(int block, int first, int keys) {
    pack_keys(block, first, keys);
    pack_values(block, first, keys);
  }

  // S^T of a panel and a block of keys, and its range.
  template <int NV, typename Visible>
  void scores(int panel, int block, const Zones& zones, const Visible& visible,
              ScoreRange<T, NV>& range_out) const {
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

  // O^T = alpha O^T + V^T P^T, at the latest after finish().
  template <int NV>
  void add_values(int panel, const Zones& zones, const Vec (&alpha)[NV]) const {
    constexpr int kRows = NV * S::kLanes;
    for (int c = 0; c < p_.head_dim_v; c += scalar_group(NV)) {
      const T* const v = scratch_.v + std::int64_t{c / kGroupPad} * kGroupPad * kPanelKeys;
      output_group<T, NV>(v + c % kGroupPad, scratch_.s, zones, alpha,
                          o_panel(panel) + std::int64_t{c} * kRows);
    }
  }

  void finish() {}

 protected:
  static constexpr int kPanel = kPanelRows<T>;

  T* q_panel(int panel) const { return scratch_.q + std::int64_t{panel} * kPanel * p_.head_dim; }

  // In the compute type; zeros up to a whole group.
  void pack_keys(int block, int first, int keys) const {
    const std::int64_t d = p_.head_dim;
    for (int j = first; j < keys; ++j) rows_.load_key(rows_.k, block + j, scratch_.k + j * d);
    Rows::fill_zero(scratch_.k + keys * d, (round_up(keys, kGroupPad) - keys) * d);
  }

  // Columns of v in groups of kGroupPad, each group (keys, kGroupPad): PV then reads on and on.
  void pack_values(int block, int first, int keys) const {
    const int padded = padded_dim_v();
    Rows::fill_zero(scratch_.row + p_.head_dim_v, padded - p_.head_dim_v);
    for (int j = first; j < keys; ++j) {
      rows_.load_key(rows_.v, block + j, scratch_.row);
      for (int c = 0; c < padded; c += kGroupPad) {
        std::memcpy(scratch_.v + (std::int64_t{c} * kPanelKeys + j * kGroupPad), scratch_.row + c,
                    kGroupPad * sizeof(T));
      }
    }
  }

  const Rows& rows_;
  const Attention& p_;
  const Scratch<T>& scratch_;
  const T scale_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
