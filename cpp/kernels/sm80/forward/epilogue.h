// The forward epilogue of one CTA: normalise, round, and write the output tile and its LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "cuda/epilogue.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/tile_pieces.h"
#include "sm80/tiled_mma.h"
#include "variant/forward_variants.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// Rounded, and through shared memory, where Q lay, so that rows are written 16 bytes at a time.
template <class Traits, class AccO, class Places>
ANYFLASH_DEVICE void store_rounded(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                   typename Traits::SharedStorage& smem, const AccO& acc_o,
                                   const Places& tOcO, int rows) {
  using Element = typename Traits::Element;
  using TileO = typename Traits::TileO;
  accumulator_to_smem<TileO>(smem.q.data(), round_fragment<Element>(acc_o), tOcO);
  __syncthreads();  // the whole tile is in shared memory
  const auto gO = gmem_tile<Element>(typename TileO::Shape{}, params.out, params.out_stride,
                                     work_tile.sequence.batch, work_tile.head,
                                     work_tile.sequence.first_q + work_tile.first_row);
  store_pieces<TileO, PlainKeyOrder<Traits::kBlockM>>(
      cute::raw_pointer_cast(gO.data()), static_cast<int>(params.out_stride.row), rows,
      params.attention.head_dim_v, smem.q.data(), threadIdx.x);
}

template <class Traits, class Variant, class Keys, class AccO, class Softmax>
ANYFLASH_DEVICE void forward_epilogue(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                      typename Traits::SharedStorage& smem, AccO& acc_o,
                                      Softmax& softmax, bool found_nonfinite, const Keys& keys) {
  using namespace cute;
  using Element = typename Traits::Element;
  const int rows = work_tile.sequence.seqlen_q - work_tile.first_row;
  const Variant variant(params.attention, work_tile, Traits::kBlockM, Traits::kBlockN);

  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));
  const float sink =
      params.attention.sinks.data == nullptr
          ? -INFINITY
          : load_float(params.attention.sinks, work_tile.head * params.attention.sinks.stride.head);
  auto lse = softmax.finish(out_matrix, sink, variant.dropout_scale());

  auto tOcO =
      typename Traits::TiledMma{}
          .get_thread_slice(threadIdx.x)
          .partition_C(make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{}));
  auto coordinates = make_tensor(tOcO.data(), accumulator_as_matrix(tOcO.layout()));
  if (params.prior.out != nullptr) {
    join_prior(params, work_tile, out_matrix, lse, coordinates, rows);
    __syncthreads();  // warps that share rows have read their LSE
  }
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, work_tile, softmax, coordinates, rows);
  }
  if (params.lse != nullptr) store_lse(params, work_tile, lse, coordinates, rows);
  const bool float_out = params.out_dtype == DType::kFloat32;
  if (float_out) store_float_rows(params, work_tile, out_matrix, coordinates, rows);
  else store_rounded<Traits>(params, work_tile, smem, acc_o, tOcO, rows);

  if (__syncthreads_or(found_nonfinite)) {  // and the whole tile is in global memory
    const auto values = keys.template values<Element>(params.attention, work_tile);
    if (float_out) restore_values<Traits, float>(params, work_tile, variant, values);
    else restore_values<Traits, Element>(params, work_tile, variant, values);
  }
}

}  // namespace anyflash::sm80
