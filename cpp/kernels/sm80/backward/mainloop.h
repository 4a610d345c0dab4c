// The backward's main loop of one CTA: all tiles of query rows that see a block of keys, for query
// heads that share its K/V head (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/finite.h"
#include "common/layout.h"
#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm80/backward/accumulate.h"
#include "sm80/backward/pingpong.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/backward_scratch.h"
#include "variant/backward_variants.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// acc_dk += dS^T Q and acc_dv += P^T dO over all tiles, without the scales of dS and of P; and dS K
// to dq_accum, where there is one.
//
// A step takes one tile. The next one arrives during the last product, with two buffers during the
// last two. Where two groups of warps take turns, each takes every other tile (pingpong.h). With
// kReloadV, V comes again with each tile, during Q K^T, as P and dS lie where it was.
// smem.nonfinite_dout says afterwards whether NaN or infinity was taken out of a partly hidden tile
// of dO: restore_nonfinite() then has to follow.
template <class Traits, class Scores, class AccK, class AccV>
ANYFLASH_DEVICE void backward_mainloop(const BackwardScratch& params, const BackwardWorkTile& block,
                                       typename Traits::SharedStorage& smem, AccK& acc_dk,
                                       AccV& acc_dv) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kStages = Traits::kStages;
  const int thread = threadIdx.x;
  const std::conditional_t<Traits::kConfig.keep_sequence, const Sequence, const Sequence&>
      sequence = block.sequence;
  const Mask mask(sequence.seqlen_q, sequence.seqlen_k, params.window);
  using Tiles = QueryTileIterator<Traits, Scores>;
  Tiles tiles(params, block, mask);
  if (!tiles.valid()) return;
  using Schedule =
      std::conditional_t<Traits::kPingPong, PingPong<Traits, Tiles>, Cooperative<Traits, Tiles>>;
  Schedule schedule(smem.ping_pong, tiles);
  const int row_thread = schedule.row_thread();
  const int group = schedule.group();

  using ShapeQ = Shape<Int<kBlockM>, Int<Traits::kHeadDim>>;
  using ShapeDO = Shape<Int<kBlockM>, Int<Traits::kHeadDimV>>;
  using ShapeK = Shape<Int<kBlockN>, Int<Traits::kHeadDim>>;
  using ShapeV = Shape<Int<kBlockN>, Int<Traits::kHeadDimV>>;
  auto sQ = make_tensor(make_smem_ptr(smem.q[0].data()), typename Traits::TileQ::Layout{});
  auto sDO = make_tensor(make_smem_ptr(smem.dout[0].data()), typename Traits::TileDO::Layout{});
  auto sK = make_tensor(make_smem_ptr(smem.k.data()), typename Traits::TileK::Layout{});
  auto sV = make_tensor(make_smem_ptr(smem.v.data()), typename Traits::TileV::Layout{});

  // Global to shared memory.
  typename Traits::TileQ::Load load_q;
  typename Traits::TileDO::Load load_do;
  typename Traits::TileK::Load load_k;
  typename Traits::TileV::Load load_v;
  auto thread_q = load_q.get_thread_slice(row_thread);
  auto thread_do = load_do.get_thread_slice(row_thread);
  auto thread_k = load_k.get_thread_slice(thread);
  auto thread_v = load_v.get_thread_slice(thread);
  const auto by_key = [](const auto& tile) {
    return make_tensor(tile.data(),
                       composition(tile.layout(), make_tile(typename Traits::KeyOrder{}, _)));
  };
  auto tQsQ = thread_q.partition_D(sQ);                                 // (VECTOR, ROWS, PANELS)
  auto tOsDO = thread_do.partition_D(sDO);                              // (VECTOR, ROWS, PANELS)
  auto tKsK = thread_k.partition_D(by_key(sK));                         // (VECTOR, ROWS, PANELS)
  auto tVsV = thread_v.partition_D(by_key(sV));                         // (VECTOR, ROWS, PANELS)
  auto tQcQ = thread_q.partition_S(make_identity_tensor(ShapeQ{}));     // (VECTOR, ROWS, PANELS)
  auto tOcDO = thread_do.partition_S(make_identity_tensor(ShapeDO{}));  // (VECTOR, ROWS, PANELS)
  auto tKcK = thread_k.partition_S(make_identity_tensor(ShapeK{}));     // (VECTOR, ROWS, PANELS)
  auto tVcV = thread_v.partition_S(make_identity_tensor(ShapeV{}));     // (VECTOR, ROWS, PANELS)
  const auto load_rows = [&](const Tiles& at) {
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
  using ScoreMma = typename Traits::ScoreMma;
  LdmatrixOperand<ScoreMma, Side::kA, typename Traits::TileQ> q(smem.q[0].data(), row_thread);
  LdmatrixOperand<ScoreMma, Side::kA, typename Traits::TileDO> dout(smem.dout[0].data(),
                                                                    row_thread);
  LdmatrixOperand<ScoreMma, Side::kB, typename Traits::TileK> k(smem.k.data(), row_thread);
  LdmatrixOperand<ScoreMma, Side::kB, typename Traits::TileV> v(smem.v.data(), row_thread);
  constexpr int kPartKeys = Traits::kPartKeys;
  using TileP = typename Traits::TileP;
  auto sP = make_tensor(make_smem_ptr(smem.p(group)), typename Traits::PartOfP::Layout{});
  auto sDS = make_tensor(make_smem_ptr(smem.ds(group)), typename Traits::PartOfP::Layout{});
  auto copy_c = make_tiled_copy_C(typename Traits::SmemStore{}, mma);
  auto thread_copy_c = copy_c.get_thread_slice(row_thread);
  auto tCsP = thread_copy_c.partition_D(sP);    // (COPY, MMA_M, MMA_N)
  auto tCsDS = thread_copy_c.partition_D(sDS);  // (COPY, MMA_M, MMA_N)
  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kPartKeys>>{});
  // (MMA, MMA_M, MMA_N); the order is its own inverse
  auto tScS =
      mma.get_thread_slice(row_thread)
          .partition_C(make_tensor(
              cS.data(), composition(cS.layout(), make_tile(_, typename Traits::PartKeyOrder{}))));

  // dV += P^T dO and dK += dS^T Q.
  typename Traits::KeyMma mma_kv;
  using KeyMma = typename Traits::KeyMma;
  constexpr bool kTransposed = true;
  LdmatrixOperand<KeyMma, Side::kA, TileP, kTransposed> p_t(smem.p(), thread);
  LdmatrixOperand<KeyMma, Side::kA, TileP, kTransposed> ds_t(smem.ds(), thread);
  LdmatrixOperand<KeyMma, Side::kB, typename Traits::TileQ, kTransposed> q_t(smem.q[0].data(),
                                                                             thread);
  LdmatrixOperand<KeyMma, Side::kB, typename Traits::TileDO, kTransposed> dout_t(
      smem.dout[0].data(), thread);

  // dQ = dS K.
  typename Traits::QueryMma mma_q;
  using QueryMma = typename Traits::QueryMma;
  LdmatrixOperand<QueryMma, Side::kA, TileP> ds(smem.ds(group), row_thread);
  LdmatrixOperand<QueryMma, Side::kB, typename Traits::TileK, kTransposed> k_t(smem.k.data(),
                                                                               row_thread);

  // PingPong leave few registers: one address of an operand is kept, each product makes the others.
  if constexpr (Traits::kPingPong) {
    const auto keep_one = [](auto&... operands) { ((operands = operands.rematerialized()), ...); };
    keep_one(q, dout, k, v, p_t, ds_t, q_t, dout_t, ds, k_t);
  }
  const auto ready = [](const auto& operand) ANYFLASH_INLINE_LAMBDA {
    if constexpr (Traits::kPingPong) return operand.rematerialized();
    else return operand;
  };

  load_keys();
  if constexpr (!Traits::kReloadV) load_values();
  if constexpr (Traits::kPingPong) {
    tQsQ.data() = tQsQ.data() + group * size(sQ);
    tOsDO.data() = tOsDO.data() + group * size(sDO);
  }
  if (!Traits::kPingPong || tiles.valid()) load_rows(tiles);
  cp_async_fence();
  cp_async_wait<0>();
  if (!all_finite(tKsK)) atomicMax(&smem.nonfinite_keys, 1);
  if constexpr (Traits::kPingPong) __syncthreads();  // K and V are there

  const int64_t first_row = params.first_row(sequence, block.batch, 0);
  const typename Scores::Seed seed(params);
  int buffer = 0;
  const auto step = [&](auto masked, auto edge) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    constexpr bool kEdge = decltype(edge)::value;
    const int head = tiles.head();
    const int row0 = tiles.row();
    const Scores variant(params, sequence, block.batch, head, seed);
    const int64_t stats_row = first_row + head * params.padded_rows + row0;
    const auto matrix = [](auto& accumulator) {
      return make_tensor(accumulator.data(), accumulator_as_matrix(accumulator.layout()));
    };
    const auto stats = load_lse_delta(params.lse_delta + stats_row, matrix(tScS));
    cp_async_wait<0>();
    if (kMasked) {
      // This thread's own pieces. Rows that see a key have told so by their LSE and delta.
      clear_nonfinite(tQsQ);
      if (clear_nonfinite(tOsDO)) atomicMax(&smem.nonfinite_dout, 1);
    }
    // The tile is there; every warp that shares it has done with the one before, P and dS.
    schedule.begin(tiles);
    [[maybe_unused]] const int other_q = buffer == 0 ? size(sQ) : -size(sQ);
    [[maybe_unused]] const int other_do = buffer == 0 ? size(sDO) : -size(sDO);
    const auto load_next = [&] {
      if (!tiles.valid()) return;
      if constexpr (kStages == 2) {
        tQsQ.data() = tQsQ.data() + other_q;
        tOsDO.data() = tOsDO.data() + other_do;
      }
      load_rows(tiles);
      cp_async_fence();
    };
    if constexpr (Traits::kReloadV) {
      load_values();
      cp_async_fence();
    }

    auto tile_q = q;
    auto tile_do = dout;
    if constexpr (Traits::kPingPong) {
      tile_q.advance(schedule.buffer() * size(sQ));
      tile_do.advance(schedule.buffer() * size(sDO));
    }
    for_each(make_int_sequence<Traits::kScoreParts>{}, [&](auto part) ANYFLASH_INLINE_LAMBDA {
      constexpr int kKey = decltype(part)::value * kPartKeys;
      constexpr int kRow = kEdge && kKey >= Traits::kTopKeys ? Traits::kTopRows : 0;
      constexpr int kRows = kBlockM - kRow;
      if constexpr (kRows > 0) {
        constexpr int kFirst = kRow / (16 * Traits::kConfig.score_warps);
        auto tCcS = fragment_from<kFirst>(tScS);
        const auto coordinates = matrix(tCcS);
        const auto part_stats = rows_from<2 * kFirst>(stats);
        auto acc_s = partition_fragment_C(mma, Shape<Int<kRows>, Int<kPartKeys>>{});
        auto acc_dp = make_fragment_like(acc_s);  // (MMA, MMA_M, MMA_N)
        clear(acc_s);
        auto scores = matrix(acc_s);
        auto dp = matrix(acc_dp);
        typename Scores::template ScoreAux<Element, decltype(size<0>(scores))::value,
                                           decltype(size<1>(scores))::value>
            aux;
        const ScoreTile tile{mask, row0, block.first_key + kKey};
        variant.template prefetch<kMasked>(aux, coordinates, tile);
        gemm_smem_smem(acc_s, acc_s,
                       ready(tile_q).template region<kRow, kRows, 0, Traits::kHeadDim>(),
                       ready(k).template region<kKey, kPartKeys, 0, Traits::kHeadDim>(), mma);
        variant.template compute_p<kMasked>(scores, aux, part_stats, coordinates, tile);
        const auto store = [&](const auto& rounded, const auto& sX, const auto& tCsX) {
          const auto source = thread_copy_c.retile_S(rounded);
          const auto rows = Layout<decltype(size<1>(source))>{};
          // Where registers are few, addresses that are kept cost more than addresses made anew.
          const auto target = [&] {
            if constexpr (!Traits::kConfig.keep_store_addresses || !Scores::kKeepsAddresses) {
              return copy_c.get_thread_slice(schedule.row_thread()).partition_D(sX);
            } else {
              return tCsX;
            }
          }();
          copy(copy_c, source,
               make_tensor(target.data() + TileP::panel_offset(kRow, kKey),
                           composition(target.layout(), make_tile(_, rows, _))));
        };
        if constexpr (Traits::kReloadV) {
          cp_async_wait<0>();
          __syncthreads();  // V is there
        }
        const auto initial_dp = variant.initial_dp(acc_dp, part_stats);
        gemm_smem_smem(acc_dp, initial_dp,
                       ready(tile_do).template region<kRow, kRows, 0, Traits::kHeadDimV>(),
                       ready(v).template region<kKey, kPartKeys, 0, Traits::kHeadDimV>(), mma);
        if constexpr (Traits::kReloadV) __syncthreads();  // every warp has done with V
        if constexpr (kKey == 0) schedule.await_p();
        // Not before: the product's operands would wait for it.
        store(variant.template rounded_p<Element>(acc_s, aux, coordinates, tile), sP, tCsP);
        variant.template compute_ds<kMasked>(dp, scores, aux, part_stats);
        variant.apply_score_derivative(dp, aux);
        store(round_fragment<Element>(acc_dp), sDS, tCsDS);
      }
    });
    // Calls product(region) with what is seen of the tile.
    const auto by_regions = [&](const auto& product) ANYFLASH_INLINE_LAMBDA {
      if constexpr (!kEdge) {
        product(typename Traits::All{});
      } else {
        if constexpr (Traits::kTopKeys > 0) product(typename Traits::DiagonalTop{});
        if constexpr (Traits::kTopRows < kBlockM) product(typename Traits::DiagonalBottom{});
      }
    };
    if constexpr (!Traits::kPingPong) {
      __syncthreads();  // P and dS are there
      const auto add_to_keys = [&](auto& all_keys, const auto& scores_t, const auto& rows,
                                   auto columns) ANYFLASH_INLINE_LAMBDA {
        by_regions([&](auto region) ANYFLASH_INLINE_LAMBDA {
          constexpr int kRow = decltype(region)::kRow;
          constexpr int kRows = decltype(region)::kRows;
          constexpr int kKeys = decltype(region)::kKeys;
          auto acc = fragment_from<0, kKeys / (16 * Traits::kConfig.key_warps)>(all_keys);
          gemm_smem_smem(acc, acc, scores_t.template region<kRow, kRows, 0, kKeys>(),
                         rows.template region<kRow, kRows, 0, decltype(columns)::value>(), mma_kv);
        });
      };
      add_to_keys(acc_dv, p_t, dout_t, Int<Traits::kHeadDimV>{});
      if constexpr (kStages == 2) load_next();
      add_to_keys(acc_dk, ds_t, q_t, Int<Traits::kHeadDim>{});
      if constexpr (kStages == 1) {
        __syncthreads();  // every warp has done with Q and dO
        load_next();
      } else {
        q.advance(other_q);
        q_t.advance(other_q);
        dout.advance(other_do);
        dout_t.advance(other_do);
        buffer ^= 1;
      }
    } else {
      schedule.end_scores();
      if (schedule.with_before()) {
        if (schedule.sees_before()) {
          add_tile_to_keys<Traits>(acc_dk, acc_dv, p_t, ds_t, q_t, dout_t, 1 - group,
                                   schedule.other_buffer(), mma_kv);
        }
        schedule.end_before();
      }
      schedule.await_scores();
      if (!kEdge || group == 0) {
        add_tile_to_keys<Traits>(acc_dk, acc_dv, p_t, ds_t, q_t, dout_t, group, schedule.buffer(),
                                 mma_kv);
      }
      const int from = schedule.buffer();
      schedule.end(tiles);
      if (tiles.valid()) {
        const int buffers = schedule.buffer() - from;
        tQsQ.data() = tQsQ.data() + buffers * size(sQ);
        tOsDO.data() = tOsDO.data() + buffers * size(sDO);
        load_rows(tiles);
        cp_async_fence();
      }
    }

    if (params.dq_accum == nullptr) return;
    const bool clear_keys = kMasked && smem.nonfinite_keys != 0;
    if (!Traits::kPingPong && clear_keys) {
      clear_nonfinite(tKsK);
      __syncthreads();  // K without NaN and infinity
    }
    float* dq_accum = params.dq_accum + stats_row * Traits::kHeadDim;
    if constexpr (Traits::kPingPong) {
      if (clear_keys) {  // in place, it would be gone from the other group's scores
        constexpr int kKeys = kEdge ? Traits::kTopKeys : kBlockN;
        add_finite_to_dq_accum<Traits, kKeys>(dq_accum, smem.ds(group), smem.k.data(), row_thread);
        return;
      }
    }
    constexpr int kRowTile = 16 * Traits::kConfig.query_warps;
    constexpr int kFirst = kEdge && Traits::kTopKeys == 0 ? Traits::kTopRows / kRowTile : 0;
    for_each(make_int_sequence<Traits::kQueryParts>{}, [&](auto part) ANYFLASH_INLINE_LAMBDA {
      constexpr int kColumns = Traits::kPartColumns;
      constexpr int kColumn = decltype(part)::value * kColumns;
      auto acc_dq = partition_fragment_C(mma_q, Shape<Int<kBlockM>, Int<kColumns>>{});
      clear(acc_dq);  // (MMA, MMA_M, MMA_D)
      by_regions([&](auto region) ANYFLASH_INLINE_LAMBDA {
        constexpr int kRow = decltype(region)::kRow;
        constexpr int kRows = decltype(region)::kRows;
        constexpr int kKeys = decltype(region)::kKeys;
        auto acc = fragment_from<kRow / kRowTile, kRows / kRowTile>(acc_dq);
        gemm_smem_smem(acc, acc, ready(ds).template region<kRow, kRows, 0, kKeys>(),
                       ready(k_t).template region<0, kKeys, kColumn, kColumns>(), mma_q);
      });
      add_to_dq_accum<kFirst>(dq_accum + kBlockM * kColumn, acc_dq, schedule.row_thread(),
                              Traits::kRowThreads);
    });
    if (!Traits::kPingPong && clear_keys) {
      __syncthreads();  // every warp has done with that K
      load_keys();
      cp_async_fence();
    }
  };
  constexpr bool kSkipsMaskedHalf = Scores::kSkipsMaskedHalf && Traits::kSkipsMaskedHalf;
  while (tiles.valid()) {
    while (tiles.valid() && tiles.needs_mask()) {
      if (kSkipsMaskedHalf && tiles.on_diagonal())
        step(std::true_type{}, std::bool_constant<kSkipsMaskedHalf>{});
      else step(std::true_type{}, std::false_type{});
    }
    if constexpr (!Scores::kAlwaysMasked) {
      while (tiles.valid() && !tiles.needs_mask()) step(std::false_type{}, std::false_type{});
    }
  }
  if constexpr (Traits::kPingPong) {
    if (!schedule.with_before()) return;
    schedule.await_scores_before();
    if (schedule.sees_before()) {
      add_tile_to_keys<Traits>(acc_dk, acc_dv, p_t, ds_t, q_t, dout_t, 1 - group,
                               schedule.other_buffer(), mma_kv);
    }
  }
}

}  // namespace anyflash::sm80
