// The forward epilogue of one CTA: normalise, round, and write the output tile and its LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/fwd_mainloop.h"

namespace anyflash::sm80 {

// Adds what clear_nonfinite() took out of V to the rows that see it. A sum with NaN or infinity in
// it does not depend on its finite terms and weights, so the finished output is the place to do it.
// Rare: plain loops over global memory.
template <class Traits, class Mask>
ANYFLASH_DEVICE void restore_nonfinite(const ForwardParams& params, const ForwardBlock& block,
                                       const Mask& mask) {
  using Element = typename Traits::Element;
  const auto* const v = static_cast<const Element*>(params.v) +
                        block.batch * params.v_stride.batch + block.head_k * params.v_stride.head;
  auto* const out = static_cast<Element*>(params.out) + block.batch * params.out_stride.batch +
                    block.head * params.out_stride.head;
  const KRange range = mask.k_range(block.first_row, Traits::kBlockM, Traits::kBlockN);
  const int end = min(block.first_row + Traits::kBlockM, params.seqlen_q);
  for (int64_t row = block.first_row; row < end; ++row) {
    for (int col = threadIdx.x; col < params.head_dim_v; col += Traits::kThreads) {
      Element& result = out[row * params.out_stride.row + col];
      for (int64_t key = int64_t{range.masked} * Traits::kBlockN; mask.keep(row, key); ++key) {
        const Element value = v[key * params.v_stride.row + col];
        if (!is_finite(value)) {
          result = Element(static_cast<float>(result) + static_cast<float>(value));
        }
      }
    }
  }
}

template <class Traits, class Mask, class AccO, class Softmax>
ANYFLASH_DEVICE void forward_epilogue(const ForwardParams& params, const ForwardBlock& block,
                                      const Mask& mask, typename Traits::SharedStorage& smem,
                                      AccO& acc_o, Softmax& softmax, bool found_nonfinite) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  using TileO = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  const int thread = threadIdx.x;
  const int rows = params.seqlen_q - block.first_row;

  typename Traits::TiledMma mma;
  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));
  auto lse = softmax.finish(out_matrix);

  // Each row's LSE is held by the four lanes of a quad; the lane with the row's column 0 writes it.
  auto tOcO = mma.get_thread_slice(thread).partition_C(make_identity_tensor(TileO{}));
  auto coordinates = make_tensor(tOcO.data(), accumulator_as_matrix(tOcO.layout()));
  if (params.lse != nullptr && get<1>(coordinates(0, 0)) == 0) {
    float* const gLse =
        params.lse + block.batch * params.lse_stride.batch + block.head * params.lse_stride.head;
    CUTE_UNROLL
    for (int row = 0; row < size(lse); ++row) {
      const int i = get<0>(coordinates(row, 0));
      if (i < rows) gLse[(int64_t{block.first_row} + i) * params.lse_stride.row] = lse(row);
    }
  }

  // Through shared memory, where Q lay, so that rows are written 16 bytes at a time.
  auto rounded = round_fragment<Element>(acc_o);
  auto sO = make_tensor(make_smem_ptr(smem.q.data()), typename Traits::SmemQ{});
  auto smem_store = make_tiled_copy_C(typename Traits::SmemStore{}, mma);
  auto thread_store = smem_store.get_thread_slice(thread);
  auto tOrO_store = thread_store.retile_S(rounded);  // (COPY, MMA_M, MMA_N)
  auto tOsO_store = thread_store.partition_D(sO);    // (COPY, MMA_M, MMA_N)
  // The barrier for the last tile of V came after every read of Q.
  copy(smem_store, tOrO_store, tOsO_store);
  found_nonfinite = __syncthreads_or(found_nonfinite);  // the whole tile is in shared memory

  auto gO = gmem_tile<Element>(TileO{}, params.out, params.out_stride, block.batch, block.head,
                               block.first_row);
  auto thread_copy = typename Traits::GmemStore{}.get_thread_slice(thread);
  auto tOgO = thread_copy.partition_D(gO);                                  // (VECTOR, ROWS, PAGES)
  auto tOsO = thread_copy.partition_S(sO);                                  // (VECTOR, ROWS, PAGES)
  auto tOcO_copy = thread_copy.partition_D(make_identity_tensor(TileO{}));  // (VECTOR, ROWS, PAGES)
  auto tOrO = make_fragment_like(tOsO);
  copy(typename Traits::GmemStore{}, tOsO, tOrO);
  constexpr int kPages = decltype(size<2>(tOrO))::value;
  store_tile(tOrO, tOgO, tOcO_copy, ColumnGuard<kPages>(tOcO_copy, params.head_dim_v), rows);
  if (found_nonfinite) {
    __syncthreads();  // the whole tile is in global memory
    restore_nonfinite<Traits>(params, block, mask);
  }
}

}  // namespace anyflash::sm80
