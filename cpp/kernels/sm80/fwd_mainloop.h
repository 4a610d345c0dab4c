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
#include "sm80/operand.h"
#include "sm80/variants.h"
#include "variant/mask.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// Overwrites Q in shared memory with factor * Q, for the scales that are not positive (-1 or 0).
template <class Traits, class Smem>
ANYFLASH_DEVICE void multiply_tile(Smem& sQ, float factor, int thread) {
  using Element = typename Traits::Element;
  for (int i = thread; i < cute::size(sQ); i += Traits::kThreads) {
    sQ(i) = Element(static_cast<float>(sQ(i)) * factor);
  }
}

// Writes -inf over the scores that the mask removes. Coordinates are relative to (row0, col0).
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void apply_mask(Scores& scores, const Coordinates& coordinates, const Mask& mask,
                                int row0, int col0) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    const int i = row0 + get<0>(coordinates(row, 0));
    const int first = mask.first_key(i) - col0;
    const int end = mask.end_key(i) - col0;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      const int j = get<1>(coordinates(row, col));
      if (j < first || j >= end) scores(row, col) = -INFINITY;
    }
  }
}

// Computes acc_o = sum_j P_j v_j (not normalised) and the softmax statistics of the block's rows.
//
// With one buffer each for K and V, a tile of K arrives while P V of the tile before runs, its tile
// of V while its Q K^T does; with two, both during all of the tile before. KRange says in which
// order tiles are visited. Waits are for everything that is on its way, so that a fence means
// something to ptxas only (ForwardTile::fence).
//
// Returns whether this thread took NaN or infinity out of a partly hidden tile of V;
// restore_nonfinite() then has to follow.
template <class Traits, class Variant, class AccO, class Softmax>
ANYFLASH_DEVICE bool forward_mainloop(const ForwardParams& params, const ForwardBlock& block,
                                      typename Traits::SharedStorage& smem, AccO& acc_o,
                                      Softmax& softmax, float q_factor) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr bool kTwoBuffers = Traits::kStages == 2;
  constexpr bool kQueriesInRegisters = Traits::kShape.queries_in_registers;
  const int thread = threadIdx.x;
  const Sequence& sequence = block.sequence;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
  const Variant variant(params, block, kBlockN);

  const KRange range = mask.k_range(block.first_row, kBlockM, kBlockN);
  // The next tile from n on that is visited, -1 if there is none.
  const auto visited = [&](int n) {
    while (n >= 0 && !variant.visits(n)) n = range.next(n);
    return n;
  };
  int n = visited(range.first());
  if (n < 0) return false;

  using ShapeQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  using ShapeK = Shape<Int<kBlockN>, Int<Traits::kHeadDim>>;
  using ShapeV = Shape<Int<kBlockN>, Int<Traits::kHeadDimV>>;
  auto gQ = gmem_tile<Element>(ShapeQ{}, params.q, params.q_stride, sequence.batch, block.head,
                               sequence.first_q + block.first_row);
  auto gK = gmem_tile<Element>(ShapeK{}, params.k, params.k_stride, sequence.batch, block.head_k,
                               sequence.first_k);
  auto gV = gmem_tile<Element>(ShapeV{}, params.v, params.v_stride, sequence.batch, block.head_k,
                               sequence.first_k);
  auto sQ = make_tensor(make_smem_ptr(smem.q.data()), typename Traits::TileQ::Layout{});
  auto sK = make_tensor(make_smem_ptr(smem.k.data()), typename Traits::TileK::Layout{});
  auto sV = make_tensor(make_smem_ptr(smem.v.data()), typename Traits::TileV::Layout{});

  typename Traits::TileQ::Load load_q;
  typename Traits::TileK::Load load_k;
  typename Traits::TileV::Load load_v;
  auto thread_q = load_q.get_thread_slice(thread);
  auto thread_k = load_k.get_thread_slice(thread);
  auto thread_v = load_v.get_thread_slice(thread);
  auto tQgQ = thread_q.partition_S(gQ);  // (VECTOR, ROWS, PAGES)
  auto tKgK = thread_k.partition_S(gK);  // (VECTOR, ROWS, PAGES)
  auto tVgV = thread_v.partition_S(gV);  // (VECTOR, ROWS, PAGES)
  auto tQsQ = thread_q.partition_D(sQ);  // (VECTOR, ROWS, PAGES)
  const auto by_key = [](const auto& smem_tile) {
    return make_tensor(smem_tile.data(),
                       composition(smem_tile.layout(), make_tile(typename Traits::KeyOrder{}, _)));
  };
  auto tKsK = thread_k.partition_D(by_key(sK));  // (VECTOR, ROWS, PAGES)
  auto tVsV = thread_v.partition_D(by_key(sV));  // (VECTOR, ROWS, PAGES)
  // Moves a tile of K or V on in the sequence.
  const auto move = [](auto& tile, const Strides& stride, int tiles) {
    tile.data() = tile.data() + int64_t{tiles} * kBlockN * stride.row;
  };
  move(tKgK, params.k_stride, n);
  move(tVgV, params.v_stride, n);
  auto tQcQ = thread_q.partition_S(make_identity_tensor(ShapeQ{}));  // (VECTOR, ROWS, PAGES)
  auto tKcK = thread_k.partition_S(make_identity_tensor(ShapeK{}));  // (VECTOR, ROWS, PAGES)
  auto tVcV = thread_v.partition_S(make_identity_tensor(ShapeV{}));  // (VECTOR, ROWS, PAGES)
  const ColumnGuard<decltype(size<2>(tKsK))::value> columns(tKcK, params.head_dim);
  const ColumnGuard<decltype(size<2>(tVsV))::value> columns_v(tVcV, params.head_dim_v);

  using Mma = typename Traits::TiledMma;
  const Mma mma;
  const Operand<Mma, Side::kA, typename Traits::TileQ> q(smem.q.data(), thread);
  Operand<Mma, Side::kB, typename Traits::TileK> k(smem.k.data(), thread);
  Operand<Mma, Side::kB, typename Traits::TileV, /*kTransposed=*/true> v_t(smem.v.data(), thread);
  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  // (MMA, MMA_M, MMA_N): KeyOrder is its own inverse.
  auto tScS = mma.get_thread_slice(thread).partition_C(
      make_tensor(cS.data(), composition(cS.layout(), make_tile(_, typename Traits::KeyOrder{}))));
  auto coordinates = make_tensor(tScS.data(), accumulator_as_matrix(tScS.layout()));
  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));

  // Q and the first tiles of K and V; only these tiles can hold rows that do not exist.
  const int keys = sequence.seqlen_k - n * kBlockN;
  load_tile<true>(load_q, tQgQ, tQsQ, tQcQ, columns, sequence.seqlen_q - block.first_row);
  load_tile<true>(load_k, tKgK, tKsK, tKcK, columns, keys);
  if constexpr (kTwoBuffers) load_tile<true>(load_v, tVgV, tVsV, tVcV, columns_v, keys);
  if (kQueriesInRegisters || q_factor != 1.0f) {
    cp_async_wait<0>();
    __syncthreads();  // Q has landed for every thread
  }
  if (q_factor != 1.0f) {
    multiply_tile<Traits>(sQ, q_factor, thread);
    if (kQueriesInRegisters) __syncthreads();  // Q is there
  }
  auto tSrQ = q.fragment();  // (MMA, MMA_M, MMA_K)
  if constexpr (kQueriesInRegisters) {
    CUTE_UNROLL
    for (int i = 0; i < q.kBlocks; ++i) q.load(tSrQ, i);
  }

  bool found_nonfinite = false;
  int to_other = 1;  // in tiles: where the other buffer is
  // S = Q K_n^T; P = exp2(S - max); O += P V_n, and the loads that follow. `distance` leads to the
  // next tile, 0 after the last.
  const auto step = [&](auto masked, auto part, int distance) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr ScorePart kPart = decltype(part)::value;
    constexpr bool kAll = kPart == ScorePart::kAll;
    const auto clear_values = [&] {  // this thread's own pieces
      if (kMasked || (kAll && variant.hides())) found_nonfinite |= clear_nonfinite(tVsV);
    };
    const auto load_next_keys = [&] {
      if (distance == 0) return;
      move(tKgK, params.k_stride, distance);
      load_tile<false>(load_k, tKgK, tKsK, tKcK, columns, 0);
      if constexpr (Traits::kShape.fence) cp_async_fence();
    };
    cp_async_wait<0>();
    if constexpr (kTwoBuffers) clear_values();
    __syncthreads();  // K_n is there; every warp has done with the V before
    if constexpr (kTwoBuffers) {
      tKsK.data() = tKsK.data() + to_other * size(sK);
      tVsV.data() = tVsV.data() + to_other * size(sV);
      load_next_keys();
    } else {
      load_tile<kMasked>(load_v, tVgV, tVsV, tVcV, columns_v, sequence.seqlen_k - n * kBlockN);
    }
    move(tVgV, params.v_stride, distance);

    auto acc_s = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    auto scores = make_tensor(acc_s.data(), accumulator_as_matrix(acc_s.layout()));
    [[maybe_unused]] auto biases = make_tensor<uint32_t>(shape(scores));
    if constexpr (Variant::kGeneric) {
      if constexpr (kAll) {
        variant.score_mod.template prefetch<kMasked>(biases, coordinates, block.first_row,
                                                     n * kBlockN);
      }
    }
    if constexpr (kQueriesInRegisters) {
      gemm_register_smem(acc_s, tSrQ, k, mma);
    } else {
      gemm_smem_smem(acc_s, acc_s, q, k, mma);
    }

    if constexpr (kTwoBuffers) {
      // Here rather than with K, so that Q K^T does not wait behind it.
      if (distance != 0) load_tile<false>(load_v, tVgV, tVsV, tVcV, columns_v, 0);
    } else {
      cp_async_wait<0>();
      clear_values();
      __syncthreads();  // V_n is there; every warp has done with K_n
      load_next_keys();
    }

    if constexpr (Variant::kPart != ScorePart::kNone) {
      variant.score_mod.template apply<kPart, Variant::kGeneric>(scores, biases, coordinates,
                                                                 block.first_row, n * kBlockN);
    }
    if constexpr (kMasked) {
      apply_mask(scores, coordinates, mask, block.first_row, n * kBlockN);
    }
    softmax.template update<kAll>(scores, out_matrix);
    if constexpr (Variant::kGeneric) {
      if (kAll && variant.dropout.active()) {
        apply_dropout(scores, variant.dropout, coordinates, block.first_row, n * kBlockN);
      }
    }
    auto probabilities = round_fragment<Element>(acc_s);
    auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
    gemm_register_smem(acc_o, tOrP, v_t, mma);
    if constexpr (kTwoBuffers) {
      k.move(to_other * size(sK));
      v_t.move(to_other * size(sV));
      to_other = -to_other;
    }
  };
  using Part = ScorePartTag<Variant::kPart>;
  while (n >= 0 && range.needs_mask(n)) {
    const int next = visited(range.next(n));
    step(std::true_type{}, Part{}, next < 0 ? 0 : next - n);
    n = next;
  }
  if constexpr (Variant::kPart == ScorePart::kNone) {
    // Tiles count from the first unmasked one from here on, which saves a register.
    for (n = n < 0 ? n : n - range.left; n >= 0; --n) {
      step(std::false_type{}, Part{}, n > 0 ? -1 : 0);
    }
  } else {
    variant.with_part([&](auto part) ANYFLASH_INLINE_LAMBDA {
      while (n >= 0) {
        const int next = visited(n > range.left ? n - 1 : -1);
        step(std::false_type{}, part, next < 0 ? 0 : next - n);
        n = next;
      }
    });
  }
  return found_nonfinite;
}

}  // namespace anyflash::sm80
