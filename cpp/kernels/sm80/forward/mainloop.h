// The forward main loop of one CTA: all K/V tiles that a block of query rows sees.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "cuda/named_barrier.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/forward_dropout.h"
#include "variant/forward_variants.h"
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
// something to ptxas only (ForwardConfig::commits_after_k). Where warps share rows
// (ForwardConfig::split_keys_across_warps), P goes through shared memory.
//
// Returns whether this thread took NaN or infinity out of a partly hidden tile of V;
// restore_nonfinite() then has to follow.
template <class Traits, class Variant, class AccO, class Softmax>
ANYFLASH_DEVICE bool forward_mainloop(const ForwardParams& params, const ForwardWorkTile& block,
                                      typename Traits::SharedStorage& smem, AccO& acc_o,
                                      Softmax& softmax, float q_factor) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr bool kTwoBuffers = Traits::kStages == 2;
  constexpr bool kSplitKeysAcrossWarps = Traits::kSplitKeysAcrossWarps;
  constexpr bool kQueriesInRegisters = Traits::kConfig.queries_in_registers;
  const int thread = threadIdx.x;
  const Sequence& sequence = block.sequence;
  using ShapeQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  using ShapeK = Shape<Int<kBlockN>, Int<Traits::kHeadDim>>;
  using ShapeV = Shape<Int<kBlockN>, Int<Traits::kHeadDimV>>;

  // Q first: its tile arrives while the range of keys is found.
  auto sQ = make_tensor(make_smem_ptr(smem.q.data()), typename Traits::TileQ::Layout{});
  {
    typename Traits::TileQ::Load load_q;
    // With one buffer, ptxas spills in the loop if it keeps for K what it finds for Q here.
    int own = thread;
    if constexpr (!kTwoBuffers && !kSplitKeysAcrossWarps) asm volatile("" : "+r"(own));
    auto thread_q = load_q.get_thread_slice(own);
    auto gQ = gmem_tile<Element>(ShapeQ{}, params.q, params.q_stride, sequence.batch, block.head,
                                 sequence.first_q + block.first_row);
    auto tQcQ = thread_q.partition_S(make_identity_tensor(ShapeQ{}));  // (VECTOR, ROWS, PANELS)
    const ColumnGuard<decltype(size<2>(tQcQ))::value> columns(tQcQ, params.head_dim);
    load_tile<true>(load_q, thread_q.partition_S(gQ), thread_q.partition_D(sQ), tQcQ, columns,
                    sequence.seqlen_q - block.first_row);
  }

  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
  const Variant variant(params, block, kBlockN);

  const KRange range = mask.k_range(block.first_row, kBlockM, kBlockN);
  // The next tile from n on that is visited, -1 if there is none.
  const auto visited = [&](int n) {
    while (n >= 0 && !variant.visits(n)) n = range.next(n);
    return n;
  };
  int n = visited(range.first());
  if (n < 0) {
    cp_async_wait<0>();  // the output goes where Q is
    return false;
  }

  auto gK = gmem_tile<Element>(ShapeK{}, params.k, params.k_stride, sequence.batch, block.head_k,
                               sequence.first_k);
  auto gV = gmem_tile<Element>(ShapeV{}, params.v, params.v_stride, sequence.batch, block.head_k,
                               sequence.first_k);
  auto sK = make_tensor(make_smem_ptr(smem.k.data()), typename Traits::TileK::Layout{});
  auto sV = make_tensor(make_smem_ptr(smem.v.data()), typename Traits::TileV::Layout{});

  typename Traits::TileK::Load load_k;
  typename Traits::TileV::Load load_v;
  auto thread_k = load_k.get_thread_slice(thread);
  auto thread_v = load_v.get_thread_slice(thread);
  auto tKgK = thread_k.partition_S(gK);  // (VECTOR, ROWS, PANELS)
  auto tVgV = thread_v.partition_S(gV);  // (VECTOR, ROWS, PANELS)
  const auto by_key = [](const auto& smem_tile) {
    return make_tensor(smem_tile.data(),
                       composition(smem_tile.layout(), make_tile(typename Traits::KeyOrder{}, _)));
  };
  auto tKsK = thread_k.partition_D(by_key(sK));  // (VECTOR, ROWS, PANELS)
  auto tVsV = thread_v.partition_D(by_key(sV));  // (VECTOR, ROWS, PANELS)
  // Moves a tile of K or V on in the sequence.
  const auto move = [](auto& tile, const Strides& stride, int tiles) {
    tile.data() = tile.data() + int64_t{tiles} * kBlockN * stride.row;
  };
  move(tKgK, params.k_stride, n);
  move(tVgV, params.v_stride, n);
  auto tKcK = thread_k.partition_S(make_identity_tensor(ShapeK{}));  // (VECTOR, ROWS, PANELS)
  auto tVcV = thread_v.partition_S(make_identity_tensor(ShapeV{}));  // (VECTOR, ROWS, PANELS)
  const ColumnGuard<decltype(size<2>(tKsK))::value> columns(tKcK, params.head_dim);
  const ColumnGuard<decltype(size<2>(tVsV))::value> columns_v(tVcV, params.head_dim_v);

  using Mma = typename Traits::TiledMma;
  const Mma mma;
  // Keys that only the later half of the rows sees, as under a causal mask, are multiplied with it.
  constexpr bool kSkipsMaskedHalf = decltype(size<1>(acc_o))::value == 2 && kBlockM >= 2 * kBlockN;
  constexpr int kLateRows = kSkipsMaskedHalf ? kBlockM / 2 : kBlockM;
  using TileQ = typename Traits::TileQ;
  const LdmatrixOperand<Mma, Side::kA, TileQ> q(smem.q.data(), thread);
  const LdmatrixOperand<Mma, Side::kA, TileQ, false, kLateRows> q_late(
      smem.q.data() + (kBlockM - kLateRows) * TileQ::kPanelColumns, thread);
  LdmatrixOperand<Mma, Side::kB, typename Traits::TileK> k(smem.k.data(), thread);
  LdmatrixOperand<Mma, Side::kB, typename Traits::TileV, /*kTransposed=*/true> v_t(smem.v.data(),
                                                                                   thread);
  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  // (MMA, MMA_M, MMA_N): KeyOrder is its own inverse.
  auto tScS = mma.get_thread_slice(thread).partition_C(
      make_tensor(cS.data(), composition(cS.layout(), make_tile(_, typename Traits::KeyOrder{}))));

  // Only the first tiles can hold keys that do not exist.
  const int keys = sequence.seqlen_k - n * kBlockN;
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

  // P of warps that share rows, and how they join a value of each of these: a row of `places` each.
  using TileP = typename Traits::TileP;
  auto sP = make_tensor(make_smem_ptr(smem.p.data()), typename TileP::Layout{});
  [[maybe_unused]] const LdmatrixOperand<Mma, Side::kA, TileP> p(smem.p.data(), thread);
  [[maybe_unused]] const auto sync_pair = [&] { named_barrier_sync(thread / 64, 64); };
  [[maybe_unused]] const auto all_reduce_pair = [&](auto& rows, const auto& places,
                                                    const auto& combine) ANYFLASH_INLINE_LAMBDA {
    const int own = thread / 32 % 2 * kBlockM;
    CUTE_UNROLL
    for (int i = 0; i < size(rows); ++i) {
      if (thread % 4 == 0) smem.row_exchange[own + get<0>(places(i, 0))] = rows(i);
    }
    sync_pair();  // both warps' values are there
    CUTE_UNROLL
    for (int i = 0; i < size(rows); ++i) {
      rows(i) = combine(rows(i), smem.row_exchange[kBlockM - own + get<0>(places(i, 0))]);
    }
  };

  bool found_nonfinite = false;
  int to_other = 1;  // in tiles: where the other buffer is
  // S = Q K_n^T; P = exp2(S - max); O += P V_n, and the loads that follow, for accumulators from
  // `first` on along MMA_M: 1 for the later half of the rows. `distance` leads to the next tile, 0
  // after the last.
  const auto step = [&](auto masked, auto part, auto first, int distance) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr int kFirst = decltype(first)::value;
    constexpr int kStepRows = kFirst == 0 ? kBlockM : kLateRows;
    constexpr ScoreOps kOps = decltype(part)::value;
    constexpr bool kAll = kOps == ScoreOps::kAll;
    const auto clear_values = [&] {  // this thread's own pieces
      if (kMasked || (kAll && variant.may_hide_anywhere()))
        found_nonfinite |= clear_nonfinite(tVsV);
    };
    const auto load_next_keys = [&] {
      if (distance == 0) return;
      move(tKgK, params.k_stride, distance);
      load_tile<false>(load_k, tKgK, tKsK, tKcK, columns, 0);
      if constexpr (Traits::kConfig.commits_after_k) cp_async_fence();
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

    auto acc_s = partition_fragment_C(mma, Shape<Int<kStepRows>, Int<kBlockN>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    auto scores = make_tensor(acc_s.data(), accumulator_as_matrix(acc_s.layout()));
    const auto tCcS = fragment_from<kFirst>(tScS);
    const auto coordinates = make_tensor(tCcS.data(), accumulator_as_matrix(tCcS.layout()));
    auto out = fragment_from<kFirst>(acc_o);
    auto out_matrix = make_tensor(out.data(), accumulator_as_matrix(out.layout()));
    [[maybe_unused]] auto biases = make_tensor<uint32_t>(shape(scores));
    if constexpr (Variant::kGeneric) {
      if constexpr (kAll) {
        variant.score_mod.template prefetch<kMasked>(biases, coordinates, block.first_row,
                                                     n * kBlockN);
      }
    }
    if constexpr (kQueriesInRegisters) {
      gemm_register_smem(acc_s, fragment_from<kFirst>(tSrQ), k, mma);
    } else if constexpr (kFirst > 0) {
      gemm_smem_smem(acc_s, acc_s, q_late, k, mma);
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

    if constexpr (Variant::kOps != ScoreOps::kNone) {
      variant.score_mod.template apply<kOps, Variant::kGeneric>(scores, biases, coordinates,
                                                                block.first_row, n * kBlockN);
    }
    if constexpr (kMasked) {
      apply_mask(scores, coordinates, mask, block.first_row, n * kBlockN);
    }
    if constexpr (kSplitKeysAcrossWarps) {
      softmax.template update<kAll>(scores, out_matrix, [&](auto& maxima) ANYFLASH_INLINE_LAMBDA {
        all_reduce_pair(maxima, coordinates, [](float a, float b) { return fmaxf(a, b); });
      });
    } else {
      softmax.template update<kAll, 2 * kFirst>(scores, out_matrix);
    }
    if constexpr (Variant::kGeneric) {
      if (kAll && variant.dropout.active()) {
        apply_dropout(scores, variant.dropout, coordinates, block.first_row, n * kBlockN);
      }
    }
    auto probabilities = round_fragment<Element>(acc_s);
    if constexpr (kSplitKeysAcrossWarps) {
      const auto copy_p = make_tiled_copy_C(typename Traits::SmemStore{}, mma);
      const auto thread_copy_p = copy_p.get_thread_slice(thread);
      copy(copy_p, thread_copy_p.retile_S(probabilities), thread_copy_p.partition_D(sP));
      sync_pair();  // P is there
      gemm_smem_smem(out, out, p, v_t, mma);
    } else if constexpr (Variant::kFeatures == kDropout) {
      auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
      auto pairs = recast<uint32_t>(probabilities);
      // Eight of a thread's columns are two blocks of the sum, 32 keys in the order of
      // QuadKeyOrder. Dropped where the product gets to them, so that the rounds of Philox for some
      // keys run beside the tensor instructions for others, and few draws have to be kept.
      gemm_register_smem(out, tOrP, v_t, mma, [&](int k) ANYFLASH_INLINE_LAMBDA {
        if (k % 2 != 0) return;
        drop_run(pairs, scores.layout(), variant.dropout, coordinates, block.first_row, n * kBlockN,
                 4 * k);
      });
    } else {
      auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
      gemm_register_smem(out, tOrP, v_t, mma);
    }
    if constexpr (kTwoBuffers) {
      k.advance(to_other * size(sK));
      v_t.advance(to_other * size(sV));
      to_other = -to_other;
    }
  };
  using Part = ScoreOpsTag<Variant::kOps>;
  const auto masked_step = [&](auto first) ANYFLASH_INLINE_LAMBDA {
    const int next = visited(range.next(n));
    step(std::true_type{}, Part{}, first, next < 0 ? 0 : next - n);
    n = next;
  };
  if constexpr (kSkipsMaskedHalf) {
    const int seen = mask.end_key(block.first_row + kLateRows - 1);  // by the other half
    while (n >= 0 && n * kBlockN >= seen) masked_step(_1{});
  }
  while (n >= 0 && range.needs_mask(n)) masked_step(_0{});
  if constexpr (Variant::kOps == ScoreOps::kNone) {
    // Tiles count from the first unmasked one from here on, which saves a register, unless draws
    // depend on where they are.
    constexpr bool kDrops = Variant::kFeatures == kDropout;
    const int last = kDrops ? range.unmasked_begin : 0;
    for (n = kDrops || n < 0 ? n : n - range.unmasked_begin; n >= last; --n) {
      step(std::false_type{}, Part{}, _0{}, n > last ? -1 : 0);
    }
  } else {
    variant.dispatch_score_ops([&](auto part) ANYFLASH_INLINE_LAMBDA {
      while (n >= 0) {
        const int next = visited(n > range.unmasked_begin ? n - 1 : -1);
        step(std::false_type{}, part, _0{}, next < 0 ? 0 : next - n);
        n = next;
      }
    });
  }
  if constexpr (kSplitKeysAcrossWarps) {
    const auto places = make_tensor(tScS.data(), accumulator_as_matrix(tScS.layout()));
    softmax.exchange_sums([&](auto& sums) ANYFLASH_INLINE_LAMBDA {
      all_reduce_pair(sums, places, [](float a, float b) { return a + b; });
    });
  }
  return found_nonfinite;
}

}  // namespace anyflash::sm80
