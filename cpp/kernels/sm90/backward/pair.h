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
template <class Traits>
ANYFLASH_DEVICE int block_of_cta() {
  return static_cast<int>(blockIdx.x) / Traits::kCtas;
}
template <class Traits>
ANYFLASH_DEVICE int cta_of_block() {
  return static_cast<int>(blockIdx.x) % Traits::kCtas;
}

// This CTA's columns of a gradient, of which it has kColumns.
template <class Traits, int kColumns, class Out>
ANYFLASH_DEVICE GradientTile<Out> columns_of_cta(const GradientTile<Out>& whole) {
  if constexpr (Traits::kCtas == 1) {
    return whole;
  } else {
    GradientTile<Out> tile = whole.from_column(cta_of_block<Traits>() * kColumns);
    tile.columns = max(0, min(tile.columns, kColumns));
    return tile;
  }
}

// By all threads of both CTAs: when the barriers have been initialised, and at the end, as neither
// CTA may end while the other one still sends or arrives.
template <class Traits>
ANYFLASH_DEVICE void meet_other_cta() {
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

// Of a place where a warpgroup of the other CTA sends Pieces, for the same threads of this one.
struct PeerBarriers {
  Mbarrier arrived;   // the bytes of a tile
  Mbarrier may_send;  // the other CTA's place is free; its warps arrive here

  ANYFLASH_DEVICE void init() {
    arrived.init(1);
    may_send.init(kWarpgroupThreads / 32);
  }
};

// Of the n-th tile. By a warpgroup, and the one like it in the other CTA.
template <class Traits, class Acc>
ANYFLASH_DEVICE void send_to_peer(const Acc& acc, Pieces<Acc>& pieces, PeerBarriers& barriers,
                                  uint32_t n) {
  const int peer = 1 - cta_of_block<Traits>();
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
    arrive_at_cta(barriers.may_send.state(), 1 - cta_of_block<Traits>());
  }
}

}  // namespace anyflash::sm90
