// The ends of the backward's kernels: gradients are scaled, rounded, and written by rows.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "sm80/backward/load.h"
#include "sm80/tile_pieces.h"
#include "variant/backward_scratch.h"
#include "variant/block_mask.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Writes an accumulator of `mma` whose row r is row Order(r) of the tile; the order is its own
// inverse. In the inputs' type through `smem`, by 16 bytes a thread, else element by element. All
// threads of the CTA take part, and have done with what `smem` held.
template <class Tile, class Order, class Out, class Mma, class Acc, class Smem>
ANYFLASH_DEVICE void store_gradient(const GradientTile<Out>& target, const Mma& mma, const Acc& acc,
                                    Smem& smem) {
  using namespace cute;
  using Element = typename Smem::value_type;
  const int thread = threadIdx.x;
  const auto places =
      mma.get_thread_slice(thread).partition_C(make_identity_tensor(typename Tile::Shape{}));
  if constexpr (std::is_same_v<Out, Element>) {
    accumulator_to_smem<Tile>(smem.data(), round_fragment<Element>(acc), places);
    __syncthreads();  // the tile is complete
    store_pieces<Tile, Order>(target.data, static_cast<int>(target.stride.row), target.rows,
                              target.columns, smem.data(), thread);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); ++i) {
      target.store(Order{}(get<0>(places(i))), get<1>(places(i)), acc(i));
    }
  }
}

// Writes dK and dV of the CTA's keys, also of those that are not used, as Out.
template <class Traits, class Variant, class Out, class Smem, class AccK, class AccV>
ANYFLASH_DEVICE void store_key_gradients(const BackwardScratch& params,
                                         const BackwardWorkTile& block, Smem& smem,
                                         bool nonfinite_dout, const AccK& acc_dk,
                                         const AccV& acc_dv) {
  const auto dv = dv_tile<Out>(params, block);
  const typename Traits::KeyMma mma;
  store_gradient<typename Traits::TileK, typename Traits::KeyOrder>(dk_tile<Out>(params, block),
                                                                    mma, acc_dk, smem.k);
  store_gradient<typename Traits::TileV, typename Traits::KeyOrder>(dv, mma, acc_dv, smem.v);
  if (nonfinite_dout) {
    __syncthreads();  // dV is there
    restore_dout<Traits, Variant>(params, block, dv);
  }
}

// Scales acc_dk and acc_dv, and writes them as dK and dV in the dtype that is wanted.
template <class Traits, class Variant, class Smem, class AccK, class AccV>
ANYFLASH_DEVICE void write_key_gradients(const BackwardScratch& params,
                                         const BackwardWorkTile& block, Smem& smem,
                                         bool nonfinite_dout, AccK& acc_dk, AccV& acc_dv) {
  const float p_scale = Variant::p_scale(params);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc_dk); ++i) acc_dk(i) *= params.ds_scale;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc_dv); ++i) acc_dv(i) *= p_scale;
  visit_gradient_type<Traits>(params, [&](auto type) {
    store_key_gradients<Traits, Variant, decltype(type)>(params, block, smem, nonfinite_dout,
                                                         acc_dk, acc_dv);
  });
}

}  // namespace anyflash::sm80
