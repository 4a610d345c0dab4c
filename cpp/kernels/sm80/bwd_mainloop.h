// The backward's main loop of one CTA: all tiles of query rows that see a block of keys, for the
// query heads that share its K/V head, or a part of them (FlashAttention-2, arXiv 2307.08691,
// section 3.1.2).
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm80/bwd_block.h"
#include "sm80/bwd_params.h"
#include "sm80/bwd_scores.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/operand.h"
#include "variant/block_mask.h"
#include "variant/mask.h"

namespace anyflash::sm80 {

// The tiles that a CTA visits, head by head. In each head a few tiles need a mask.
template <class Scores, int kBlockM, int kBlockN>
class RowTiles {
 public:
  ANYFLASH_DEVICE RowTiles(const BackwardScratch& params, const BackwardBlock& block, MRange range)
      : params_(params), block_(block), range_(range), m_(range.begin) {
    const int group = params.heads / params.heads_k;
    const int each = group / params.group_parts;
    const int larger = group % params.group_parts;  // so many parts have one head more
    head_ = block.head_k * group + block.part * each + min(block.part, larger);
    end_head_ = head_;
    if (range.begin < range.end) end_head_ += each + (block.part < larger ? 1 : 0);
    skip_hidden();
  }

  ANYFLASH_DEVICE bool valid() const { return head_ < end_head_; }
  ANYFLASH_DEVICE bool needs_mask() const {
    return range_.needs_mask(m_) || Scores::template special<kBlockM, kBlockN>(
                                        params_, block_.sequence, row(), block_.first_key);
  }
  ANYFLASH_DEVICE int head() const { return head_; }
  ANYFLASH_DEVICE int row() const { return m_ * kBlockM; }
  ANYFLASH_DEVICE void advance() {
    step();
    skip_hidden();
  }

 private:
  ANYFLASH_DEVICE void step() {
    if (++m_ < range_.end) return;
    m_ = range_.begin;
    ++head_;
  }
  ANYFLASH_DEVICE void skip_hidden() {
    if constexpr (Scores::kGeneric) {
      while (valid() && !BlockMask(params_, block_.batch, head_).keep(row(), block_.first_key)) {
        step();
      }
    }
  }

  const BackwardScratch& params_;
  const BackwardBlock& block_;
  MRange range_;
  int head_;
  int end_head_;
  int m_;
};

// dq_sum += acc. A warp's sums lie side by side, so that an atomic addition covers whole lines.
template <class Acc>
ANYFLASH_DEVICE void add_to_dq_sum(float* tile, const Acc& acc, int threads) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) atomicAdd(tile + i * threads + threadIdx.x, acc(i));
}

// acc_dk += dS^T Q and acc_dv += P^T dO over all tiles, without the scales of dS and of P; and dS K
// to dq_sum, where there is one.
//
// A step takes one tile. With two buffers the next tile arrives during all of it, else during the
// last product. With kReloadV, V comes again with each tile, during Q K^T, as P and dS lie where it
// was. smem.nonfinite_dout says afterwards whether NaN or infinity was taken out of a partly hidden
// tile of dO: restore_nonfinite() then has to follow.
template <class Traits, class Scores, class AccK, class AccV>
ANYFLASH_DEVICE void backward_mainloop(const BackwardScratch& params, const BackwardBlock& block,
                                       typename Traits::SharedStorage& smem, AccK& acc_dk,
                                       AccV& acc_dv) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kStages = Traits::kStages;
  const int thread = threadIdx.x;
  const Sequence& sequence = block.sequence;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
  RowTiles<Scores, kBlockM, kBlockN> tiles(params, block,
                                           mask.m_range(block.first_key, kBlockN, kBlockM));
  if (!tiles.valid()) return;

  using ShapeQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  using ShapeDO = Shape<Int<kBlockM>, Int<Traits::kHeadDimV>>;
  using ShapeK = Shape<Int<kBlockN>, Int<Traits::kHeadDim>>;
  using ShapeV = Shape<Int<kBlockN>, Int<Traits::kHeadDimV>>;
  using ShapeS = Shape<Int<kBlockM>, Int<Traits::kPartKeys>>;
  auto sQ = make_tensor(make_smem_ptr(smem.q[0].data()), typename Traits::TileQ::Layout{});
  auto sDO = make_tensor(make_smem_ptr(smem.dout[0].data()), typename Traits::TileDO::Layout{});
  auto sK = make_tensor(make_smem_ptr(smem.k.data()), typename Traits::TileK::Layout{});
  auto sV = make_tensor(make_smem_ptr(smem.v.data()), typename Traits::TileV::Layout{});
  auto sP = make_tensor(make_smem_ptr(smem.p()), typename Traits::TilePartP::Layout{});
  auto sDS = make_tensor(make_smem_ptr(smem.ds()), typename Traits::TilePartP::Layout{});

  // Global to shared memory.
  typename Traits::TileQ::Load load_q;
  typename Traits::TileDO::Load load_do;
  typename Traits::TileK::Load load_k;
  typename Traits::TileV::Load load_v;
  auto thread_q = load_q.get_thread_slice(thread);
  auto thread_do = load_do.get_thread_slice(thread);
  auto thread_k = load_k.get_thread_slice(thread);
  auto thread_v = load_v.get_thread_slice(thread);
  const auto by_key = [](const auto& tile) {
    return make_tensor(tile.data(),
                       composition(tile.layout(), make_tile(typename Traits::KeyOrder{}, _)));
  };
  auto tQsQ = thread_q.partition_D(sQ);                                 // (VECTOR, ROWS, PAGES)
  auto tOsDO = thread_do.partition_D(sDO);                              // (VECTOR, ROWS, PAGES)
  auto tKsK = thread_k.partition_D(by_key(sK));                         // (VECTOR, ROWS, PAGES)
  auto tVsV = thread_v.partition_D(by_key(sV));                         // (VECTOR, ROWS, PAGES)
  auto tQcQ = thread_q.partition_S(make_identity_tensor(ShapeQ{}));     // (VECTOR, ROWS, PAGES)
  auto tOcDO = thread_do.partition_S(make_identity_tensor(ShapeDO{}));  // (VECTOR, ROWS, PAGES)
  auto tKcK = thread_k.partition_S(make_identity_tensor(ShapeK{}));     // (VECTOR, ROWS, PAGES)
  auto tVcV = thread_v.partition_S(make_identity_tensor(ShapeV{}));     // (VECTOR, ROWS, PAGES)
  const auto load_rows = [&](const RowTiles<Scores, kBlockM, kBlockN>& at) {
    const int64_t first = sequence.first_q + at.row();
    auto gQ =
        gmem_tile<Element>(ShapeQ{}, params.q, params.q_stride, sequence.batch, at.head(), first);
    auto gDO = gmem_tile<Element>(ShapeDO{}, params.dout, params.dout_stride, sequence.batch,
                                  at.head(), first);
    const int rows = sequence.seqlen_q - at.row();
    const ColumnGuard<decltype(size<2>(tQsQ))::value> columns(tQcQ, params.head_dim);
    const ColumnGuard<decltype(size<2>(tOsDO))::value> columns_v(tOcDO, params.head_dim_v);
    load_tile<true>(load_q, thread_q.partition_S(gQ), tQsQ, tQcQ, columns, rows);
    load_tile<true>(load_do, thread_do.partition_S(gDO), tOsDO, tOcDO, columns_v, rows);
  };
  const auto load_keys = [&] {
    const ColumnGuard<decltype(size<2>(tKsK))::value> columns(tKcK, params.head_dim);
    auto gK = gmem_tile<Element>(ShapeK{}, params.k, params.k_stride, sequence.batch, block.head_k,
                                 sequence.first_k + block.first_key);
    load_tile<true>(load_k, thread_k.partition_S(gK), tKsK, tKcK, columns,
                    sequence.seqlen_k - block.first_key);
  };
  const auto load_values = [&] {
    const ColumnGuard<decltype(size<2>(tVsV))::value> columns(tVcV, params.head_dim_v);
    auto gV = gmem_tile<Element>(ShapeV{}, params.v, params.v_stride, sequence.batch, block.head_k,
                                 sequence.first_k + block.first_key);
    load_tile<true>(load_v, thread_v.partition_S(gV), tVsV, tVcV, columns,
                    sequence.seqlen_k - block.first_key);
  };

  // S = Q K^T and dP = dO V^T.
  typename Traits::ScoreMma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  using ScoreMma = typename Traits::ScoreMma;
  Operand<ScoreMma, Side::kA, typename Traits::TileQ> q(smem.q[0].data(), thread);
  Operand<ScoreMma, Side::kA, typename Traits::TileDO> dout(smem.dout[0].data(), thread);
  constexpr int kPartKeys = Traits::kPartKeys;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  Operand<ScoreMma, Side::kB, TileK, false, kPartKeys> k(smem.k.data(), thread);
  Operand<ScoreMma, Side::kB, TileV, false, kPartKeys> v(smem.v.data(), thread);
  auto copy_c = make_tiled_copy_C(typename Traits::SmemStore{}, mma);
  auto thread_copy_c = copy_c.get_thread_slice(thread);
  auto tCsP = thread_copy_c.partition_D(sP);    // (COPY, MMA_M, MMA_N)
  auto tCsDS = thread_copy_c.partition_D(sDS);  // (COPY, MMA_M, MMA_N)
  auto cS = make_identity_tensor(ShapeS{});
  auto tScS = thread_mma.partition_C(  // (MMA, MMA_M, MMA_N): KeyOrder is its own inverse
      make_tensor(cS.data(),
                  composition(cS.layout(), make_tile(_, typename Traits::PartKeyOrder{}))));
  auto coordinates = make_tensor(tScS.data(), accumulator_as_matrix(tScS.layout()));

  // dV += P^T dO and dK += dS^T Q.
  typename Traits::KeyMma mma_kv;
  using KeyMma = typename Traits::KeyMma;
  constexpr bool kTransposed = true;
  const Operand<KeyMma, Side::kA, typename Traits::TileP, kTransposed> p_t(smem.p(), thread);
  const Operand<KeyMma, Side::kA, typename Traits::TileP, kTransposed> ds_t(smem.ds(), thread);
  Operand<KeyMma, Side::kB, typename Traits::TileQ, kTransposed> q_t(smem.q[0].data(), thread);
  Operand<KeyMma, Side::kB, typename Traits::TileDO, kTransposed> dout_t(smem.dout[0].data(),
                                                                         thread);

  // dQ = dS K.
  typename Traits::QueryMma mma_q;
  using QueryMma = typename Traits::QueryMma;
  const Operand<QueryMma, Side::kA, typename Traits::TileP> ds(smem.ds(), thread);
  Operand<QueryMma, Side::kB, typename Traits::TilePartK, kTransposed> k_t(smem.k.data(), thread);

  load_keys();
  if constexpr (!Traits::kReloadV) load_values();
  load_rows(tiles);
  cp_async_fence();
  cp_async_wait<0>();
  if (!all_finite(tKsK)) atomicMax(&smem.nonfinite_keys, 1);

  int buffer = 0;
  const auto step = [&](auto masked) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    const int head = tiles.head();
    const int row0 = tiles.row();
    const Scores variant(params, sequence, block.batch, head);
    cp_async_wait<0>();
    if (kMasked) {
      // This thread's own pieces. Rows that see a key have told so by their LSE and delta.
      clear_nonfinite(tQsQ);
      if (clear_nonfinite(tOsDO)) atomicMax(&smem.nonfinite_dout, 1);
    }
    __syncthreads();  // the tile is there; every warp has done with the one before, P and dS
    tiles.advance();
    [[maybe_unused]] const int other_q = buffer == 0 ? size(sQ) : -size(sQ);
    [[maybe_unused]] const int other_do = buffer == 0 ? size(sDO) : -size(sDO);
    const auto load_next = [&] {
      if (tiles.valid()) {
        if constexpr (kStages == 2) {
          tQsQ.data() = tQsQ.data() + other_q;
          tOsDO.data() = tOsDO.data() + other_do;
        }
        load_rows(tiles);
        cp_async_fence();
      }
    };
    if constexpr (kStages == 2) load_next();
    if constexpr (Traits::kReloadV) {
      load_values();
      cp_async_fence();
    }

    const int64_t stats_row = params.first_row(sequence, block.batch, head) + row0;
    const auto stats = load_stats(params.stats + stats_row, coordinates);
    CUTE_UNROLL
    for (int part = 0; part < Traits::kScoreParts; ++part) {
      auto acc_s = partition_fragment_C(mma, ShapeS{});  // (MMA, MMA_M, MMA_N)
      auto acc_dp = partition_fragment_C(mma, ShapeS{});
      clear(acc_s);
      auto scores = make_tensor(acc_s.data(), accumulator_as_matrix(acc_s.layout()));
      auto dp = make_tensor(acc_dp.data(), accumulator_as_matrix(acc_dp.layout()));
      typename Scores::template Extra<Element, decltype(size<0>(scores))::value,
                                      decltype(size<1>(scores))::value>
          extra;
      const ScoreTile tile{mask, row0, block.first_key + part * kPartKeys};
      variant.template prefetch<kMasked>(extra, coordinates, tile);
      gemm_smem_smem(acc_s, acc_s, q, k, mma);
      variant.template probabilities<kMasked>(scores, extra, stats, coordinates, tile);
      const auto store_rounded = [&](const auto& rounded, const auto& tCsX) {
        auto target = make_tensor(tCsX.data() + part * kBlockM * kPartKeys, tCsX.layout());
        copy(copy_c, thread_copy_c.retile_S(rounded), target);
      };
      const auto store_p = [&] {
        if constexpr (Scores::kGeneric) {
          const auto kept = variant.dropped(scores, extra, coordinates, tile);
          store_rounded(round_fragment<Element>(make_tensor(kept.data(), acc_s.layout())), tCsP);
        } else if constexpr (Scores::kOneP) {
          store_rounded(round_fragment<Element>(acc_s), tCsP);
        } else {
          store_rounded(make_tensor(extra.p.data(), acc_s.layout()), tCsP);
        }
      };
      if constexpr (Traits::kReloadV) {
        cp_async_wait<0>();
        __syncthreads();  // V is there
      } else {
        store_p();
      }
      const auto dp_init = variant.dp_init(acc_dp, stats);
      gemm_smem_smem(acc_dp, dp_init, dout, v, mma);
      if constexpr (Traits::kReloadV) {
        __syncthreads();  // every warp has done with V
        store_p();
      }
      variant.template gradients<kMasked>(dp, scores, extra, stats);
      variant.chain(dp, extra);
      store_rounded(round_fragment<Element>(acc_dp), tCsDS);
      if constexpr (Traits::kScoreParts > 1) {
        const int parts = part + 1 < Traits::kScoreParts ? 1 : 1 - Traits::kScoreParts;
        k.move(parts * kPartKeys * TileK::kPage);
        v.move(parts * kPartKeys * TileV::kPage);
      }
    }
    __syncthreads();  // P and dS are there

    gemm_smem_smem(acc_dv, acc_dv, p_t, dout_t, mma_kv);
    gemm_smem_smem(acc_dk, acc_dk, ds_t, q_t, mma_kv);
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has done with Q and dO
      load_next();
    } else {
      q.move(other_q);
      q_t.move(other_q);
      dout.move(other_do);
      dout_t.move(other_do);
      buffer ^= 1;
    }

    if (params.dq_sum == nullptr) return;
    const bool clear_keys = kMasked && smem.nonfinite_keys != 0;
    if (clear_keys) {
      clear_nonfinite(tKsK);
      __syncthreads();  // K without NaN and infinity
    }
    float* dq_sum = params.dq_sum + stats_row * Traits::kHeadDim;
    constexpr int kParts = Traits::kQueryParts;
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      using ShapePart = Shape<Int<kBlockM>, Int<Traits::kPartColumns>>;
      auto acc_dq = partition_fragment_C(mma_q, ShapePart{});  // (MMA, MMA_M, MMA_D)
      clear(acc_dq);
      gemm_smem_smem(acc_dq, acc_dq, ds, k_t, mma_q);
      add_to_dq_sum(dq_sum, acc_dq, Traits::kThreads);
      dq_sum += kBlockM * Traits::kPartColumns;
      if constexpr (kParts > 1) {
        k_t.move((part + 1 < kParts ? 1 : 1 - kParts) * kBlockN * Traits::kPartColumns);
      }
    }
    if (clear_keys) {
      __syncthreads();  // every warp has done with that K
      load_keys();
      cp_async_fence();
    }
  };
  while (tiles.valid()) {
    while (tiles.valid() && tiles.needs_mask()) step(std::true_type{});
    if constexpr (!Scores::kGeneric) {
      while (tiles.valid() && !tiles.needs_mask()) step(std::false_type{});
    }
  }
}

}  // namespace anyflash::sm80
