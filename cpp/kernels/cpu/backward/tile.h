// One tile of the backward: the probabilities of a block of rows and a block of keys, and the
// gradients of their scores.
//
//   s0 = scale q.k            s1 = softcap tanh(s0 / softcap)     s = s1 + bias - slope dist
//   P  = e^(s - lse)          kept = 0 or 1 / (1 - p)             dropout
//   dS = P (kept dO.v - delta)
//   dS0 = dS (1 - (s1 / softcap)^2)
//
// Tiles are (keys, rows), rows in lanes: S^T = K Q^T, dP^T = V dO^T. A key is hidden by its
// position, by a bias of -inf, or because the row saw no key. It has dS = 0 and a probability of
// -0, by which a product can tell it from a visible one (cpu/backward/products.h).
#pragma once

#include <cstdint>

#include "common/math.h"
#include "cpu/backward/blocks.h"
#include "cpu/backward/products.h"
#include "cpu/backward/scratch.h"
#include "cpu/dropped.h"
#include "cpu/scores.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"
#include "params.h"
#include "variant/block_mask.h"
#include "variant/dropout.h"
#include "variant/key_ranges.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Which gradient a tile is for: of q.k, or of the score with its bias.
enum class GradientOf { kProduct, kScore };

template <bool kMasked, bool kModified>
struct TileKind {
  static constexpr bool kMask = kMasked;
  static constexpr bool kModify = kModified;
};

template <typename E>
class BackwardConfig {
 public:
  using T = typename Compute<E>::Type;
  using S = Simd<T>;
  using Vec = typename S::Vec;

  BackwardConfig(const BackwardParams& p, const Blocks<E>& blocks,
                 const BackwardScratch<T>& scratch)
      : p_(p),
        a_(p.attention),
        blocks_(blocks),
        modifier_(blocks.modifier()),
        scratch_(scratch),
        scale_(static_cast<T>(modifier_.scale())) {}

  // Whether block mask and key ranges leave something of the tile.
  bool kept(int head, int first_row, int first_key) const {
    if (!BlockMask(a_, blocks_.index(), head).keep(first_row, first_key)) return false;
    const KeyRanges ranges = ranges_of(head);
    return !ranges.active() ||
           ranges.any(first_row, first_row + kBlockM - 1, first_key, first_key + kBlockN);
  }

  // P kept and dS0 or dS. With kProduct, what the rows add to dalibi_slopes is added to their sums.
  // False: the bias, or key ranges, hide all.
  bool compute(RowBlock<T>& rows, KeyBlock<T>& keys, GradientOf of) {
    if (modifier_.has_bias() && !load_bias(modifier_, ranges_of(rows.head), rows.rows, rows.width,
                                           keys.first_key, 0, keys.count, scratch_.bias, kBlockM)) {
      return false;
    }
    const int end_key = keys.first_key + kBlockN;
    const bool masked = keys.first_key < rows.full_first || end_key > rows.full_end;
    hides_ = masked || modifier_.has_bias();
    if (a_.dropout_threshold != 0) draw(rows, keys);
    by_tiles_ = rows.in_tiles && keys.in_tiles;
    if (by_tiles_) {
      multiply_tiles(rows, keys);
    } else {
      blocks_.load_floats(&rows);
      blocks_.load_floats(&keys);
      product(RowMajor<T>{keys.k, scratch_.ld}, keys.padded, a_.head_dim,
              Columns<T>{rows.q_across, kBlockM, rows.width}, false, scratch_.s, kBlockM);
      product(RowMajor<T>{keys.v, scratch_.ld_v}, keys.padded, a_.head_dim_v,
              Columns<T>{rows.dout_across, kBlockM, rows.width}, false, scratch_.ds, kBlockM);
    }
    if (!modifier_.active() && a_.dropout_threshold == 0) {
      if (masked) {
        finish(rows, keys, of, TileKind<true, false>{});
      } else {
        finish(rows, keys, of, TileKind<false, false>{});
      }
    } else if (masked) {
      finish(rows, keys, of, TileKind<true, true>{});
    } else {
      finish(rows, keys, of, TileKind<false, true>{});
    }
    return true;
  }

  // Of the tile computed last.
  // dV += (P kept)^T dO,  dK += dS0^T Q
  void add_to_keys(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    if (by_tiles_) return add_tiles_to_keys(rows, keys);
    const RowMajor<T> p{scratch_.s, kBlockM};
    const RowMajor<T> ds{scratch_.ds, kBlockM};
    add(p, p, keys.padded, rows.count, of_rows(rows.dout, scratch_.ld_v), keys.dv);
    add(ds, p, keys.padded, rows.count, of_rows(rows.q, scratch_.ld), keys.dk);
  }

  // dQ += dS0 K
  void add_to_rows(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    if (by_tiles_) return add_tiles_to_rows(rows, keys);
    const ColumnMajor<T> p{scratch_.s, kBlockM};
    const ColumnMajor<T> ds{scratch_.ds, kBlockM};
    add(ds, p, rows.width, keys.count, of_rows(keys.k, scratch_.ld), rows.dq);
  }

 private:
  KeyRanges ranges_of(int head) const {
    return KeyRanges(a_, blocks_.sequence(), blocks_.index(), blocks_.head_k(head));
  }

  static Columns<T> of_rows(const T* data, std::int64_t ld) {
    return {data, ld, static_cast<int>(ld)};
  }

  template <typename A>
  void add(const A& a, const A& p, int rows, int terms, const Columns<T>& b, T* c) const {
    if (hides_ && !all_finite(b, terms)) {
      visible_product(a, p, rows, terms, b, c, b.ld);
    } else {
      product(a, rows, terms, b, true, c, b.ld);
    }
  }

#if ANYFLASH_CPU_TILES
  // The products of cpu/amx/backward.h.
  void multiply_tiles(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    const int line = tile_line(a_.head_dim);
    const int line_v = tile_line(a_.head_dim_v);
    const int count = round_up(keys.padded, kTileRows);
    tile_product(keys.tiles.k, line, count, rows.tiles.q_across, kBlockM, rows.width,
                 line / kTileTerms, false, scratch_.s, kBlockM);
    tile_product(keys.tiles.v, line_v, count, rows.tiles.dout_across, kBlockM, rows.width,
                 line_v / kTileTerms, false, scratch_.ds, kBlockM);
  }

  void add_tiles_to_keys(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    const ProductTiles& tiles = scratch_.tiles;
    const int count = round_up(keys.padded, kTileRows);
    const int steps = tile_line(rows.width) / kTileTerms;
    pack_tile(scratch_.s, keys.padded, rows.width, tiles.p);
    pack_tile(scratch_.ds, keys.padded, rows.width, tiles.ds);
    tile_product(tiles.p, kBlockM, count, rows.tiles.dout, tile_line(a_.head_dim_v),
                 static_cast<int>(scratch_.ld_v), steps, true, keys.dv, scratch_.ld_v);
    tile_product(tiles.ds, kBlockM, count, rows.tiles.q, tile_line(a_.head_dim),
                 static_cast<int>(scratch_.ld), steps, true, keys.dk, scratch_.ld);
  }

  void add_tiles_to_rows(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    const ProductTiles& tiles = scratch_.tiles;
    pack_tile_across(scratch_.ds, keys.padded, rows.width, tiles);
    tile_product(tiles.ds_across, kBlockN, rows.width, keys.tiles.k_pairs, tile_line(a_.head_dim),
                 static_cast<int>(scratch_.ld), tile_line(keys.padded) / kTileTerms, true, rows.dq,
                 scratch_.ld);
  }
#else
  void multiply_tiles(const RowBlock<T>&, const KeyBlock<T>&) const {}
  void add_tiles_to_keys(const RowBlock<T>&, const KeyBlock<T>&) const {}
  void add_tiles_to_rows(const RowBlock<T>&, const KeyBlock<T>&) const {}
#endif

  // kept^T of the tile.
  void draw(const RowBlock<T>& rows, const KeyBlock<T>& keys) const {
    using UInt = typename S::UInt;
    constexpr int kColumns = 8;
    const Dropout dropout(a_, blocks_.index(), rows.head);
    const auto threshold = S::broadcast_uint(a_.dropout_threshold);
    const auto low_half = S::broadcast_uint(0xffffu);
    const Vec scale = S::broadcast(static_cast<T>(65536.0 / (65536.0 - a_.dropout_threshold)));
    UInt words[4][kBlockM] = {};
    UInt* to[4] = {words[0], words[1], words[2], words[3]};
    for (int j = 0; j < keys.padded; ++j) {
      const int column = j % kColumns;
      if (column == 0) {
        draw_rows<T>(dropout, rows.first_row, rows.count, (keys.first_key + j) / kColumns, to);
      }
      for (int lane = 0; lane < rows.width; lane += S::kLanes) {
        const auto draw = S::load(words[column / 2] + lane) >> (16 * (column % 2)) & low_half;
        S::store(scratch_.kept + j * kBlockM + lane, draw >= threshold ? scale : Vec{});
      }
    }
  }

  // What becomes of scores on their way from the product.
  struct Score {
    Vec value;
    Vec cap_slope;  // 1 - (s1 / softcap)^2, if there is a softcap
    Vec bias;
    Vec distance;
  };

  // s0 (divided by softcap, if there is one) of key first_key + j and the rows from `lane` on.
  ANYFLASH_CPU_INLINE Score modified(Vec s, const RowBlock<T>& rows, int lane, int first_key,
                                     int j) const {
    Score x{};
    if (modifier_.has_softcap()) {
      const Vec t = tanh_vector<T>(s);
      s = t * modifier_.softcap();
      x.cap_slope = (T(1) - t) * (T(1) + t);
    }
    Vec slope = {};
    if (modifier_.has_alibi()) {
      slope = S::broadcast(rows.rows[0].slope);  // one head
      x.distance = S::load(rows.diagonal + lane) - S::broadcast(static_cast<T>(first_key + j));
    }
    if (modifier_.has_bias()) x.bias = S::load(scratch_.bias + j * kBlockM + lane);
    x.value = modifier_.shifted(s, x.distance, slope, x.bias);
    return x;
  }

  // The equations at the top, from the two products on.
  template <typename Kind>
  void finish(const RowBlock<T>& rows, const KeyBlock<T>& keys, GradientOf of, Kind) const {
    const KeysWithin<typename S::Int> within{rows.first, rows.end};
    const bool sums_slope = of == GradientOf::kProduct && p_.dalibi_slopes.data != nullptr;
    const bool caps = of == GradientOf::kProduct && modifier_.has_softcap();
    const bool dropout = a_.dropout_threshold != 0;
    const Vec hidden_score = S::broadcast(T(-kInfinity));
    const Vec hidden = S::broadcast(kHiddenProbability<T>);
    for (int lane = 0, n = 0; lane < rows.width; lane += S::kLanes, ++n) {
      const Vec lse = S::load(rows.lse + lane);
      const Vec delta = S::load(rows.delta + lane);
      Vec slope_sum = {};
      for (int j = 0; j < keys.padded; ++j) {
        const int at = j * kBlockM + lane;
        Vec s = S::load(scratch_.s + at) * scale_;
        Vec dp = S::load(scratch_.ds + at);
        Vec kept = {};
        Score x{};
        if constexpr (Kind::kModify) {
          x = modified(s, rows, lane, keys.first_key, j);
          s = x.value;
          kept = dropout ? S::load(scratch_.kept + at) : S::broadcast(T(1));
          dp = dp * kept;
        }
        const auto where_visible = [&](Vec visible, Vec otherwise) {
          if constexpr (Kind::kModify) {
            if (modifier_.has_bias()) visible = x.bias == hidden_score ? otherwise : visible;
          }
          if constexpr (Kind::kMask) {
            visible = within.template select<T>(n, keys.first_key + j, visible, otherwise);
          }
          return visible;
        };
        const Vec p = probability(s - lse);
        Vec ds = where_visible(p * (dp - delta), Vec{});
        if constexpr (Kind::kModify) {
          if (sums_slope) slope_sum -= ds * S::max(x.distance, -x.distance);
          if (caps) ds = where_visible(ds * x.cap_slope, Vec{});
        }
        S::store(scratch_.s + at, where_visible(Kind::kModify ? p * kept : p, hidden));
        S::store(scratch_.ds + at, ds);
      }
      if (sums_slope) add_slopes(slope_sum, rows.slope_sum + lane);
    }
  }

  // e^x; the sum of a softmax is at least each of its terms, so that x > 0 is a rounding error, or
  // the caller's: then it may be infinite.
  static ANYFLASH_CPU_INLINE Vec probability(Vec x) {
    const Vec most = S::broadcast(T(sizeof(T) == sizeof(float) ? 128 : 1024));
    return exp2_nonpositive<T>(S::min(most, x * kLog2EOf<T>));
  }

  static void add_slopes(Vec sum, double* to) {
    T lane[S::kLanes];
    S::store(lane, sum);
    for (int i = 0; i < S::kLanes; ++i) to[i] += static_cast<double>(lane[i]);
  }

  const BackwardParams& p_;
  const Attention& a_;
  const Blocks<E>& blocks_;
  const ScoreModifier<T>& modifier_;
  const BackwardScratch<T>& scratch_;
  T scale_;
  bool hides_ = false;
  bool by_tiles_ = false;
#if ANYFLASH_CPU_TILES
  const TileRegisters registers_;
#endif
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
