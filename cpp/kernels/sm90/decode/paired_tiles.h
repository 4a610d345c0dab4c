// Latent attention with many rows, and a cache of q's dtype: two tiles of 64 keys are a pair. Each
// warpgroup makes the scores of one of them.
#pragma once

#include "common/macros.h"
#include "cuda/decode_work_tile.h"
#include "sm90/accumulator.h"
#include "sm90/cache_boxes.h"
#include "sm90/decode/loader.h"
#include "sm90/decode/queries.h"
#include "sm90/decode/shared_rows.h"
#include "sm90/decode/shared_rows_traits.h"
#include "sm90/pipeline.h"
#include "sm90/products.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// By the loader's warp. Parts come in the order in which warpgroups release them: each begins with
// its own tile. The last pair may lack its second tile, which then is zeros.
template <class Traits>
ANYFLASH_DEVICE void load_pairs(const DecodeLaunch& params, const DecodeWorkTile& block,
                                typename Traits::SharedStorage& smem) {
  using Keys = typename Traits::Keys;
  RingPlace<1> place;
  CacheBox boxes[2];
  const auto find_pair = [&](int first) {
    ANYFLASH_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      const int key = first + tile * Traits::kBlockN;
      boxes[tile] = CacheBox{-1, 0};
      if (key < block.keys.end)
        boxes[tile] = find_box(params, block.sequence, key, params.box_rows);
    }
  };
  const auto load = [&](auto panels, int tile, int part) {
    Ring<1>& ring = smem.of_tiles[tile][part];
    const int first_panel = part * Traits::kHalfPanels;
    ring.empty[0].wait(place.parity() ^ 1);
    load_boxes<decltype(panels)>(smem.tiles[tile] + first_panel * Keys::kPanelElements,
                                 params.k_map, block.head_k, boxes[tile], params.box_rows,
                                 ring.full[0], L2Hint::kEvictFirst, first_panel * kPanelColumns);
  };
  for (int key = block.keys.begin; key < block.keys.end; key += 2 * Traits::kBlockN) {
    find_pair(key);
    ANYFLASH_UNROLL
    for (int turn = 0; turn < 2; ++turn) {
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) load(typename Traits::HalfTile{}, half ^ turn, half);
    }
    ANYFLASH_UNROLL
    for (int tile = 0; tile < 2; ++tile) load(typename Traits::OtherTile{}, tile, Traits::kOthers);
    place.advance();
  }
}

template <class Traits>
class PairedTiles : SharedRows<Traits> {
  using Base = SharedRows<Traits>;
  using Base::block_;
  using Base::out_;
  using Base::smem_;
  using Base::warpgroup_;
  using typename Base::Operand;
  using typename Base::Rounded;
  using typename Base::Scores;

 public:
  ANYFLASH_DEVICE PairedTiles(const DecodeLaunch& params, typename Traits::SharedStorage& smem)
      : Base(params, smem) {}

  // Q, and what its rows see.
  ANYFLASH_DEVICE void load_queries() {
    sm90::load_queries<typename Traits::TileQ, Traits::kConsumerThreads>(this->params_, block_,
                                                                         smem_.q, /*first_row=*/0);
    this->wait_queries();
  }

  // All tiles. Leaves the result in shared memory.
  ANYFLASH_DEVICE void run() {
    bool found_nonfinite = false;
    for (int pair = block_.keys.begin; pair < block_.keys.end; pair += 2 * Traits::kBlockN) {
      const int first_key = pair + warpgroup_ * Traits::kBlockN;  // of this warpgroup's tile
      Scores scores;
      make_scores(scores);
      if (block_.hides(first_key, first_key + Traits::kBlockN)) {
        this->hide_keys(scores, first_key);
        if (first_key < block_.keys.end) {  // else it is zeros
          found_nonfinite |= this->clear_values(own_tile(), /*first_row=*/0, first_key);
        }
      }
      this->softmax(scores);
      Rounded p;
      p.round(scores);
      pass_probabilities(p);
      this->rescale_output();
      issue_own_values(p);
      wait_probabilities();
      other_values().full[0].wait(place_.parity());
      this->issue_values(other_tile());
      wgmma_wait<1>();
      release(own_values().empty[0]);
      wgmma_wait<0>();
      pin(out_);
      release(other_values().empty[0]);
      release(part(1 - warpgroup_, Traits::kOthers).empty[0]);  // P of the other tile
      place_.advance();
    }
    this->stage_result();
    this->restore_values(found_nonfinite);
  }

 private:
  ANYFLASH_DEVICE Operand* own_tile() const { return smem_.tiles[warpgroup_]; }
  ANYFLASH_DEVICE Operand* other_tile() const { return smem_.tiles[1 - warpgroup_]; }
  ANYFLASH_DEVICE Ring<1>& part(int tile, int number) const { return smem_.of_tiles[tile][number]; }
  // This warpgroup's columns of V.
  ANYFLASH_DEVICE Ring<1>& own_values() const { return part(warpgroup_, warpgroup_); }
  ANYFLASH_DEVICE Ring<1>& other_values() const { return part(1 - warpgroup_, warpgroup_); }
  // Where warpgroup `of` tells that its P is there.
  ANYFLASH_DEVICE static int probabilities_of(int of) {
    return static_cast<int>(NamedBarrier::kProbabilities) + of;
  }

  // S = Q K^T of this warpgroup's tile, in the order in which its parts come.
  ANYFLASH_DEVICE void make_scores(Scores& scores) {
    pin(scores);
    issue_part<Traits::kHalfPanels>(scores, warpgroup_, /*is_first=*/true);
    issue_part<Traits::kHalfPanels>(scores, 1 - warpgroup_);
    issue_part<Traits::kOtherPanels>(scores, Traits::kOthers);
    wgmma_wait<0>();
    pin(scores);
  }
  template <int kPanels>
  ANYFLASH_DEVICE void issue_part(Scores& scores, int number, bool is_first = false) {
    part(warpgroup_, number).full[0].wait(place_.parity());
    this->template issue_scores<kPanels * kPanelColumns>(scores, own_tile(),
                                                         number * Traits::kHalfPanels, is_first);
  }

  // P of this warpgroup's tile goes to the other one, in the place of those columns of K that V
  // lacks. All warps have done with these.
  ANYFLASH_DEVICE void pass_probabilities(const Rounded& p) {
    this->store_probabilities(this->probabilities(own_tile()), p, 0);
    arrive_named(probabilities_of(warpgroup_), Traits::kConsumerThreads);
  }
  ANYFLASH_DEVICE void wait_probabilities() const {
    sync_named(probabilities_of(1 - warpgroup_), Traits::kConsumerThreads);
  }

  // O += P V of this warpgroup's tile is on its way.
  ANYFLASH_DEVICE void issue_own_values(const Rounded& p) {
    issue_accumulation<typename Traits::Keys>(out_, p, this->values(own_tile()));
  }

  RingPlace<1> place_;
};

}  // namespace anyflash::sm90
