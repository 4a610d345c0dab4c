// The end of a decoding CTA: its warps' results are joined and written, as the result itself or,
// where the keys are split, as a part of it (combine.cu).
#pragma once

#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/element.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/store.h"
#include "cuda/combine.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "sm80/decode/work_tile.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"
#include "variant/mask.h"
#include "variant/tree_mask.h"

namespace anyflash::sm80 {

// Element (row, 0) of the result, or of this split's part of it.
template <class Out>
ANYFLASH_DEVICE Out* result_row(const KvCacheParams& params, const DecodeWorkTile& block, int row) {
  return static_cast<Out*>(params.out) + block.split * stride_of_split(params) +
         block.offset(params.out_stride, row);
}
ANYFLASH_DEVICE float* result_lse(const KvCacheParams& params, const DecodeWorkTile& block,
                                  int row) {
  return params.lse + block.split * lse_stride_of_split(params) +
         block.offset(params.lse_stride, row);
}

// One number of a cache of values, 0 if it does not exist. Of 8 bits: 0 if it is finite.
template <class Traits>
ANYFLASH_DEVICE float cached_value(const KvCacheParams& params, const DecodeWorkTile& block,
                                   int key, int x) {
  const Strides& stride = params.attention.v_stride;
  const CacheSlot place = place_of(params, block.sequence, key);
  if (place.slot < 0) return 0.0f;
  const int64_t offset = place.slot * stride.batch + place.row * stride.row +
                         block.head_k * stride.head + x * stride.col;
  if constexpr (Traits::k8Bit) {
    const float lost = nonfinite_part(static_cast<const unsigned char*>(params.attention.v)[offset],
                                      Float8Format<typename Traits::Element>(params.cache_dtype));
    if (lost == 0.0f || params.v_scale.data == nullptr) return lost;
    return lost * load_float(params.v_scale, scale_index(params.v_scale, place, block.head_k));
  } else {
    return static_cast<float>(
        static_cast<const typename Traits::Element*>(params.attention.v)[offset]);
  }
}

// Gives what clear_values() took out of V to the rows that see it.
template <class Traits, class Out>
ANYFLASH_DEVICE void restore_values(const KvCacheParams& params, const DecodeWorkTile& block) {
  const Mask mask = block.mask(params);
  const TreeMask tree(params, block.batch, block.sequence);
  for (int tile = block.keys.begin; tile < block.keys.end; tile += Traits::kBlockN) {
    if (!block.hides(tile, tile + Traits::kBlockN)) continue;
    const IndexRange keys{tile, min(tile + Traits::kBlockN, block.keys.end)};
    restore_nonfinite<Traits::kThreads>(
        keys, {0, block.rows}, params.attention.head_dim_v,
        [&](int key, int x) { return cached_value<Traits>(params, block, key, x); },
        [&](int row, int key) {
          const SplitKeys seen = block.seen(mask, row);
          const bool visible =
              seen.begin <= key && key < seen.end && tree.keep(block.query(row), key);
          return visible ? TermWeight::kVisible : TermWeight::kHidden;
        },
        [&](int row, int x) -> Out& {
          return result_row<Out>(params, block, row)[x * params.out_stride.col];
        });
  }
}

// Turns the LSEs of each row's parts, one a group of warps, into the parts' weights, and writes the
// row's LSE. A sink is one more part.
template <class Traits>
ANYFLASH_DEVICE void weigh_parts(const KvCacheParams& params, const DecodeWorkTile& block,
                                 typename Traits::Result& result) {
  const int row = threadIdx.x;
  if (row >= block.rows) return;
  float sink = -INFINITY;
  if (params.attention.sinks.data != nullptr) {
    sink = load_float(params.attention.sinks, block.head(row) * params.attention.sinks.stride.head);
  }
  float top = sink;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) top = fmaxf(top, result.lse[part][row]);
  const float reference = top == -INFINITY ? 0.0f : top;
  float sum = sink == -INFINITY ? 0.0f : exp2f((sink - reference) * kLog2E);
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) {
    sum += exp2f((result.lse[part][row] - reference) * kLog2E);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  CUTE_UNROLL
  for (int part = 0; part < Traits::kKeyWarps; ++part) {
    float& lse = result.lse[part][row];
    lse = exp2f((lse - reference) * kLog2E) * inverse;
  }
  if (params.lse != nullptr) {
    *result_lse(params, block, row) = sum == 0.0f ? -INFINITY : reference + logf(sum);
  }
}

// The weighted sums of the parts. A part without keys has 0 and weighs nothing.
template <class Traits, class Out>
ANYFLASH_DEVICE void store_rows(const KvCacheParams& params, const DecodeWorkTile& block,
                                const typename Traits::Result& result) {
  constexpr int kLanes = Traits::kHeadDim < 128 ? Traits::kHeadDim / 4 : 32;  // of a row
  const int thread = threadIdx.x;
  for (int row = thread / kLanes; row < block.rows; row += Traits::kThreads / kLanes) {
    Out* const target = result_row<Out>(params, block, row);
    for (int x = thread % kLanes * 4; x < params.attention.head_dim_v; x += kLanes * 4) {
      float sums[4] = {};
      CUTE_UNROLL
      for (int part = 0; part < Traits::kKeyWarps; ++part) {
        const float weight = result.lse[part][row];
        const auto values = *reinterpret_cast<const float4*>(&result.out[part][row][x]);
        sums[0] += weight * values.x;
        sums[1] += weight * values.y;
        sums[2] += weight * values.z;
        sums[3] += weight * values.w;
      }
      store_four(sums, target + x * params.out_stride.col, params.out_stride.col,
                 params.attention.head_dim_v - x);
    }
  }
}

template <class Traits, class AccO, class Softmax>
ANYFLASH_DEVICE void decode_epilogue(const KvCacheParams& params, const DecodeWorkTile& block,
                                     typename Traits::SharedStorage& smem, AccO& acc_o,
                                     Softmax& softmax, float unit, bool found_nonfinite) {
  using namespace cute;
  using Element = typename Traits::Element;
  const int group = Traits::group();
  const int first_column = Traits::column_warp() * Traits::kWarpColumns;
  auto out_matrix = as_matrix(acc_o);
  auto lse = softmax.finish(out_matrix, -INFINITY, unit);

  auto cO = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kWarpColumns>>{});
  auto tOcO =  // (MMA, MMA_M, MMA_N)
      typename Traits::TiledMma{}
          .get_thread_slice(Traits::mma_thread())
          .partition_C(make_tensor(
              cO.data(), composition(cO.layout(), make_tile(_, typename Traits::OutColumns{}))));
  auto coordinates = as_matrix(tOcO);
  __syncthreads();  // every warp has done with the buffers
  CUTE_UNROLL
  for (int row = 0; row < size<0>(out_matrix); ++row) {
    const int i = get<0>(coordinates(row, 0));
    if (first_column + get<1>(coordinates(row, 0)) == 0) smem.result.lse[group][i] = lse(row);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(out_matrix); ++col) {
      smem.result.out[group][i][first_column + get<1>(coordinates(row, col))] =
          out_matrix(row, col);
    }
  }
  __syncthreads();  // all parts are there
  weigh_parts<Traits>(params, block, smem.result);
  __syncthreads();  // their weights too
  const bool float_out = params.out_dtype == DType::kFloat32;
  if (float_out) store_rows<Traits, float>(params, block, smem.result);
  else store_rows<Traits, Element>(params, block, smem.result);

  if (__syncthreads_or(found_nonfinite)) {  // and all rows are in global memory
    if (float_out) restore_values<Traits, float>(params, block);
    else restore_values<Traits, Element>(params, block);
  }
}

// A split without keys says so and writes nothing else.
template <class Traits>
ANYFLASH_DEVICE void decode_nothing(const KvCacheParams& params, const DecodeWorkTile& block) {
  for (int row = threadIdx.x; row < block.rows; row += Traits::kThreads) {
    *result_lse(params, block, row) = -INFINITY;
  }
}

}  // namespace anyflash::sm80
