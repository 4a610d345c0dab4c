// A consumer warpgroup's epilogue: normalise, round, and write the output rows and their LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/epilogue.h"
#include "params.h"
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

template <class Traits, class Variant>
ANYFLASH_DEVICE void forward_epilogue(const typename Traits::Block::Launch& params,
                                      const typename Traits::Block& block,
                                      ForwardStages<Traits>& stages, typename Traits::AccO& acc_o,
                                      const StagedSoftmax& softmax, const FinishedRows& finished) {
  const ForwardWorkTile& work_tile = block.tile;
  const int rows = work_tile.sequence.seqlen_q - work_tile.first_row;
  const Variant variant(params.attention, work_tile, Traits::kBlockM, Traits::kBlockN);
  auto out = as_matrix(acc_o);
  finished.apply(out, variant.dropout_scale());
  auto lse = finished.lse;
  const auto coordinates = accumulator_coordinates<Traits::kHeadDimV>();
  if (params.prior.out != nullptr) {
    join_prior(params, work_tile, out, lse, coordinates, rows);
    __syncwarp();  // all lanes have read the LSE
  }
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, work_tile, softmax, coordinates, rows);
  }
  if (params.out_dtype == DType::kFloat32) {
    store_float_rows(params, work_tile, out, coordinates, rows);
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
  if (stages.take_found_nonfinite()) restore_block<Traits>(params, block, variant);
}

}  // namespace anyflash::sm90
