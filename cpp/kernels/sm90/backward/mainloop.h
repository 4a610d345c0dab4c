// The consumers' loop over the tiles of query rows that see a block of keys.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/backward/stages.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// One tile of rows: acc_dk += dS^T Q and acc_dv += P^T dO, without the scale of dS. With kAddsToDq,
// dS K of the tile before is added to dq_accum: by then the other warpgroup's dS is there.
//
//   tensor cores   S | dP | dV         | dQ of the tile before | dK
//   registers           P  dS   to smem                          dQ to dq_accum
//
// A plain step (BackwardStages::is_plain) is straight code, in which P's exponentials and dS mix.
// No product is under way from one tile to the next: nvcc 13.0's ptxas would then wait for each.
template <bool kAddsToDq, bool kIsPlain, class Traits>
ANYFLASH_DEVICE void backward_step(BackwardStages<Traits>& stages, typename Traits::AccK& acc_dk,
                                   typename Traits::AccV& acc_dv) {
  using Stages = BackwardStages<Traits>;
  constexpr bool kDrawsFirst = Traits::kBlockM > 64;  // the products have the registers
  // Each tile has its own, as ptxas sees it: a group's first product reads its accumulators, so
  // from before the loop these would stay alive to its end, beside what they were rounded to.
  typename Traits::AccS acc_s;   // S^T, then P^T
  typename Traits::AccS acc_dp;  // dP^T, then dS^T, then dQ
  std::conditional_t<kIsPlain, typename Stages::PlainRowNumbers, typename Stages::RowNumbers>
      numbers;
  typename Stages::Rounded p;
  typename Stages::Rounded ds;
  if (kDrawsFirst) stages.draw();
  if (kAddsToDq) stages.wait_ping_pong();
  stages.template issue_scores<!kIsPlain>(acc_s);
  if (kIsPlain) stages.load_lse(numbers);
  stages.template issue_dp<!kIsPlain>(acc_dp);
  const bool clears_rows = !kIsPlain && stages.look_at_rows();
  if (kAddsToDq && !kIsPlain) stages.look_at_keys();
  if (!kIsPlain) stages.load_lse(numbers);
  if (!kDrawsFirst) stages.draw();
  wgmma_wait<1>();
  pin(acc_s);
  if (kAddsToDq && Traits::kPingPong) stages.pass_ping_pong();
  stages.template compute_p<kIsPlain>(acc_s, numbers, p);
  if (kAddsToDq && !Traits::kPingPong) stages.pass_ping_pong();
  stages.load_delta(numbers);
  wgmma_wait<0>();
  pin(acc_dp);
  if (clears_rows) stages.clear_rows();
  stages.template compute_ds<!kIsPlain>(acc_dp, acc_s, numbers);
  ds.round(acc_dp);
  stages.round_p(acc_s, p);
  if constexpr (kAddsToDq) stages.store_ds(ds);
  stages.issue_dv(acc_dv, p);
  if constexpr (kAddsToDq) stages.pass_ds();
  if (kAddsToDq && (kIsPlain || !stages.is_first())) {
    stages.wait_ds();
    stages.clear_keys();
    stages.issue_dq(acc_dp);
    stages.issue_dk(acc_dk, ds);
    wgmma_wait<1>();
    pin(acc_dp);
    stages.add_dq(acc_dp);
  } else {
    stages.issue_dk(acc_dk, ds);
  }
  stages.look_ahead();
  wgmma_wait<0>();
  pin(acc_dv);
  pin(acc_dk);
  stages.next_rows();
}

// All tiles of rows that see the CTA's keys. With kAddsToDq, add_last_dq() does what is left of dQ.
template <class Traits, bool kAddsToDq>
ANYFLASH_DEVICE void backward_mainloop(BackwardStages<Traits>& stages,
                                       typename Traits::AccK& acc_dk,
                                       typename Traits::AccV& acc_dv) {
  stages.load_values();
  if (kAddsToDq) stages.begin_ping_pong();
  stages.wait_first_rows();
  if (stages.wait_rows() && stages.sees_nothing()) stages.template pass_zeros<kAddsToDq>();
  while (stages.wait_rows()) {
    if constexpr (Traits::kHasPlainSteps) {
      if (stages.is_plain()) {
        backward_step<kAddsToDq, true>(stages, acc_dk, acc_dv);
        continue;
      }
    }
    backward_step<kAddsToDq, false>(stages, acc_dk, acc_dv);
  }
  if (kAddsToDq) stages.end_ping_pong();
}

// What is left of dQ after the last tile.
template <class Traits>
ANYFLASH_DEVICE void add_last_dq(BackwardStages<Traits>& stages) {
  if (stages.is_first()) return;  // there was no tile
  typename Traits::AccS acc_dq;
  stages.wait_ds();
  stages.clear_keys();
  stages.issue_dq(acc_dq);
  wgmma_wait<0>();
  pin(acc_dq);
  stages.add_dq(acc_dq);
}

}  // namespace anyflash::sm90
