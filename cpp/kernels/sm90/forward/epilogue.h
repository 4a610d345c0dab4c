// A consumer warpgroup's epilogue: normalise, round, and write the output rows and their LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/merge.h"
#include "cuda/epilogue.h"
#include "params.h"
#include "sm90/accumulator.h"
#include "sm90/float_rows.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "sm90/staged_rows.h"
#include "sm90/tma.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// A warp's 16 rows of O, in shared memory where its Q was.
template <class Traits>
using TileO = PanelTile<typename Traits::Element, Traits::kWarpgroupRows, Traits::kHeadDimV>;

// O of this warp's rows on its way to global memory. Rows at and beyond the sequence's end are not
// written.
template <class Traits>
ANYFLASH_DEVICE void stage_output(const ForwardLaunch& params, const ForwardWorkTile& work_tile,
                                  typename Traits::Element* queries,
                                  const typename Traits::AccO& acc_o) {
  using Element = typename Traits::Element;
  static_assert(TileO<Traits>::kSize <= Traits::TileQ::kSize, "O lies where Q was");
  const int row = work_tile.first_row + warp_row();
  const Sequence& sequence = work_tile.sequence;
  StagedRows<TileO<Traits>> staged(queries, warp_row() % Traits::kWarpgroupRows);
  staged.write(acc_o);
  staged.publish();
  staged.store(params.out_map,
               {0, static_cast<int>(sequence.first_q) + row, work_tile.head,
                static_cast<int>(sequence.batch)},
               params.attention.cu_seqlens_q != nullptr,
               {first_of<Element>(params.out, params.out_stride, sequence, work_tile.head, row),
                params.out_stride.row, sequence.seqlen_q - row, params.attention.head_dim_v});
}

// Adds what the guard took out of V, when the whole block is in global memory.
template <class Traits, class Variant>
ANYFLASH_DEVICE void restore_block(const typename Traits::Block::Launch& params,
                                   const typename Traits::Block& block, const Variant& variant) {
  if (Traits::kOutputInQ) {
    if (threadIdx.x % 32 == 0) wait_stores();
    fence_all_writes();
  }
  sync_consumers<Traits::kThreads>();
  using Element = typename Traits::Element;
  const auto values = block.template values<Element>(params);
  if (params.out_dtype == DType::kFloat32) {
    restore_values<Traits, float>(params, block.tile, variant, values);
  } else {
    restore_values<Traits, Element>(params, block.tile, variant, values);
  }
}

// join_prior(), where rows of the results over other keys have wide columns.
template <class Matrix, class Lse>
ANYFLASH_DEVICE void join_wide_prior(const Prior& prior, const float* prior_out,
                                     const float* prior_lse, Matrix& out, Lse& lse, int rows) {
  constexpr int kColumns = decltype(cute::size<1>(out))::value;
  constexpr int kChunk = kColumns % 16 == 0 ? 16 : 8;  // columns of each row under way
  static_assert(kColumns % kChunk == 0);
  float before_lse[kThreadRows];
  CUTE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    const int i = thread_row() + 8 * row;
    before_lse[row] = i < rows ? prior_lse[i * prior.lse_stride.row] : -INFINITY;
  }
  CUTE_UNROLL
  for (int first = 0; first < kColumns; first += kChunk) {
    float4 before[kThreadRows][kChunk / 4];
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const int i = thread_row() + 8 * row;
      CUTE_UNROLL
      for (int col = 0; col < kChunk; col += 4) {
        const WideColumns columns(i < rows, 4 * (first + col) + thread_column(), prior.columns);
        before[row][col / 4] = columns.load(prior_out + i * prior.out_stride.row);
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const Merge<float> merge(before_lse[row], lse(row));
      CUTE_UNROLL
      for (int col = 0; col < kChunk; col += 4) {
        const float4& a = before[row][col / 4];
        const auto b = [&](int i) -> float& { return out(row, first + col + i); };
        b(0) = merge.out(a.x, b(0));
        b(1) = merge.out(a.y, b(1));
        b(2) = merge.out(a.z, b(2));
        b(3) = merge.out(a.w, b(3));
      }
      if (first + kChunk == kColumns) lse(row) = merge.lse();
    }
  }
}

template <class Matrix, class Lse, class Coordinates>
ANYFLASH_DEVICE void join_state(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                Matrix& out, Lse& lse, const Coordinates& coordinates, int rows) {
  const Prior& prior = params.prior;
  const auto first = [&](const void* data, const Strides& stride) {
    return first_of<const float>(data, stride, work_tile.sequence, work_tile.head,
                                 work_tile.first_row);
  };
  const float* const prior_out = first(prior.out, prior.out_stride);
  if (has_wide_columns(prior_out, prior.out_stride, prior.columns)) {
    join_wide_prior(prior, prior_out, first(prior.lse, prior.lse_stride), out, lse, rows);
  } else {
    join_prior(params, work_tile, out, lse, coordinates, rows);
  }
}

template <class Matrix, class Coordinates>
ANYFLASH_DEVICE void store_float_output(const ForwardParams& params,
                                        const ForwardWorkTile& work_tile, const Matrix& out,
                                        const Coordinates& coordinates, int rows) {
  float* const first = first_of<float>(params.out, params.out_stride, work_tile.sequence,
                                       work_tile.head, work_tile.first_row);
  const int columns = params.attention.head_dim_v;
  if (!has_wide_columns(first, params.out_stride, columns)) {
    store_float_rows(params, work_tile, out, coordinates, rows);
    return;
  }
  CUTE_UNROLL
  for (int row = 0; row < kThreadRows; ++row) {
    const int i = thread_row() + 8 * row;
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(out); col += 4) {
      WideColumns(i < rows, 4 * col + thread_column(), columns)
          .store(first + i * params.out_stride.row,
                 {out(row, col), out(row, col + 1), out(row, col + 2), out(row, col + 3)});
    }
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void forward_epilogue(const typename Traits::Block::Launch& params,
                                      const typename Traits::Block& block,
                                      ForwardStages<Traits>& stages, typename Traits::AccO& acc_o,
                                      const StagedSoftmax& softmax, const FinishedRows& finished) {
  const ForwardWorkTile& work_tile = block.tile;
  const int rows = work_tile.sequence.seqlen_q - work_tile.first_row;
  // Made anew where it is needed: most blocks need no more of it than dropout's scale.
  const auto variant = [&] {
    return Variant(params.attention, work_tile, Traits::kBlockM, Traits::kBlockN);
  };
  auto out = as_matrix(acc_o);
  finished.apply(out, variant().dropout_scale());
  auto lse = finished.lse;
  const auto coordinates = accumulator_coordinates<Traits::kHeadDimV>();
  if (params.prior.out != nullptr) {
    join_state(params, work_tile, out, lse, coordinates, rows);
    __syncwarp();  // all lanes have read the LSE
  }
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, work_tile, softmax, coordinates, rows);
  }
  if (params.out_dtype == DType::kFloat32) {
    store_float_output(params, work_tile, out, coordinates, rows);
  } else if constexpr (Traits::kOutputInQ) {
    stage_output<Traits>(params, work_tile, stages.queries(), acc_o);
  } else {
    using Element = typename Traits::Element;
    store_rows<Element, Traits::kHeadDimV>(
        first_of<Element>(params.out, params.out_stride, work_tile.sequence, work_tile.head,
                          work_tile.first_row),
        params.out_stride.row, warp_row(), rows, params.attention.head_dim_v, acc_o);
  }
  if (params.lse != nullptr) store_lse(params, work_tile, lse, coordinates, rows);
  if (stages.take_found_nonfinite()) restore_block<Traits>(params, block, variant());
}

}  // namespace anyflash::sm90
