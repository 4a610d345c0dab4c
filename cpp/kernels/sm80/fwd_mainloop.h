// The forward main loop of one CTA: all K/V tiles that a block of query rows sees.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "variant/mask.h"

namespace anyflash::sm80 {

// Where a CTA works.
struct ForwardBlock {
  int64_t batch;
  int head;
  int head_k;
  int first_row;
};

// Overwrites Q in shared memory with factor * Q, for the scales that are not positive (-1 or 0).
template <class Traits, class Smem>
ANYFLASH_DEVICE void multiply_tile(Smem& sQ, float factor, int thread) {
  using Element = typename Traits::Element;
  for (int i = thread; i < cute::size(sQ); i += Traits::kThreads) {
    sQ(i) = Element(static_cast<float>(sQ(i)) * factor);
  }
}

// Writes -inf over the scores that the mask removes. Coordinates are relative to (row0, col0).
template <class Mask, class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_mask(Scores& scores, const Coordinates& coordinates, const Mask& mask,
                                int row0, int col0) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    const int limit = mask.visible(row0 + get<0>(coordinates(row, 0))) - col0;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (get<1>(coordinates(row, col)) >= limit) scores(row, col) = -INFINITY;
    }
  }
}

// Computes acc_o = sum_j P_j v_j (not normalised) and the softmax statistics of the block's rows.
//
// One buffer each for K and V; tile n of K arrives while P V of tile n + 1 runs, tile n of V while
// Q K^T of tile n does. Tiles are visited from the last to the first, so that the masked ones,
// which lie at the end, come first. Returns whether this thread took NaN or infinity out of a
// masked tile of V; restore_nonfinite() then has to follow.
template <class Traits, class Mask, class AccO, class Softmax>
ANYFLASH_DEVICE bool forward_mainloop(const ForwardParams& params, const ForwardBlock& block,
                                      const Mask& mask, typename Traits::SharedStorage& smem,
                                      AccO& acc_o, Softmax& softmax, float q_factor) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  using HeadDim = Int<Traits::kHeadDim>;
  const int thread = threadIdx.x;

  const KRange range = mask.k_range(block.first_row, kBlockM, kBlockN);
  if (range.end == 0) return false;

  using TileQ = Shape<Int<kBlockM>, HeadDim>;
  using TileKV = Shape<Int<kBlockN>, HeadDim>;
  auto gQ = gmem_tile<Element>(TileQ{}, params.q, params.q_stride, block.batch, block.head,
                               block.first_row);
  auto gK = gmem_tile<Element>(TileKV{}, params.k, params.k_stride, block.batch, block.head_k, 0);
  auto gV = gmem_tile<Element>(TileKV{}, params.v, params.v_stride, block.batch, block.head_k, 0);
  auto sQ = make_tensor(make_smem_ptr(smem.q.data()), typename Traits::SmemQ{});
  auto sK = make_tensor(make_smem_ptr(smem.k.data()), typename Traits::SmemKV{});
  auto sV = make_tensor(make_smem_ptr(smem.v.data()), typename Traits::SmemKV{});
  auto sVt = make_tensor(sV.data(), typename Traits::SmemVt{});

  typename Traits::GmemLoad gmem_load;
  auto thread_load = gmem_load.get_thread_slice(thread);
  auto tQgQ = thread_load.partition_S(gQ);  // (VECTOR, ROWS, PAGES)
  auto tKgK = thread_load.partition_S(gK);  // (VECTOR, ROWS, PAGES)
  auto tVgV = thread_load.partition_S(gV);  // (VECTOR, ROWS, PAGES)
  auto tQsQ = thread_load.partition_D(sQ);  // (VECTOR, ROWS, PAGES)
  auto tKsK = thread_load.partition_D(sK);  // (VECTOR, ROWS, PAGES)
  auto tVsV = thread_load.partition_D(sV);  // (VECTOR, ROWS, PAGES)
  const auto at_tile = [](const auto& first, const Strides& stride, int tile) {
    return make_tensor(first.data() + int64_t{tile} * kBlockN * stride.row, first.layout());
  };
  auto tQcQ = thread_load.partition_S(make_identity_tensor(TileQ{}));   // (VECTOR, ROWS, PAGES)
  auto tKcK = thread_load.partition_S(make_identity_tensor(TileKV{}));  // (VECTOR, ROWS, PAGES)
  constexpr int kPages = decltype(size<2>(tKsK))::value;
  const ColumnGuard<kPages> columns(tKcK, params.head_dim);
  const ColumnGuard<kPages> columns_v(tKcK, params.head_dim_v);

  typename Traits::TiledMma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  auto tSrQ = thread_mma.partition_fragment_A(sQ);    // (MMA, MMA_M, MMA_K)
  auto tSrK = thread_mma.partition_fragment_B(sK);    // (MMA, MMA_N, MMA_K)
  auto tOrVt = thread_mma.partition_fragment_B(sVt);  // (MMA, MMA_N, MMA_K)
  auto smem_copy_q = make_tiled_copy_A(typename Traits::LoadMatrix{}, mma);
  auto smem_copy_k = make_tiled_copy_B(typename Traits::LoadMatrix{}, mma);
  auto smem_copy_v = make_tiled_copy_B(typename Traits::LoadMatrixTransposed{}, mma);
  auto thread_copy_q = smem_copy_q.get_thread_slice(thread);
  auto thread_copy_k = smem_copy_k.get_thread_slice(thread);
  auto thread_copy_v = smem_copy_v.get_thread_slice(thread);
  auto tSsQ = thread_copy_q.partition_S(sQ);    // (COPY, MMA_M, MMA_K)
  auto tSsK = thread_copy_k.partition_S(sK);    // (COPY, MMA_N, MMA_K)
  auto tOsVt = thread_copy_v.partition_S(sVt);  // (COPY, MMA_N, MMA_K)
  auto tScS = thread_mma.partition_C(           // (MMA, MMA_M, MMA_N)
      make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{}));
  auto coordinates = make_tensor(tScS.data(), accumulator_as_matrix(tScS.layout()));
  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));

  // Q and the last tile of K; only that tile can hold rows that do not exist.
  int n = range.end - 1;
  load_tile<true>(gmem_load, tQgQ, tQsQ, tQcQ, columns, params.seqlen_q - block.first_row);
  load_tile<true>(gmem_load, at_tile(tKgK, params.k_stride, n), tKsK, tKcK, columns,
                  params.seqlen_k - n * kBlockN);
  cp_async_fence();
  if (q_factor != 1.0f) {
    cp_async_wait<0>();
    __syncthreads();  // Q has landed for every thread
    multiply_tile<Traits>(sQ, q_factor, thread);
  }

  bool found_nonfinite = false;
  // S = Q K_n^T; P = exp2(S - max); O += P V_n.
  const auto step = [&](auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    cp_async_wait<0>();
    __syncthreads();  // K_n is there; every warp has done with V_{n+1}
    load_tile<kMasked>(gmem_load, at_tile(tVgV, params.v_stride, n), tVsV, tKcK, columns_v,
                       params.seqlen_k - n * kBlockN);
    cp_async_fence();

    auto acc_s = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    gemm_smem_smem(acc_s, tSrQ, tSrK, tSsQ, tSsK, mma, smem_copy_q, smem_copy_k, thread_copy_q,
                   thread_copy_k);

    cp_async_wait<0>();
    if constexpr (kMasked) found_nonfinite |= clear_nonfinite(tVsV);  // this thread's own pieces
    __syncthreads();  // V_n is there; every warp has done with K_n
    if (n > 0) {
      load_tile<false>(gmem_load, at_tile(tKgK, params.k_stride, n - 1), tKsK, tKcK, columns, 0);
      cp_async_fence();
    }

    auto scores = make_tensor(acc_s.data(), accumulator_as_matrix(acc_s.layout()));
    if constexpr (kMasked) {
      apply_mask(scores, coordinates, mask, block.first_row, n * kBlockN);
    }
    softmax.update(scores, out_matrix);
    auto probabilities = round_fragment<Element>(acc_s);
    auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
    gemm_register_smem(acc_o, tOrP, tOrVt, tOsVt, mma, smem_copy_v, thread_copy_v);
  };
  for (; n >= range.masked; --n) step(std::true_type{});
  for (; n >= 0; --n) step(std::false_type{});
  return found_nonfinite;
}

}  // namespace anyflash::sm80
