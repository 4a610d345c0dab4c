// The warp that has TMA bring K and V from a cache.
#pragma once

#include <cuda.h>

#include "common/macros.h"
#include "cuda/decode_work_tile.h"
#include "sm90/cache_boxes.h"
#include "sm90/decode/scales.h"
#include "sm90/pipeline.h"

namespace anyflash::sm90 {

// What a launch is told beside DecodeParams.
struct DecodeLaunch : DecodeParams {
  CUtensorMap k_map;
  CUtensorMap v_map;
  int box_rows = 0;  // of both maps: they divide a page and a tile
};

// Buffers are filled in turn: K and V of a tile, K and V of the next. Latent attention has K alone.
template <class Traits>
ANYFLASH_DEVICE void load_keys_and_values(const DecodeLaunch& params, const DecodeWorkTile& block,
                                          typename Traits::SharedStorage& smem) {
  RingPlace<Traits::kBuffers> place;
  const auto wait_for_buffer = [&] { smem.ring.empty[place.stage()].wait(place.parity() ^ 1); };
  const auto load = [&](auto tile, const CUtensorMap& map, CacheBox box) {
    const int stage = place.stage();
    load_boxes<decltype(tile)>(smem.tiles[stage], map, block.head_k, box, params.box_rows,
                               smem.ring.full[stage], L2Hint::kEvictFirst);  // read once
    place.advance();
  };
  const auto find = [&](int key) {
    if (key >= block.keys.end) return CacheBox{-1, 0};
    return find_box(params, block.sequence, key, params.box_rows);
  };
  CacheBox box = find(block.keys.begin);
  KeyScaleLoader<Traits> scales(params, block);
  for (int key = block.keys.begin; key < block.keys.end; key += Traits::kBlockN) {
    const CacheBox next = find(key + Traits::kBlockN);  // the table answers while buffers get free
    wait_for_buffer();
    scales.store(smem, place.stage());
    load(typename Traits::TileK{}, params.k_map, box);
    if constexpr (!Traits::kLatent) {
      wait_for_buffer();
      load(typename Traits::TileV{}, params.v_map, box);
    }
    scales.ask(key + Traits::kBlockN);
    box = next;
  }
}

}  // namespace anyflash::sm90
