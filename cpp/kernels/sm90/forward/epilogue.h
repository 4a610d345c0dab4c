// A consumer warpgroup's epilogue: normalise, round, and write the output rows and their LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/epilogue.h"
#include "params.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "sm90/tma.h"
#include "variant/broadcast_tensor.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// A warp's 16 rows of O, in shared memory where its Q was, and on their way to global memory. No
// other warp has to be waited for.
template <class Traits>
class StagedRows {
  using Element = typename Traits::Element;
  using TileO = PanelTile<Element, Traits::kWarpgroupRows, Traits::kHeadDimV>;
  static_assert(TileO::kSize <= Traits::TileQ::kSize, "O lies where Q was");
  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr int kWarpRows = 16;

 public:
  // `queries`: of this warpgroup.
  ANYFLASH_DEVICE explicit StagedRows(Element* queries)
      : row_(static_cast<int>(threadIdx.x) / 32 * kWarpRows),
        lane_(threadIdx.x % 32),
        rows_(queries + row_ % Traits::kWarpgroupRows * kPanelColumns) {}

  ANYFLASH_DEVICE void write(const typename Traits::AccO& acc_o) {
    RoundedAccumulator<Element, Traits::kHeadDimV> rounded;
    rounded.round(acc_o);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kHeadDimV / 16; ++i) {
      store_matrices(piece_of<TileO>(rows_, lane_ % kWarpRows, 2 * i + lane_ / kWarpRows),
                     rounded.words + 4 * i);
    }
    fence_smem_writes();
    __syncwarp();  // all rows are there
  }

  // Rows at and beyond the sequence's end are not written: by TMA where the tensor ends there.
  ANYFLASH_DEVICE void store(const ForwardLaunch& params, const ForwardWorkTile& work_tile) {
    const int rows = work_tile.sequence.seqlen_q - work_tile.first_row - row_;
    if (rows <= 0) return;
    if (rows < kWarpRows && params.attention.cu_seqlens_q != nullptr) {
      copy(params, work_tile, rows);
      return;
    }
    if (lane_ != 0) return;
    TileCoordinates to{0, static_cast<int>(work_tile.sequence.first_q) + work_tile.first_row + row_,
                       work_tile.head, static_cast<int>(work_tile.sequence.batch)};
    CUTE_UNROLL
    for (int panel = 0; panel < TileO::kPanels; ++panel) {
      store_box(params.out_map, to, rows_ + panel * TileO::kPanelElements);
      to.column += kPanelColumns;
    }
    commit_stores();
  }

 private:
  ANYFLASH_DEVICE void copy(const ForwardLaunch& params, const ForwardWorkTile& work_tile,
                            int rows) {
    constexpr int kVectors = Traits::kHeadDimV / kVector;
    Element* const out = first_of<Element>(params.out, params.out_stride, work_tile.sequence,
                                           work_tile.head, work_tile.first_row + row_);
    for (int i = lane_; i < rows * kVectors; i += 32) {
      const int row = i / kVectors;
      const int vector = i % kVectors;
      if (vector * kVector >= params.attention.head_dim_v) continue;
      *reinterpret_cast<uint4*>(out + row * params.out_stride.row + vector * kVector) =
          *reinterpret_cast<const uint4*>(piece_of<TileO>(rows_, row, vector));
    }
  }

  int row_;  // of the block, this warp's first
  int lane_;
  Element* rows_;
};

// Adds what the guard took out of V, when the whole block is in global memory.
template <class Traits, class Variant>
ANYFLASH_DEVICE void restore_block(const ForwardLaunch& params, const ForwardWorkTile& work_tile,
                                   const Variant& variant) {
  if (Traits::kOutputInQ) {
    if (threadIdx.x % 32 == 0) wait_stores();
    fence_all_writes();
  }
  sync_consumers<Traits::kThreads>();
  using Element = typename Traits::Element;
  const auto values = tensor_values<Element>(params.attention, work_tile);
  if (params.out_dtype == DType::kFloat32) {
    restore_values<Traits, float>(params, work_tile, variant, values);
  } else {
    restore_values<Traits, Element>(params, work_tile, variant, values);
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void forward_epilogue(const ForwardLaunch& params, const ForwardWorkTile& work_tile,
                                      ForwardStages<Traits>& stages, typename Traits::AccO& acc_o,
                                      StagedSoftmax& softmax) {
  const int rows = work_tile.sequence.seqlen_q - work_tile.first_row;
  const Variant variant(params.attention, work_tile, Traits::kBlockN);
  auto out = as_matrix(acc_o);
  const float sink =
      params.attention.sinks.data == nullptr
          ? -INFINITY
          : load_float(params.attention.sinks, work_tile.head * params.attention.sinks.stride.head);
  auto lse = softmax.finish(out, sink, variant.dropout_scale());
  const auto coordinates = accumulator_coordinates<Traits::kHeadDimV>();
  if (params.prior.out != nullptr) {
    join_prior(params, work_tile, out, lse, coordinates, rows);
    __syncwarp();  // all lanes have read the LSE
  }
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, work_tile, softmax, coordinates, rows);
  }
  if (params.out_dtype == DType::kFloat32) {
    store_float(params, work_tile, out, coordinates, rows);
  } else if constexpr (Traits::kOutputInQ) {
    StagedRows<Traits> staged(stages.queries());
    staged.write(acc_o);
    staged.store(params, work_tile);
  } else {
    using Element = typename Traits::Element;
    store_rows<Element, Traits::kHeadDimV>(
        first_of<Element>(params.out, params.out_stride, work_tile.sequence, work_tile.head,
                          work_tile.first_row),
        params.out_stride.row, static_cast<int>(threadIdx.x) / 32 * 16, rows,
        params.attention.head_dim_v, acc_o);
  }
  if (params.lse != nullptr) store_lse(params, work_tile, lse, coordinates, rows);
  if (stages.take_found_nonfinite()) restore_block<Traits>(params, work_tile, variant);
}

}  // namespace anyflash::sm90
