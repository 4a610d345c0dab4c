// Scales of a cache of 8 bits: where they come from, and what they do in a decoding warpgroup.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/macros.h"
#include "cuda/cache_scales.h"
#include "cuda/decode_work_tile.h"
#include "params.h"
#include "sm90/accumulator.h"
#include "sm90/decode/transposed.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"

namespace anyflash::sm90 {

// By the loader's warp: scales of single keys. They come with the tile of K. In a cache of q's
// dtype there are none.
//
// The table and the scales each take as long as memory does. So scales are asked for a tile ahead,
// and the table two: nothing that has just been asked for is looked at.
template <class Traits>
class KeyScaleLoader {
  static constexpr int kKeys = Traits::kBlockN / 32;  // of a lane

 public:
  ANYFLASH_DEVICE KeyScaleLoader(const KvCacheParams& params, const DecodeWorkTile& block)
      : params_(params), block_(block), of_head_(params, block.head_k) {
    if (!exist()) return;
    ask_table(block.keys.begin);
    ask(block.keys.begin);
  }

  // Asks for the scales of the tile that begins with key `first`: the next one.
  ANYFLASH_DEVICE void ask(int first) {
    if (!exist()) return;
    ANYFLASH_UNROLL
    for (int i = 0; i < kKeys; ++i) {
      const CacheSlot place = place_of_key(first + key_of_lane(i), entries_[i]);
      k_[i] = of_head_.k_by_key ? scale_at(params_.k_scale, place) : 1.0f;
      v_[i] = of_head_.v_by_key ? scale_at(params_.v_scale, place) : 1.0f;
    }
    ask_table(first + Traits::kBlockN);
  }

  // Writes what ask() got for a tile of K, before the buffer is said to be full.
  ANYFLASH_DEVICE void store(typename Traits::SharedStorage& smem, int stage) const {
    if constexpr (Traits::k8Bit) {
      if (!exist()) return;
      ANYFLASH_UNROLL
      for (int i = 0; i < kKeys; ++i) {
        smem.scales.k_scale[stage][key_of_lane(i)] = k_[i];
        smem.scales.v_scale[stage][key_of_lane(i)] = v_[i];
      }
      __syncwarp();  // the lane that says that the buffer is full says it of all scales
    }
  }

 private:
  ANYFLASH_DEVICE bool exist() const { return of_head_.k_by_key || of_head_.v_by_key; }
  static ANYFLASH_DEVICE int key_of_lane(int i) {
    return static_cast<int>(threadIdx.x) % 32 + 32 * i;
  }
  ANYFLASH_DEVICE void ask_table(int first) {
    ANYFLASH_UNROLL
    for (int i = 0; i < kKeys; ++i) {
      const int key = first + key_of_lane(i);
      if (key < block_.keys.end) entries_[i] = table_entry(params_, block_.sequence, key);
    }
  }
  ANYFLASH_DEVICE CacheSlot place_of_key(int key, int entry) const {
    if (key >= block_.keys.end) return {-1, 0};
    return place_of_entry(params_, block_.sequence, key, entry);
  }
  ANYFLASH_DEVICE float scale_at(const BroadcastTensor& scale, const CacheSlot& place) const {
    if (place.slot < 0) return 0.0f;
    return static_cast<const float*>(scale.data)[scale_index(scale, place, block_.head_k)];
  }

  const KvCacheParams& params_;
  const DecodeWorkTile& block_;
  const CacheScales<Traits> of_head_;
  int entries_[kKeys];  // of the table, for the next tile to be asked for
  float k_[kKeys];
  float v_[kKeys];
};

// By a warpgroup: scales of this thread's rows, from `first_row` of the tile on.
template <class Traits>
class RowScales {
  using Scores = typename Traits::Scores;
  using Smem = typename Traits::Scales;
  static constexpr int kColumns = Traits::kThreadColumns;
  static constexpr int kWarps = 4;

 public:
  ANYFLASH_DEVICE RowScales(const KvCacheParams& params, int head_k, Smem& smem, int first_row)
      : of_head_(params, head_k), smem_(smem), first_row_(first_row) {
    ANYFLASH_UNROLL
    for (float& unit : unit_) unit = of_head_.unit();
  }

  // Of a tile of K, and of a tile of V that comes with it.
  ANYFLASH_DEVICE void scale_scores(Scores& scores, int stage) {
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const float factor = smem_.q_factor[row(c)] * of_head_.k;
      element(scores, c, 0) *= factor;
      element(scores, c, 1) *= factor;
    }
    if (!of_head_.k_by_key && !of_head_.v_by_key) return;
    ANYFLASH_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = warp_row() % Traits::kBlockN + lane_row() + 8 * half;
      of_value_[half] = smem_.v_scale[stage][key];
      const float of_key = smem_.k_scale[stage][key];
      ANYFLASH_UNROLL
      for (int c = 0; c < kColumns; ++c) element(scores, c, half) *= of_key;
    }
    __syncwarp();  // the lane that releases the buffer releases it for all
  }

  // P becomes P * v_scale / unit, and O counts in such units: in each row, that of the largest
  // scale so far of keys that weigh anything in it. So small scales do not take P to where float16
  // is coarse. A hidden key's scale may be anything, also NaN.
  template <class Out, class Sync>
  ANYFLASH_DEVICE void scale_probabilities(Scores& probabilities, Out& out, const Sync& sync) {
    if (of_head_.v_is_late) of_head_.scale_visible(probabilities);
    if (!of_head_.v_by_key) return;
    const int warp = static_cast<int>(threadIdx.x) / 32 % kWarps;
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float largest = 0.0f;
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        const bool weighs = element(probabilities, c, half) != 0.0f;
        largest = fmaxf(largest, weighs ? fabsf(of_value_[half]) : 0.0f);
      }
      largest = over_lanes(largest, larger);
      if (lane_row() == 0) smem_.units_of_warps[warp][row(c)] = largest;
    }
    sync();  // every warp's are there
    ANYFLASH_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      float largest = unit_[c];
      ANYFLASH_UNROLL
      for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, smem_.units_of_warps[i][row(c)]);
      move_unit(c, power_of_two(largest), out);
      const float inverse = unit_[c] > 0.0f ? 1.0f / unit_[c] : 0.0f;
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& p = element(probabilities, c, half);
        p = p == 0.0f ? 0.0f : p * (of_value_[half] * inverse);
      }
    }
  }

  // What the c-th column of O counts in.
  ANYFLASH_DEVICE float unit(int c) const { return unit_[c]; }

 private:
  // Of the tile.
  ANYFLASH_DEVICE int row(int c) const { return first_row_ + query_of_column(c); }

  template <class Out>
  ANYFLASH_DEVICE void move_unit(int c, float unit, Out& out) {
    if (unit == unit_[c]) return;
    const float rescale = unit_[c] / unit;
    ANYFLASH_UNROLL
    for (auto& block : out) {
      element(block, c, 0) *= rescale;
      element(block, c, 1) *= rescale;
    }
    unit_[c] = unit;
  }

  const CacheScales<Traits> of_head_;
  Smem& smem_;
  const int first_row_;
  float unit_[kColumns];
  float of_value_[2];  // of this thread's keys of the tile
};

// Of a cache of q's dtype there are none.
struct NoRowScales {
  template <class... Any>
  ANYFLASH_DEVICE explicit NoRowScales(const Any&...) {}
};

}  // namespace anyflash::sm90
