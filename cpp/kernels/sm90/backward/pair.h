// A pair of CTAs (a cluster) shares a block where registers and shared memory of one do not hold
// all columns. Each has half of the columns of Q, K, V and dO, and makes the same half of
// gradients.
//
// S and dP are sums over all columns. So each CTA sends what it has to the other one's shared
// memory, and adds what comes from there: both have the same bits.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Traits::kCtas is 2, or 1 if a CTA has all columns; kHeadDim and kHeadDimV are those of a CTA.
// Which block of work the CTA has, alone or with its neighbour; and which half of the columns.
template <class Traits>
ANYFLASH_DEVICE int work_block() {
  return static_cast<int>(blockIdx.x) / Traits::kCtas;
}
template <class Traits>
ANYFLASH_DEVICE int rank_in_pair() {
  return static_cast<int>(blockIdx.x) % Traits::kCtas;
}

// This CTA's columns of a gradient, of which it has kColumns.
template <class Traits, int kColumns, class Out>
ANYFLASH_DEVICE GradientTile<Out> columns_of_cta(const GradientTile<Out>& whole) {
  if constexpr (Traits::kCtas == 1) {
    return whole;
  } else {
    GradientTile<Out> tile = whole.from_column(rank_in_pair<Traits>() * kColumns);
    tile.columns = max(0, min(tile.columns, kColumns));
    return tile;
  }
}

// By all threads of both CTAs, when their barriers have been initialised.
template <class Traits>
ANYFLASH_DEVICE void meet_peer() {
  if constexpr (Traits::kCtas > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// A warpgroup's accumulators, each thread's in pieces of four.
template <class Acc>
inline constexpr int kPieces = decltype(cute::size(Acc{}))::value / 4;
template <class Acc>
using Pieces = float4[kPieces<Acc>][kWarpgroupThreads];

// Of an exchange of Pieces between two warpgroups, one of each CTA. Both have them in the same
// place of their shared memory.
struct PeerBarriers {
  Mbarrier arrived;   // in this CTA's place, a tile's bytes
  Mbarrier may_send;  // the other CTA's place is free: its warps arrive here

  ANYFLASH_DEVICE void init() {
    arrived.init(1);
    may_send.init(kWarpgroupThreads / 32);
  }
};

// The other CTA gets them where `pieces` lies there. `n` tiles were exchanged before this one.
template <class Traits, class Acc>
ANYFLASH_DEVICE void send_to_peer(const Acc& acc, Pieces<Acc>& pieces, PeerBarriers& barriers,
                                  uint32_t n) {
  const int peer = 1 - rank_in_pair<Traits>();
  const int thread = threadIdx.x % kWarpgroupThreads;
  barriers.may_send.wait(n % 2 ^ 1);
  CUTE_UNROLL
  for (int i = 0; i < kPieces<Acc>; ++i) {
    const float4 piece{acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3)};
    send_to_cta(&pieces[i][thread].x, piece, peer, barriers.arrived.state());
  }
}
template <class Acc>
ANYFLASH_DEVICE void add_from_peer(Acc& acc, const Pieces<Acc>& pieces, PeerBarriers& barriers,
                                   uint32_t n) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (thread == 0) barriers.arrived.arrive_expect(sizeof(pieces));
  barriers.arrived.wait(n % 2);
  CUTE_UNROLL
  for (int i = 0; i < kPieces<Acc>; ++i) {
    const float4 piece = pieces[i][thread];
    acc(4 * i) += piece.x;
    acc(4 * i + 1) += piece.y;
    acc(4 * i + 2) += piece.z;
    acc(4 * i + 3) += piece.w;
  }
}
// By each warp of a warpgroup that has read all of a tile's pieces.
template <class Traits>
ANYFLASH_DEVICE void let_peer_send(const PeerBarriers& barriers) {
  __syncwarp();  // all lanes have theirs
  if (threadIdx.x % 32 == 0) {
    arrive_at_cta(barriers.may_send.state(), 1 - rank_in_pair<Traits>());
  }
}

// After `n` tiles. What the other CTA sends has been waited for; now so are its last arrivals. No
// CTA may end before.
ANYFLASH_DEVICE void finish_exchange(PeerBarriers& barriers, uint32_t n) {
  barriers.may_send.wait(n % 2 ^ 1);
}

}  // namespace anyflash::sm90
