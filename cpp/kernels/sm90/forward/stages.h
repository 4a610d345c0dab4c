// What a consumer warpgroup does with a tile of keys, stage by stage; mainloop.h puts these in
// order.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/traits.h"
#include "sm90/pipeline.h"
#include "sm90/wgmma.h"
#include "variant/mask.h"

namespace anyflash::sm90 {

// Row and column of each of this thread's accumulators, as accumulator_as_matrix() orders them: row
// within the block, column within the tile.
template <int kColumns>
ANYFLASH_DEVICE auto accumulator_coordinates() {
  using namespace cute;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
  const int col = threadIdx.x % 4 * 2;
  return make_tensor(make_inttuple_iter(make_tuple(row, col)),
                     make_layout(make_shape(_2{}, make_shape(_2{}, Int<kColumns / 8>{})),
                                 make_stride(_8{} * E<0>{}, make_stride(E<1>{}, _8{} * E<1>{}))));
}

// Accumulators rounded in pairs: the registers that the next product wants as its operand A, and
// stmatrix.
template <class Element, int kColumns>
struct RoundedAccumulator {
  static constexpr int kWords = kColumns / 4;
  uint32_t words[kWords];

  ANYFLASH_DEVICE void round(const Accumulator<kColumns>& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const auto pair = round_pair(float2{acc(2 * i), acc(2 * i + 1)}, Element{});
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

// The keys that this thread's rows see.
struct VisibleKeys {
  int first[kThreadRows];
  int end[kThreadRows];

  ANYFLASH_DEVICE VisibleKeys(const Mask& mask, int first_row) {
    const int row0 = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      first[row] = mask.first_key(row0 + 8 * row);
      end[row] = mask.end_key(row0 + 8 * row);
    }
  }
};

template <class Traits>
class ForwardStages {
  using Element = typename Traits::Element;
  using AccS = typename Traits::AccS;
  using AccO = typename Traits::AccO;
  static constexpr bool kPingPong = Traits::kConfig.ping_pong;

 public:
  using Probabilities = RoundedAccumulator<Element, Traits::kBlockN>;

  ANYFLASH_DEVICE ForwardStages(typename Traits::SharedStorage& smem, int warpgroup)
      : smem_(smem), warpgroup_(warpgroup) {
    // The first turn.
    if (kPingPong && warpgroup == 0) arrive_named(ping_pong_barrier(0), kPingPongThreads);
  }

  ANYFLASH_DEVICE void wait_queries() { smem_.q_full.wait(q_place_.parity()); }
  // By every warp, when it has done with Q and with what takes its place.
  ANYFLASH_DEVICE void release_queries() {
    q_place_.advance();
    if (threadIdx.x % 32 == 0) smem_.q_empty.arrive();
  }

  ANYFLASH_DEVICE void wait_keys() { smem_.k_ring.full[k_place_.stage()].wait(k_place_.parity()); }

  // S = Q K^T is on its way, after wait_keys().
  ANYFLASH_DEVICE void issue_scores(AccS& acc_s) {
    using TileQ = typename Traits::TileQ;
    using TileK = typename Traits::TileK;
    constexpr int kPanelQ = TileQ::kPanelElements * sizeof(Element);
    constexpr int kPanelK = TileK::kPanelElements * sizeof(Element);
    const OperandDescriptor q(smem_.q.data() + warpgroup_ * 64 * kPanelColumns, kPanelQ);
    const OperandDescriptor k(smem_.k.data() + k_place_.stage() * TileK::kSize, kPanelK);
    pin_registers<size(AccS{})>(acc_s.data());
    fence_products();
    CUTE_UNROLL
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int panel = step / 4;
      const int bytes = step % 4 * 32;
      Wgmma<Element, Traits::kBlockN>::template with_smem<Major::kK>(
          acc_s.data(), q + (panel * kPanelQ + bytes), k + (panel * kPanelK + bytes), step > 0);
    }
    commit_products();
  }

  // S is there, while `kYounger` groups of products may go on.
  template <int kYounger>
  ANYFLASH_DEVICE void land_scores(AccS& acc_s) {
    wait_products<kYounger>();
    pin_registers<size(AccS{})>(acc_s.data());
    release(smem_.k_ring.empty[k_place_.stage()]);
    k_place_.advance();
  }

  // `masked`: the tile has hidden keys.
  ANYFLASH_DEVICE void wait_values(bool masked) {
    const int stage = v_place_.stage();
    smem_.v_ring.full[stage].wait(v_place_.parity());
    if (masked) wait_guard(stage);
  }

  // O += P V is on its way, after wait_values().
  ANYFLASH_DEVICE void issue_values(AccO& acc_o, const Probabilities& p) {
    using TileV = typename Traits::TileV;
    constexpr int kPanelV = TileV::kPanelElements * sizeof(Element);
    const OperandDescriptor v(smem_.v.data() + v_place_.stage() * TileV::kSize, kPanelV);
    pin_registers<size(AccO{})>(acc_o.data());
    fence_products();
    CUTE_UNROLL
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      Wgmma<Element, Traits::kHeadDimV>::template with_registers<Major::kMN>(
          acc_o.data(), p.words + 4 * step, v + step * 16 * kPanelBytes, 1);
    }
    commit_products();
  }

  ANYFLASH_DEVICE void land_values(AccO& acc_o) {
    wait_products<0>();
    pin_registers<size(AccO{})>(acc_o.data());
    release(smem_.v_ring.empty[v_place_.stage()]);
    v_place_.advance();
  }

  // -inf over the scores that the mask removes.
  ANYFLASH_DEVICE void mask_scores(AccS& acc_s, const VisibleKeys& visible, int tile) {
    auto scores = as_matrix(acc_s);
    const int lane_col = tile * Traits::kBlockN + threadIdx.x % 4 * 2;
    CUTE_UNROLL
    for (int row = 0; row < kThreadRows; ++row) {
      const int first = visible.first[row] - lane_col;
      const int end = visible.end[row] - lane_col;
      CUTE_UNROLL
      for (int i = 0; i < Traits::kBlockN / 4; ++i) {
        const int col = i / 2 * 8 + i % 2;
        if (col < first || col >= end) scores(row, i) = -INFINITY;
      }
    }
  }

  // What has been computed from S stays before the next wait (mainloop.h).
  ANYFLASH_DEVICE void keep_before_wait(AccS& acc_s) { pin_registers<size(AccS{})>(acc_s.data()); }

  // Warpgroups issue their products in turns where the schedule is ping-pong.
  ANYFLASH_DEVICE void wait_ping_pong() {
    if (kPingPong) sync_named(ping_pong_barrier(warpgroup_), kPingPongThreads);
  }
  ANYFLASH_DEVICE void pass_ping_pong() {
    const int next = warpgroup_ + 1 < Traits::kConsumers ? warpgroup_ + 1 : 0;
    if (kPingPong) arrive_named(ping_pong_barrier(next), kPingPongThreads);
  }

  // After the last block, the first warpgroup takes what the last one passed: no barrier is left in
  // the middle of a phase.
  ANYFLASH_DEVICE void end_ping_pong() {
    if (warpgroup_ == 0) wait_ping_pong();
  }

  // Whether the guard took NaN or infinity out of a tile of V since the last call.
  ANYFLASH_DEVICE bool take_found_nonfinite() {
    const bool found = found_nonfinite_;
    found_nonfinite_ = false;
    return found;
  }

 private:
  static constexpr int kPingPongThreads = 2 * kWarpgroupThreads;  // who passes and who takes it
  ANYFLASH_DEVICE static int ping_pong_barrier(int warpgroup) {
    return static_cast<int>(NamedBarrier::kPingPong) + warpgroup;
  }

  ANYFLASH_DEVICE void release(Mbarrier& empty) {
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  ANYFLASH_DEVICE void wait_guard(int stage) {
    smem_.v_guarded[stage].wait(guard_parities_ >> stage & 1);
    guard_parities_ ^= 1u << stage;
    CUTE_UNROLL
    for (int warp = 0; warp < Traits::kGuardWarps; ++warp) {
      found_nonfinite_ |= smem_.v_cleared[stage][warp] != 0;
    }
    __syncwarp();  // all lanes have read what lane 0 will release
  }

  typename Traits::SharedStorage& smem_;
  int warpgroup_;
  RingPlace<Traits::kStages> k_place_;
  RingPlace<Traits::kStages> v_place_;
  RingPlace<1> q_place_;
  uint32_t guard_parities_ = 0;  // a bit a stage: only masked tiles are guarded
  bool found_nonfinite_ = false;
};

}  // namespace anyflash::sm90
