// The ends of the Hopper backward's kernels: gradients are scaled, rounded, and written by rows.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "sm90/accumulator.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/variants.h"
#include "sm90/float_rows.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/staged_rows.h"
#include "sm90/tma.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// The warp's 16 rows from `warp_row` of the target on, as far as they exist: in 16 bits by rows, in
// float32 element by element.
template <class Out, int kColumns>
ANYFLASH_DEVICE void store_gradient(const GradientTile<Out>& target, int warp_row,
                                    const Accumulator<kColumns>& acc) {
  if constexpr (sizeof(Out) == 2) {
    store_rows<Out, kColumns>(target.data, target.stride.row, warp_row, target.rows, target.columns,
                              acc);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(acc); ++i) {
      const int row = warp_row + static_cast<int>(threadIdx.x % 32 / 4) + i / 2 % 2 * 8;
      const int col = i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2;
      target.store(row, col, acc(i));
    }
  }
}

// The same, in float32 four columns at a time where the target allows. For kernels with registers
// to spare.
template <class Out, int kColumns>
ANYFLASH_DEVICE void store_dq(const GradientTile<Out>& target, int warp_row,
                              const Accumulator<kColumns>& acc) {
  if constexpr (sizeof(Out) == sizeof(float)) {
    if (has_wide_columns(target.data, target.stride, target.columns)) {
      const auto values = as_matrix(acc);
      CUTE_UNROLL
      for (int row = 0; row < kThreadRows; ++row) {
        const int i = warp_row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * row;
        CUTE_UNROLL
        for (int col = 0; col < cute::size<1>(values); col += 4) {
          const WideColumns columns(i < target.rows, 4 * col + thread_column(), target.columns);
          float* const to = target.data + i * target.stride.row;
          const float4 four{values(row, col), values(row, col + 1), values(row, col + 2),
                            values(row, col + 3)};
          if (target.accumulates) columns.add(to, four);
          else columns.store(to, four);
        }
      }
      return;
    }
  }
  store_gradient<Out, kColumns>(target, warp_row, acc);
}

template <class Acc>
ANYFLASH_DEVICE void scale(Acc& acc, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) acc(i) *= factor;
}

// What was taken out of dO, when all consumers have stored their part of dV. `dv` begins with
// column `first_column`.
template <class Traits, class Out>
ANYFLASH_DEVICE void restore_dv(const BackwardScratch& params, const BackwardWorkTile& block,
                                const GradientTile<Out>& dv, int first_column = 0) {
  sync_consumers<Traits::kThreads>();
  using Variant = QueryTileVariant<typename Traits::Variant>;
  restore_dout<Traits, Variant>(params, block, dv, first_column);
}

// Gives acc_dk its scale, and writes both in the dtype `Out`.
template <class Traits, class Out>
ANYFLASH_DEVICE void write_key_gradients(const BackwardScratch& params,
                                         const BackwardWorkTile& block, bool nonfinite_dout,
                                         typename Traits::AccK& acc_dk,
                                         const typename Traits::AccV& acc_dv) {
  scale(acc_dk, params.ds_scale);
  store_gradient<Out, Traits::kHeadDim>(dk_tile<Out>(params, block), warp_row(), acc_dk);
  store_gradient<Out, Traits::kHeadDimV>(dv_tile<Out>(params, block), warp_row(), acc_dv);
  if (nonfinite_dout) restore_dv<Traits>(params, block, dv_tile<Out>(params, block));
}

// This warp's 16 keys, in 16 bits, on their way to global memory, by way of `place`.
template <class Tile>
ANYFLASH_DEVICE void stage_gradient(StagedRows<Tile> place, const CUtensorMap& map,
                                    const BackwardScratch& params, const BackwardWorkTile& block,
                                    const GradientTile<typename Tile::Element>& target) {
  const int row = warp_row();
  TileCoordinates to = key_coordinates(block);
  to.row += row;
  place.store(map, to, params.attention.cu_seqlens_k != nullptr,
              {target.data + row * target.stride.row, target.stride.row, target.rows - row,
               target.columns});
}

// dV goes by way of V of the same keys, which nobody else reads, and dK by way of `rows`: a buffer
// of 64 rows that nobody else uses.
template <class Traits>
ANYFLASH_DEVICE void stage_key_gradients(const BackwardLaunch& params,
                                         const BackwardWorkTile& block,
                                         typename Traits::SharedStorage& smem,
                                         typename Traits::Element* rows,
                                         typename Traits::AccK& acc_dk,
                                         const typename Traits::AccV& acc_dv) {
  using Element = typename Traits::Element;
  using TileDK = PanelTile<Element, Traits::kWarpgroupKeys, Traits::kHeadDim>;
  static_assert(TileDK::kSize <= Traits::TileQ::kSize && TileDK::kSize <= Traits::TileDO::kSize);
  StagedRows<typename Traits::TileV> dv(smem.v.data(), warp_row());
  dv.write(acc_dv);
  scale(acc_dk, params.ds_scale);
  StagedRows<TileDK> dk(rows, warp_row() % Traits::kWarpgroupKeys);
  dk.write(acc_dk);
  dk.publish();
  stage_gradient(dv, params.dv_map, params, block, dv_tile<Element>(params, block));
  stage_gradient(dk, params.dk_map, params, block, dk_tile<Element>(params, block));
}

}  // namespace anyflash::sm90
