// dQ by rows: a CTA sums what all keys give to its rows, in registers and in the order of the keys.
// So its bits depend neither on the run nor on the batch. It computes S and dP again: with dK and
// dV, seven products instead of five, but no sums in the workspace.
#pragma once

#include "common/launch.h"
#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "sm90/backward/dq_stages.h"
#include "sm90/backward/epilogue.h"
#include "sm90/backward/pair.h"
#include "sm90/backward/variants.h"
#include "sm90/pipeline.h"
#include "sm90/roles.h"
#include "sm90/tma.h"
#include "sm90/visited_tiles.h"
#include "variant/backward_scratch.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// Q and dO of the block, then its tiles of K and V. By one thread, or by a warp where the variant
// leaves tiles out: all lanes find the tiles, and one loads and tells.
template <class Traits>
ANYFLASH_DEVICE void produce_keys(const DqByRowsLaunch& params, const ForwardWorkTile& block,
                                  typename Traits::SharedStorage& smem) {
  using TileQ = typename Traits::TileQ;
  using TileDO = typename Traits::TileDO;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  const Sequence& sequence = block.sequence;
  const int batch = static_cast<int>(sequence.batch);
  const int column = rank_in_pair<Traits>() * Traits::kHeadDim;
  const int column_v = rank_in_pair<Traits>() * Traits::kHeadDimV;
  const Mask mask(sequence, params.attention.window);
  const KRange range = mask.k_range(block.first_row, Traits::kBlockM, Traits::kBlockN);
  RingPlace<Traits::kStages> place;
  RingPlace<Traits::kStagesV> v_place;
  bool is_first = true;
  VisitedTiles<Traits, typename Traits::TileVariant> tiles;
  tiles.begin(params.attention, block, range);
  for (;;) {
    const KeyTile tile = tiles.next(params.attention, block, range);
    if (!tile.exists()) break;
    if (!leads<Traits>()) continue;
    const int stage = place.stage();
    TileCoordinates keys{column, static_cast<int>(sequence.first_k) + tile.n * Traits::kBlockN,
                         block.head_k, batch};
    smem.k_ring.empty[stage].wait(place.parity() ^ 1);
    smem.tiles[stage] = tile;
    load_tile<TileK>(smem.k.data() + stage * TileK::kSize, params.k_map, keys,
                     smem.k_ring.full[stage], L2Hint::kEvictLast);
    if (is_first) {
      TileCoordinates rows{column, static_cast<int>(sequence.first_q) + block.first_row, block.head,
                           batch};
      smem.q_full.arrive_expect(Traits::kConsumers * TileQ::kBytes);
      smem.dout_full.arrive_expect(Traits::kConsumers * TileDO::kBytes);
      for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup, rows.row += 64) {
        rows.column = column;
        load_panels<TileQ>(smem.q.data() + warpgroup * TileQ::kSize, params.q_map, rows,
                           smem.q_full, L2Hint::kEvictFirst);
        rows.column = column_v;
        load_panels<TileDO>(smem.dout.data() + warpgroup * TileDO::kSize, params.dout_map, rows,
                            smem.dout_full, L2Hint::kEvictFirst);
      }
      is_first = false;
    }
    smem.v_ring.empty[v_place.stage()].wait(v_place.parity() ^ 1);
    keys.column = column_v;
    load_tile<TileV>(smem.v.data() + v_place.stage() * TileV::kSize, params.v_map, keys,
                     smem.v_ring.full[v_place.stage()], L2Hint::kEvictLast);
    place.advance();
    v_place.advance();
  }
  if (!leads<Traits>()) return;
  smem.k_ring.empty[place.stage()].wait(place.parity() ^ 1);
  smem.tiles[place.stage()] = KeyTile{};
  smem.k_ring.full[place.stage()].arrive();
}

// acc_dq += dS K over all tiles of keys, without the scale of dS.
template <class Traits>
ANYFLASH_DEVICE void dq_mainloop(DqStages<Traits>& stages, typename Traits::AccQ& acc_dq) {
  typename Traits::AccS acc_s;   // S, then P
  typename Traits::AccS acc_dp;  // dP, then dS
  typename DqStages<Traits>::Rounded ds;
  while (stages.wait_keys()) {
    stages.issue_scores(acc_s);
    stages.issue_dp(acc_dp);
    stages.draw();
    wgmma_wait<1>();
    pin(acc_s);
    stages.complete_scores(acc_s);
    stages.compute_p(acc_s);
    wgmma_wait<0>();
    pin(acc_dp);
    stages.release_values();
    stages.complete_dp(acc_dp);
    stages.clear_keys();
    stages.compute_ds(acc_dp, acc_s);
    if constexpr (kHasAlibi<typename Traits::Variant>) stages.add_slope_gradient(acc_dp);
    ds.round(acc_dp);
    stages.issue_dq(acc_dq, ds);
    wgmma_wait<0>();
    pin(acc_dq);
    stages.release_keys();
  }
}

template <class Traits>
ANYFLASH_DEVICE void consume_keys(const DqByRowsLaunch& params, const ForwardWorkTile& block,
                                  typename Traits::SharedStorage& smem, int warpgroup) {
  typename Traits::AccQ acc_dq;
  cute::clear(acc_dq);
  DqStages<Traits> stages(params, block, smem, warpgroup);
  dq_mainloop<Traits>(stages, acc_dq);
  stages.finish();
  if constexpr (kHasAlibi<typename Traits::Variant>) stages.store_slope_sum();
  scale(acc_dq, params.ds_scale);
  visit_gradient_type<Traits>(params, [&](auto type) {
    using Out = decltype(type);
    store_gradient<Out, Traits::kHeadDim>(
        columns_of_cta<Traits, Traits::kHeadDim>(gradient_tile<Out>(
            params.dq, params.dq_stride, query_rows(block.sequence, block.head, block.first_row),
            params.attention.head_dim, params.accumulates_dq)),
        static_cast<int>(threadIdx.x) / 32 * 16, acc_dq);
  });
}

// The sums of a block that has no rows.
template <class Traits>
ANYFLASH_DEVICE void clear_slope_sums(const DqByRowsLaunch& params, const ForwardWorkTile& block) {
  const int64_t sums = BackwardScratch::slope_sums_of_head(params.attention.seqlen_q);
  const int64_t place = block.first_row / BackwardScratch::kSlopeSumRows + threadIdx.x;
  if (params.slope_sums == nullptr || threadIdx.x >= Traits::kConsumers || place >= sums) return;
  params.slope_sums[(block.batch * params.attention.heads + block.head) * sums + place] = 0.0f;
}

// dQ of a block of rows. Grid: x = all blocks of all (batch, head) pairs, times the CTAs of a
// block; a head's last rows, which see the most keys, come first.
template <class Traits>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    dq_by_rows_kernel(const __grid_constant__ DqByRowsLaunch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  const ForwardWorkTile block =
      row_block_at<Traits::kBlockM>(params.scheduler, params.attention, work_block<Traits>());
  if (block.first_row >= block.sequence.seqlen_q) {
    if constexpr (kHasAlibi<typename Traits::Variant>) clear_slope_sums<Traits>(params, block);
    return;
  }
  if (threadIdx.x == 0) {
    smem.q_full.init(1);
    smem.dout_full.init(1);
    smem.k_ring.init(Traits::kConsumerWarps);
    smem.v_ring.init(Traits::kConsumerWarps);
    if constexpr (Traits::kCtas > 1) {
      for (auto& from_peer : smem.from_peer) {
        from_peer.s_barriers.init();
        from_peer.dp_barriers.init();
      }
    }
    fence_barrier_init();
  }
  __syncthreads();
  meet_peer<Traits>();
  run_roles<Traits>(
      [&] {
        if (loads<Traits>()) produce_keys<Traits>(params, block, smem);
      },
      [&](int warpgroup) { consume_keys<Traits>(params, block, smem, warpgroup); });
}

}  // namespace anyflash::sm90
