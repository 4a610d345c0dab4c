// The forward epilogue of one CTA: normalise, round, and write the output tile and its LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "sm80/copy.h"
#include "variant/forward_variants.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// Gives what KeyValuePipeline took out of V to the rows that see it.
template <class Traits, class Out, class Variant>
ANYFLASH_DEVICE void restore_values(const ForwardParams& params, const ForwardWorkTile& block,
                                    const Variant& variant) {
  using Element = typename Traits::Element;
  constexpr int kBlockN = Traits::kBlockN;
  const Sequence& sequence = block.sequence;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
  const auto* const v =
      static_cast<const Element*>(params.v) + sequence.batch * params.v_stride.batch +
      block.head_k * params.v_stride.head + sequence.first_k * params.v_stride.row;
  Out* const out = first_of<Out>(params.out, params.out_stride, sequence, block.head);
  const KRange range = mask.k_range(block.first_row, Traits::kBlockM, kBlockN);
  const IndexRange rows{block.first_row, min(block.first_row + Traits::kBlockM, sequence.seqlen_q)};
  for (int tile = range.begin; tile < range.end; ++tile) {
    const bool cleared = range.needs_mask(tile) || variant.may_hide_anywhere();
    if (!cleared || !variant.visits(tile)) continue;
    const IndexRange keys{tile * kBlockN, min((tile + 1) * kBlockN, sequence.seqlen_k)};
    restore_nonfinite<Traits::kThreads>(
        keys, rows, params.head_dim_v,
        [&](int key, int x) { return static_cast<float>(v[key * params.v_stride.row + x]); },
        [&](int row, int key) {
          if (!mask.keep(row, key) || !variant.keep(row, key)) return TermWeight::kHidden;
          return variant.is_dropped(row, key) ? TermWeight::kDropped : TermWeight::kVisible;
        },
        [&](int row, int x) -> Out& {
          return out[row * params.out_stride.row + x * params.out_stride.col];
        });
  }
}

// The largest score of a row that exists goes to the (batch, head)'s maximum: integers order floats
// of one sign, and negative ones the other way round.
template <class Softmax, class Coordinates>
ANYFLASH_DEVICE void reduce_max_logits(const ForwardParams& params, const ForwardWorkTile& block,
                                       const Softmax& softmax, const Coordinates& coordinates,
                                       int rows) {
  float maximum = -INFINITY;
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(coordinates); ++row) {
    if (cute::get<0>(coordinates(row, 0)) < rows) {
      maximum = fmaxf(maximum, softmax.max_score(row));
    }
  }
  CUTE_UNROLL
  for (int distance = 16; distance >= 4; distance /= 2) {  // the four lanes of a quad agree
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
  }
  if (threadIdx.x % 32 != 0 || maximum == -INFINITY) return;
  float* const target = params.max_logits + block.batch * params.max_logits_stride.batch +
                        block.head * params.max_logits_stride.head;
  maximum += 0.0f;  // -0 becomes 0
  if (maximum >= 0.0f) {
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(maximum));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(target), __float_as_uint(maximum));
  }
}

// Each row's LSE is held by the four lanes of a quad; the lane with the row's column 0 writes it.
template <class Lse, class Coordinates>
ANYFLASH_DEVICE void store_lse(const ForwardParams& params, const ForwardWorkTile& block,
                               const Lse& lse, const Coordinates& coordinates, int rows) {
  using namespace cute;
  if (get<1>(coordinates(0, 0)) != 0) return;
  float* const gLse =
      first_of<float>(params.lse, params.lse_stride, block.sequence, block.head, block.first_row);
  CUTE_UNROLL
  for (int row = 0; row < size(lse); ++row) {
    const int i = get<0>(coordinates(row, 0));
    if (i < rows) gLse[i * params.lse_stride.row] = lse(row);
  }
}

// The accumulators as they are, element by element and with any strides.
template <class Matrix, class Coordinates>
ANYFLASH_DEVICE void store_float(const ForwardParams& params, const ForwardWorkTile& block,
                                 const Matrix& out_matrix, const Coordinates& coordinates,
                                 int rows) {
  using namespace cute;
  float* const gO =
      first_of<float>(params.out, params.out_stride, block.sequence, block.head, block.first_row);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(out_matrix); ++row) {
    const int i = get<0>(coordinates(row, 0));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(out_matrix); ++col) {
      const int x = get<1>(coordinates(row, col));
      if (i < rows && x < params.head_dim_v) {
        gO[i * params.out_stride.row + x * params.out_stride.col] = out_matrix(row, col);
      }
    }
  }
}

// Rounded, and through shared memory, where Q lay, so that rows are written 16 bytes at a time.
template <class Traits, class AccO>
ANYFLASH_DEVICE void store_rounded(const ForwardParams& params, const ForwardWorkTile& block,
                                   typename Traits::SharedStorage& smem, const AccO& acc_o,
                                   int rows) {
  using namespace cute;
  using Element = typename Traits::Element;
  using ShapeO = Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>;
  const int thread = threadIdx.x;
  typename Traits::TiledMma mma;
  auto rounded = round_fragment<Element>(acc_o);
  auto sO = make_tensor(make_smem_ptr(smem.q.data()), typename Traits::TileO::Layout{});
  auto smem_store = make_tiled_copy_C(typename Traits::SmemStore{}, mma);
  auto thread_store = smem_store.get_thread_slice(thread);
  auto tOrO_store = thread_store.retile_S(rounded);  // (COPY, MMA_M, MMA_N)
  auto tOsO_store = thread_store.partition_D(sO);    // (COPY, MMA_M, MMA_N)
  copy(smem_store, tOrO_store, tOsO_store);
  __syncthreads();  // the whole tile is in shared memory

  auto gO = gmem_tile<Element>(ShapeO{}, params.out, params.out_stride, block.sequence.batch,
                               block.head, block.sequence.first_q + block.first_row);
  typename Traits::TileO::Store store;
  auto thread_copy = store.get_thread_slice(thread);
  auto tOgO = thread_copy.partition_D(gO);                              // (VECTOR, ROWS, PANELS)
  auto tOsO = thread_copy.partition_S(sO);                              // (VECTOR, ROWS, PANELS)
  auto tOcO = thread_copy.partition_D(make_identity_tensor(ShapeO{}));  // (VECTOR, ROWS, PANELS)
  auto tOrO = make_fragment_like(tOsO);
  copy(store, tOsO, tOrO);
  const ColumnGuard<decltype(size<2>(tOrO))::value> columns(tOcO, params.head_dim_v);
  store_tile(tOrO, tOgO, tOcO, columns, rows);
}

template <class Traits, class Variant, class AccO, class Softmax>
ANYFLASH_DEVICE void forward_epilogue(const ForwardParams& params, const ForwardWorkTile& block,
                                      typename Traits::SharedStorage& smem, AccO& acc_o,
                                      Softmax& softmax, bool found_nonfinite) {
  using namespace cute;
  using Element = typename Traits::Element;
  const int rows = block.sequence.seqlen_q - block.first_row;
  const Variant variant(params, block, Traits::kBlockN);

  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));
  const float sink = params.sinks.data == nullptr
                         ? -INFINITY
                         : load_float(params.sinks, block.head * params.sinks.stride.head);
  auto lse = softmax.finish(out_matrix, sink, variant.dropout_scale());

  auto tOcO =
      typename Traits::TiledMma{}
          .get_thread_slice(threadIdx.x)
          .partition_C(make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDimV>>{}));
  auto coordinates = make_tensor(tOcO.data(), accumulator_as_matrix(tOcO.layout()));
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, block, softmax, coordinates, rows);
  }
  if (params.lse != nullptr) store_lse(params, block, lse, coordinates, rows);
  const bool float_out = params.out_dtype == DType::kFloat32;
  if (float_out) store_float(params, block, out_matrix, coordinates, rows);
  else store_rounded<Traits>(params, block, smem, acc_o, rows);

  if (__syncthreads_or(found_nonfinite)) {  // and the whole tile is in global memory
    if (float_out) restore_values<Traits, float>(params, block, variant);
    else restore_values<Traits, Element>(params, block, variant);
  }
}

}  // namespace anyflash::sm80
