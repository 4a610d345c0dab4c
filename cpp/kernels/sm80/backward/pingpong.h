// Two groups of warps of the backward's main kernel take its tiles of rows alternately.
#pragma once

#include "common/macros.h"
#include "sm80/named_barrier.h"

namespace anyflash::sm80 {

// Warps in lockstep all multiply, make probabilities or add to dQ at the same time, and wait for
// the same units. So the tiles go to two groups alternately. Of its own tile h a group makes
// scores, P, dS and dQ. dK and dV need all tiles: each group owns half of the keys. It adds the
// products of the other group's tile h - 1, then those of its own. Its scores begin when those of
// tile h - 1 are done, so that the groups are half a round apart:
//
//   group 0   scores 0 | dK dV 0  | dQ 0         | scores 2 | dK dV 1, 2 | dQ 2 ...
//   group 1            | scores 1 | dK dV 0, 1   | dQ 1     | scores 3   | dK dV 2, 3 ...
//
// Q and dO of tile h lie in buffer h mod 3; P and dS where those of tile h - 2 were.
template <bool kPingPong>
struct PingPongBarriers {
  Mbarrier scores[2];  // of each group's tile: its P and dS are in shared memory
  Mbarrier used[2];    // of each group's tile: both groups have added its products to dK and dV

  // By one thread; then __syncthreads().
  ANYFLASH_DEVICE void init(int group_threads, int threads) {
    for (int group = 0; group < 2; ++group) {
      scores[group].init(group_threads);
      used[group].init(threads);
    }
  }
};
template <>
struct PingPongBarriers<false> {
  ANYFLASH_DEVICE void init(int, int) {}
};

template <class Traits, class Tiles>
class PingPong {
 public:
  // Leaves `tiles` at the group's first one.
  ANYFLASH_DEVICE PingPong(PingPongBarriers<true>& barriers, Tiles& tiles)
      : barriers_(barriers),
        group_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / Traits::kRowThreads, 0)),
        buffer_(group_) {
    if (group_ == 1) pass(tiles);
  }

  ANYFLASH_DEVICE int group() const { return group_; }
  // The buffer of the group's tile, and that of the tile before, which the group's next tile takes.
  ANYFLASH_DEVICE int buffer() const { return buffer_; }
  ANYFLASH_DEVICE int other_buffer() const { return buffer_ == 0 ? 2 : buffer_ - 1; }
  // Whether the peer group has a tile before this one, and whether this group's keys see it.
  ANYFLASH_DEVICE bool has_peer() const { return peer_ != kNone; }
  ANYFLASH_DEVICE bool sees_peer() const { return peer_ == kSeen; }

  // Begins the group's tile. All threads of the group have loaded it, and have read dS of the
  // group's last one; P and dS of the tile before are in shared memory.
  ANYFLASH_DEVICE void begin() {
    named_barrier_sync(group_, Traits::kRowThreads);
    if (has_peer()) await_peer_scores();
  }
  // The peer's P and dS are there.
  ANYFLASH_DEVICE void await_peer_scores() { barriers_.scores[1 - group_].wait(peer_parity()); }
  // Of ScoreStage: P of the group's last tile has been used.
  ANYFLASH_DEVICE void before_p() const { barriers_.used[group_].wait(parity_ ^ 1); }
  ANYFLASH_DEVICE void before_dp() const {}
  ANYFLASH_DEVICE void after_dp() const {}
  ANYFLASH_DEVICE void end_scores() { barriers_.scores[group_].arrive(); }
  ANYFLASH_DEVICE void await_scores() { barriers_.scores[group_].wait(parity_); }
  // The peer's P and dS have been added to this group's dK and dV.
  ANYFLASH_DEVICE void release_peer() { barriers_.used[1 - group_].arrive(); }
  // Ends the group's tile except for its dQ. Goes on to its next tile, whose buffer is free then.
  ANYFLASH_DEVICE void end(Tiles& tiles) {
    barriers_.used[group_].arrive();
    const bool shared = has_peer();
    tiles.advance();
    pass(tiles);
    if (tiles.valid() && shared) barriers_.used[1 - group_].wait(peer_parity());
    buffer_ = other_buffer();
    parity_ ^= 1;
  }

 private:
  static constexpr int kNone = 0;
  static constexpr int kSeen = 1;
  static constexpr int kUnseen = 2;  // on the diagonal: the keys of DiagonalTop are group 0's

  ANYFLASH_DEVICE void pass(Tiles& tiles) {
    peer_ = !tiles.valid() ? kNone : tiles.on_diagonal() && group_ == 1 ? kUnseen : kSeen;
    tiles.advance();
  }
  ANYFLASH_DEVICE int peer_parity() const { return parity_ ^ group_ ^ 1; }

  PingPongBarriers<true>& barriers_;
  int group_;
  int buffer_;
  int parity_ = 0;  // of the phases of the group's tile
  int peer_ = kNone;
};

}  // namespace anyflash::sm80
