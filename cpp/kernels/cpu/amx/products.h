// The two products of a panel by tiles (tiles.h), where q, k and v are bfloat16 and the processor
// has them: query rows in the columns of b.
//   S^T = K Q^T    a = k  (keys, head_dim)     b = q  (head_dim / 2, rows, 2)
//   O^T = V^T P^T  a = v  (head_dim_v, keys)   b = p  (keys / 2, rows, 2)
// Head dims are padded with zeros, q's and k's to 32, v's to 16. P is rounded to bfloat16, as on a
// GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/amx/tiles.h"
#include "cpu/forward/panel_products.h"
#include "cpu/gemm.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Which products a task's panels take.
template <typename Rows, typename E>
struct ProductsFor {
  using Type = PanelProducts<Rows>;
};
template <typename Rows>
using ProductsOf = typename ProductsFor<Rows, typename Rows::E>::Type;

#if ANYFLASH_CPU_TILES

template <typename Rows>
class TileProducts : public PanelProducts<Rows> {
 public:
  using Base = PanelProducts<Rows>;
  using T = float;
  using S = Simd<T>;
  using Vec = S::Vec;
  using UIntVec = S::UIntVec;

  // A step of O^T through memory costs as much as its product.
  static constexpr T kLazyRescaleLimit = 8;

  using Base::Base;

  void load_queries(int panel, int count, int width) const {
    const int padded = padded_dim();
    BFloat16* const rows = k();  // free until keys are loaded
    std::memset(rows, 0, sizeof(*rows) * padded * width);
    for (int r = 0; r < count; ++r) {
      copy_row(rows_.query_row(panel * Base::kPanel + r), p_.q_stride.col, p_.head_dim,
               rows + r * padded);
    }
    transpose_pairs(rows, padded, width, padded, q(panel), 2 * width);
  }

  void load_keys(int block, int first, int keys) {
    finish();
    const int padded = padded_dim();
    for (int j = first; j < keys; ++j) {
      rows_.copy_key(rows_.k, block + j, k() + j * padded);
      std::memset(k() + j * padded + p_.head_dim, 0, sizeof(BFloat16) * (padded - p_.head_dim));
    }
    finite_ = transpose_values(block, first, keys);
    // 0 times NaN or infinity must not be added for a hidden key: multiply-adds leave it out.
    if (!finite_) Base::pack_values(block, first, keys);
  }

  template <int NV, typename Visible>
  void scores(int panel, int block, const Zones& zones, const Visible& visible,
              ScoreRange<T, NV>& range_out) {
    constexpr int kRows = NV * S::kLanes;
    const int padded = padded_dim();
    const int begin = zones.begin / kTileRows * kTileRows;
    tile_product(k() + begin * padded, padded, round_up(zones.end, kTileRows) - begin, q(panel),
                 kRows, kRows, padded / kTileTerms, /*add=*/false, scratch_.s + begin * kRows,
                 kRows);
    finish();
    ScoreRange<T, NV> range = range_out;
    T* const s = scratch_.s;
    const T scale = this->scale_;
    const auto step = [&](int j, const auto& seen) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        T* const at = s + j * kRows + n * S::kLanes;
        finish_score<T, NV>(S::load(at) * scale, seen, n, block + j, at, range);
      }
    };
    int j = zones.begin;
    for (; j < zones.full_begin; ++j) step(j, visible);
    for (; j < zones.full_end; ++j) step(j, EveryKey{});
    for (; j < zones.end; ++j) step(j, visible);
    range_out = range;
  }

  // The product follows after the next panel's scores: what has just been stored cannot be loaded
  // into a tile at once.
  template <int NV>
  void add_values(int panel, const Zones& zones, const Vec (&alpha)[NV]) {
    if (!finite_) return Base::template add_values<NV>(panel, zones, alpha);
    const int begin = zones.begin / kTileTerms * kTileTerms;
    const int steps = (zones.end - begin + kTileTerms - 1) / kTileTerms;
    pack_probabilities<NV>(zones, begin, begin + steps * kTileTerms);
    T* const o = Base::o_panel(panel);
    rescale<NV>(alpha, Base::padded_dim_v(), o);
    pending_ = {NV * S::kLanes, begin, steps, o};
  }

  void finish() {
    if (pending_.steps == 0) return;
    tile_product(v() + pending_.first_key, kPanelKeys, Base::padded_dim_v(), p(), pending_.width,
                 pending_.width, pending_.steps, /*add=*/true, pending_.o, pending_.width);
    pending_.steps = 0;
  }

 private:
  using Base::p_;
  using Base::rows_;
  using Base::scratch_;

  // q, k and v take the place of their float32 forms.
  BFloat16* q(int panel) const {
    return reinterpret_cast<BFloat16*>(scratch_.q) +
           std::int64_t{panel} * Base::kPanel * padded_dim();
  }
  BFloat16* k() const { return reinterpret_cast<BFloat16*>(scratch_.k); }
  BFloat16* v() const { return reinterpret_cast<BFloat16*>(scratch_.v); }
  BFloat16* p() const { return reinterpret_cast<BFloat16*>(scratch_.p); }

  int padded_dim() const { return round_up(p_.head_dim, kTileTerms); }

  // V^T of a block, zeros outside [first, keys) up to whole tiles. Whether all of it is finite.
  bool transpose_values(int block, int first, int keys) const {
    const int padded = Base::padded_dim_v();
    BFloat16* const rows = v() + kPanelKeys * padded;
    const int begin = first / kTileTerms * kTileTerms;
    const int end = round_up(keys, kTileTerms);
    std::memset(rows + begin * padded, 0, sizeof(*rows) * padded * (end - begin));
    for (int j = first; j < keys; ++j) {
      rows_.copy_key(rows_.v, block + j, rows + j * padded);
    }
    UIntVec exponents = {};
    for (int j = begin; j < end; j += kTileTerms) {
      for (int c = 0; c < padded; c += kTileRows) {
        Vec x[S::kLanes];  // pairs of keys
        ANYFLASH_CPU_UNROLL
        for (int i = 0; i < S::kLanes; ++i) {
          const BFloat16* const low = rows + (j + 2 * i) * padded + c;
          const UIntVec pair = load_pairs(low, low + padded);
          exponents |= exponent_carries(pair);
          x[i] = S::from_bits(pair);
        }
        S::transpose(x);
        ANYFLASH_CPU_UNROLL
        for (int i = 0; i < S::kLanes; ++i) {
          std::memcpy(v() + (c + i) * kPanelKeys + j, &x[i], sizeof(x[i]));
        }
      }
    }
    return !any_carry(exponents);
  }

  // P^T of keys [begin, end), zeros outside the zones and for hidden keys.
  template <int NV>
  void pack_probabilities(const Zones& zones, int begin, int end) const {
    constexpr int kRows = NV * S::kLanes;
    const T* const s = scratch_.s;
    BFloat16* const to = p();
    const auto seen = [&](int j) { return zones.begin <= j && j < zones.end; };
    const auto step = [&](int j, auto hiding) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        const T* const at = s + j * kRows + n * S::kLanes;
        Vec low = S::load(at);
        Vec high = S::load(at + kRows);
        if constexpr (decltype(hiding)::kValue) {
          low = seen(j) ? (low < Vec{} ? Vec{} : low) : Vec{};
          high = seen(j + 1) ? (high < Vec{} ? Vec{} : high) : Vec{};
        }
        store_pairs(low, high, to + (j - begin) * kRows + 2 * n * S::kLanes);
      }
    };
    int j = begin;
    for (; j < zones.full_begin; j += 2) step(j, Hiding<true>{});
    for (; j < zones.full_end; j += 2) step(j, Hiding<false>{});
    for (; j < end; j += 2) step(j, Hiding<true>{});
  }

  // O^T = alpha O^T
  template <int NV>
  static void rescale(const Vec (&alpha)[NV], int columns, T* o) {
    constexpr int kRows = NV * S::kLanes;
    for (int n = 0; n < NV; ++n) {
      if (_mm512_cmpneq_ps_mask(alpha[n], _mm512_set1_ps(1.0f)) == 0) continue;
      for (int c = 0; c < columns; ++c) {
        T* const at = o + c * kRows + n * S::kLanes;
        S::store(at, S::load(at) * alpha[n]);
      }
    }
  }

  struct Product {
    int width;  // of the panel
    int first_key;
    int steps;  // 0: there is none
    T* o;
  };

  const TileRegisters registers_;
  Product pending_{};
  bool finite_ = true;  // the values of this block
};

template <typename Rows>
struct ProductsFor<Rows, BFloat16> {
  using Type = TileProducts<Rows>;
};

#endif

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
