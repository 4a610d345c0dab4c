// Latent attention with many rows, and a cache of 8 bits: each tile of 64 keys becomes float16 in
// shared memory once, and each warpgroup makes the scores of half of its keys.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "cuda/cache_scales.h"
#include "cuda/decode_work_tile.h"
#include "sm90/accumulator.h"
#include "sm90/decode/loader.h"
#include "sm90/decode/products.h"
#include "sm90/decode/queries.h"
#include "sm90/decode/shared_rows.h"
#include "sm90/decode/shared_rows_traits.h"
#include "sm90/pipeline.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

template <class Traits>
class ConvertedTiles : SharedRows<Traits> {
  using Base = SharedRows<Traits>;
  using Base::block_;
  using Base::out_;
  using Base::params_;
  using Base::row;
  using Base::smem_;
  using Base::warpgroup_;
  using typename Base::Keys;
  using typename Base::Operand;
  using typename Base::Rounded;
  using typename Base::Scores;
  static constexpr int kColumns = Traits::kKeys / 4;  // of a row's scores, a thread's

 public:
  ANYFLASH_DEVICE ConvertedTiles(const DecodeLaunch& params, typename Traits::SharedStorage& smem)
      : Base(params, smem), of_head_(params, smem.block.head_k) {
    ANYFLASH_UNROLL
    for (float& unit : unit_) unit = of_head_.unit();
  }

  // Q, and what its rows see.
  ANYFLASH_DEVICE void load_queries() {
    HalfQueries<Traits, Traits::kConsumerThreads>(params_, block_, smem_, smem_.q, 0).load();
    this->wait_queries();
  }

  // All tiles. Leaves the result in shared memory.
  ANYFLASH_DEVICE void run() {
    bool found_nonfinite = false;
    for (int tile = block_.keys.begin; tile < block_.keys.end; tile += Traits::kBlockN) {
      const int first_key = tile + first_row();
      convert_keys();
      Scores scores;
      make_scores(scores);
      if (block_.hides(first_key, first_key + Traits::kKeys)) {
        this->hide_keys(scores, first_key);
        found_nonfinite |= this->clear_values(keys(), first_row(), first_key);
      }
      this->softmax(scores);
      scale_probabilities(scores);
      Rounded p;
      p.round(scores);
      this->store_probabilities(this->probabilities(keys()), p, warpgroup_ * kVectorsOfP);
      this->rescale_output();
      this->sync_all();  // P is there
      this->issue_values(keys());
      wgmma_wait<0>();
      pin(out_);
    }
    this->stage_result();
    if (threadIdx.x % 4 == 0 && warpgroup_ == 0) {
      ANYFLASH_UNROLL
      for (int i = 0; i < kThreadRows; ++i) smem_.scales.unit[row(i)] = unit_[i];
    }
    this->sync_all();  // units are there
    this->restore_values(found_nonfinite);
  }

 private:
  static constexpr int kVectorsOfP = Traits::kKeys / 8;

  // Of this warpgroup's keys, in the tile.
  ANYFLASH_DEVICE int first_row() const { return warpgroup_ * Traits::kKeys; }
  // The tile as float16, behind what was loaded.
  ANYFLASH_DEVICE Operand* keys() const {
    return reinterpret_cast<Operand*>(smem_.tiles[0] + Traits::TileK::kSize);
  }

  // This warpgroup's keys of the next tile; what was loaded is not needed any more then.
  ANYFLASH_DEVICE void convert_keys() {
    smem_.ring.full[0].wait(place_.parity());
    this->sync_all();  // all have done with the tile before
    with_stored_type(params_.cache_dtype, [&](auto type) { convert<decltype(type)::value>(); });
    load_key_scales();
    fence_smem_writes();
    __syncwarp();  // the lane that releases the buffer releases it for all
    release(smem_.ring.empty[0]);
    place_.advance();
    this->sync();  // all of this warpgroup's keys are there
  }
  template <DType kStored>
  ANYFLASH_DEVICE void convert() {
    constexpr int kVectors = Traits::kHeadDim / 16;  // of 16 bytes of a key
    for (int i = static_cast<int>(threadIdx.x) % kWarpgroupThreads; i < Traits::kKeys * kVectors;
         i += kWarpgroupThreads) {
      const int key = first_row() + i % Traits::kKeys;
      const int vector = i / Traits::kKeys;
      const auto stored = *reinterpret_cast<const uint4*>(
          piece_of<typename Traits::TileK>(smem_.tiles[0], key, vector));
      const uint32_t words[4] = {stored.x, stored.y, stored.z, stored.w};
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32_t low = words[2 * half];
        const uint32_t high = words[2 * half + 1];
        *reinterpret_cast<uint4*>(piece_of<Keys>(keys(), key, 2 * vector + half)) =
            uint4{dequantize_pair<kStored, 0, 1>(low), dequantize_pair<kStored, 2, 3>(low),
                  dequantize_pair<kStored, 0, 1>(high), dequantize_pair<kStored, 2, 3>(high)};
      }
    }
  }

  ANYFLASH_DEVICE bool scales_by_key() const { return of_head_.k_by_key || of_head_.v_by_key; }
  // Of this thread's columns.
  ANYFLASH_DEVICE void load_key_scales() {
    if (!scales_by_key()) return;
    ANYFLASH_UNROLL
    for (int x = 0; x < kColumns; ++x) {
      const int key = first_row() + thread_column() + x / 2 * 8 + x % 2;
      of_key_[x] = smem_.scales.k_scale[0][key];
      of_value_[x] = smem_.scales.v_scale[0][key];
    }
  }

  // S = Q K^T of this warpgroup's keys.
  ANYFLASH_DEVICE void make_scores(Scores& scores) {
    pin(scores);
    this->template issue_scores<Traits::kHeadDim>(scores, keys() + first_row() * kPanelColumns,
                                                  /*first_panel=*/0, /*is_first=*/true);
    wgmma_wait<0>();
    pin(scores);
    auto matrix = as_matrix(scores);
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const float factor = smem_.scales.q_factor[row(i)] * of_head_.k;
      ANYFLASH_UNROLL
      for (int x = 0; x < kColumns; ++x) {
        matrix(i, x) *= factor;
        if (scales_by_key()) matrix(i, x) *= of_key_[x];
      }
    }
  }

  // P becomes P * v_scale / unit, and O counts in such units: in each row, that of the largest
  // scale so far of keys that weigh anything in it (RowScales).
  ANYFLASH_DEVICE void scale_probabilities(Scores& probabilities) {
    if (of_head_.v_is_late) of_head_.scale_visible(probabilities);
    if (!of_head_.v_by_key) return;
    auto matrix = as_matrix(probabilities);
    auto out = as_matrix(out_);
    float largest[kThreadRows];
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      largest[i] = 0.0f;
      ANYFLASH_UNROLL
      for (int x = 0; x < kColumns; ++x) {
        largest[i] = fmaxf(largest[i], matrix(i, x) != 0.0f ? fabsf(of_value_[x]) : 0.0f);
      }
      largest[i] = quad_reduce(largest[i], larger);
      if (threadIdx.x % 4 == 0) smem_.scales.units_of_warps[warpgroup_][row(i)] = largest[i];
    }
    this->sync_all();  // both warpgroups' are there
    ANYFLASH_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      largest[i] = fmaxf(largest[i], smem_.scales.units_of_warps[1 - warpgroup_][row(i)]);
      const float unit = power_of_two(fmaxf(unit_[i], largest[i]));
      if (unit != unit_[i]) {
        const float rescale = unit_[i] / unit;
        ANYFLASH_UNROLL
        for (int x = 0; x < cute::size<1>(out); ++x) out(i, x) *= rescale;
        unit_[i] = unit;
      }
      const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
      ANYFLASH_UNROLL
      for (int x = 0; x < kColumns; ++x) {
        matrix(i, x) = matrix(i, x) == 0.0f ? 0.0f : matrix(i, x) * (of_value_[x] * inverse);
      }
    }
  }

  const CacheScales<Traits> of_head_;
  RingPlace<1> place_;
  float unit_[kThreadRows];   // in which O counts
  float of_key_[kColumns];    // scales of this thread's keys, where keys have their own
  float of_value_[kColumns];  // and of their values
};

}  // namespace anyflash::sm90
