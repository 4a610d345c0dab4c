// The ends of the backward's kernels: gradients are scaled, rounded, and written by rows.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm80/backward/load.h"
#include "sm80/copy.h"
#include "variant/backward_scratch.h"
#include "variant/block_mask.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Where a tile of a gradient goes: its first row, of which `rows` and `columns` exist.
template <class Out>
struct GradientTile {
  Out* data;
  const Strides& stride;
  int rows;
  int columns;
};

template <class Out>
ANYFLASH_DEVICE GradientTile<Out> gradient_tile(void* data, const Strides& stride,
                                                const TileRows& rows, int columns) {
  Out* const first = static_cast<Out*>(data) + rows.batch * stride.batch + rows.head * stride.head +
                     rows.first * stride.row;
  return {first, stride, rows.count, columns};
}

// Writes an accumulator of `mma` whose row r is row Order(r) of the tile: in the inputs' type
// through `smem`, by 16 bytes a thread, else element by element. All threads of the CTA take part,
// and have done with what `smem` held.
template <class Tile, class Order, class Out, class Mma, class Acc, class Smem>
ANYFLASH_DEVICE void store_gradient(const GradientTile<Out>& target, const Mma& mma, const Acc& acc,
                                    Smem& smem) {
  using namespace cute;
  using Element = typename Smem::value_type;
  const int thread = threadIdx.x;
  auto cX = make_identity_tensor(typename Tile::Shape{});
  if constexpr (std::is_same_v<Out, Element>) {
    auto sX = make_tensor(make_smem_ptr(smem.data()), typename Tile::Layout{});
    auto rounded = round_fragment<Element>(acc);
    auto copy_c = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);
    auto thread_copy_c = copy_c.get_thread_slice(thread);
    copy(copy_c, thread_copy_c.retile_S(rounded), thread_copy_c.partition_D(sX));
    __syncthreads();  // the tile is complete
    typename Tile::Store store;
    auto thread_store = store.get_thread_slice(thread);
    auto ordered = make_tensor(sX.data(), composition(sX.layout(), make_tile(Order{}, _)));
    auto gX = make_tensor(make_gmem_ptr(target.data), typename Tile::Shape{},
                          make_stride(static_cast<int>(target.stride.row), _1{}));
    auto tXsX = thread_store.partition_S(ordered);  // (VECTOR, ROWS, PANELS)
    auto tXgX = thread_store.partition_D(gX);       // (VECTOR, ROWS, PANELS)
    auto tXcX = thread_store.partition_D(cX);       // (VECTOR, ROWS, PANELS)
    auto tXrX = make_fragment_like(tXsX);
    copy(typename Tile::Store{}, tXsX, tXrX);
    const ColumnGuard<decltype(size<2>(tXsX))::value> columns(tXcX, target.columns);
    store_tile(tXrX, tXgX, tXcX, columns, target.rows);
  } else {
    auto tXcX = mma.get_thread_slice(thread).partition_C(
        make_tensor(cX.data(), composition(cX.layout(), make_tile(Order{}, _))));
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
      const int row = get<0>(tXcX(i));
      const int col = get<1>(tXcX(i));
      if (row < target.rows && col < target.columns) {
        target.data[row * target.stride.row + col * target.stride.col] = acc(i);
      }
    }
  }
}

// Adds what clear_nonfinite() took out of dO to the dV of the keys that see it: a sum with NaN or
// infinity in it does not depend on its finite terms and weights. Rare: plain loops over global
// memory.
template <class Traits, class Scores, class Out>
ANYFLASH_DEVICE void restore_nonfinite(const BackwardScratch& params, const BackwardWorkTile& block,
                                       const GradientTile<Out>& dv) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  const Sequence& sequence = block.sequence;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.attention.window);
  const MRange range = mask.m_range(block.first_key, Traits::kBlockN, kBlockM);
  const int keys = min(Traits::kBlockN, sequence.seqlen_k - block.first_key);
  const int group = params.attention.heads / params.attention.heads_k;
  for (int head = block.head_k * group; head < (block.head_k + 1) * group; ++head) {
    const Scores variant(params, sequence, block.batch, head,
                         typename Scores::Seed(params.attention));
    const BlockMask blocks(params.attention, block.batch, head);
    const auto* const dout =
        static_cast<const Element*>(params.dout) + sequence.batch * params.dout_stride.batch +
        head * params.dout_stride.head + sequence.first_q * params.dout_stride.row;
    for (int m = range.begin; m < range.end; ++m) {
      const bool cleared =
          range.needs_mask(m) || Scores::template needs_masked_loop<kBlockM, Traits::kBlockN>(
                                     params, sequence, m * kBlockM, block.first_key);
      if (!cleared || !blocks.keep(m * kBlockM, block.first_key)) continue;
      const int end = min((m + 1) * kBlockM, sequence.seqlen_q);
      for (int x = threadIdx.x; x < params.attention.head_dim_v; x += Traits::kThreads) {
        for (int row = m * kBlockM; row < end; ++row) {
          const Element value = dout[row * params.dout_stride.row + x];
          if (is_finite(value)) continue;
          for (int i = 0; i < keys; ++i) {
            const int key = block.first_key + i;
            if (!mask.keep(row, key) || !variant.keep(row, key)) continue;
            // A dropped probability is 0, and 0 * infinity is NaN.
            const float term = variant.is_dropped(row, key) ? NAN : static_cast<float>(value);
            Out& result = dv.data[i * dv.stride.row + x * dv.stride.col];
            result = Out(static_cast<float>(result) + term);
          }
        }
      }
    }
  }
}

// Writes dK and dV of the CTA's keys, also of those that are not used, as Out.
template <class Traits, class Scores, class Out, class Smem, class AccK, class AccV>
ANYFLASH_DEVICE void store_key_gradients(const BackwardScratch& params,
                                         const BackwardWorkTile& block, Smem& smem,
                                         bool nonfinite_dout, const AccK& acc_dk,
                                         const AccV& acc_dv) {
  const Sequence& sequence = block.sequence;
  const TileRows rows{sequence.batch, block.head_k, sequence.first_k + block.first_key,
                      sequence.all_keys - block.first_key};
  const auto dk = gradient_tile<Out>(params.dk, params.dk_stride, rows, params.attention.head_dim);
  const auto dv =
      gradient_tile<Out>(params.dv, params.dv_stride, rows, params.attention.head_dim_v);
  const typename Traits::KeyMma mma;
  store_gradient<typename Traits::TileK, typename Traits::KeyOrder>(dk, mma, acc_dk, smem.k);
  store_gradient<typename Traits::TileV, typename Traits::KeyOrder>(dv, mma, acc_dv, smem.v);
  if (nonfinite_dout) {
    __syncthreads();  // dV is there
    restore_nonfinite<Traits, Scores>(params, block, dv);
  }
}

// Scales acc_dk and acc_dv, and writes them as dK and dV in the dtype that is wanted.
template <class Traits, class Scores, class Smem, class AccK, class AccV>
ANYFLASH_DEVICE void write_key_gradients(const BackwardScratch& params,
                                         const BackwardWorkTile& block, Smem& smem,
                                         bool nonfinite_dout, AccK& acc_dk, AccV& acc_dv) {
  const float p_scale = Scores::p_scale(params);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc_dk); ++i) acc_dk(i) *= params.ds_scale;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc_dv); ++i) acc_dv(i) *= p_scale;
  if (params.grad_dtype == DType::kFloat32) {
    store_key_gradients<Traits, Scores, float>(params, block, smem, nonfinite_dout, acc_dk, acc_dv);
  } else {
    store_key_gradients<Traits, Scores, typename Traits::Element>(params, block, smem,
                                                                  nonfinite_dout, acc_dk, acc_dv);
  }
}

}  // namespace anyflash::sm80
