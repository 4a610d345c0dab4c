// What a CTA of the sm_80 decoding kernels is told beside cuda/decode_work_tile.h.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/decode_work_tile.h"
#include "params.h"

namespace anyflash::sm80 {

// What a launch is told beside DecodeParams.
struct DecodeLaunch : DecodeParams {
  bool cache_has_vectors = false;  // rows can be copied in pieces of 16 bytes
  unsigned page_count = 0;         // the table's entries are below it
  unsigned page_mask = 0;          // of a row in its page
};

// With row 0 of the head of K and of V; in an unpaged cache, of the sequence's place. In shared
// memory, since the loop has no registers for these.
struct CachedWorkTile : DecodeWorkTile {
  const void* k;
  const void* v;
};

ANYFLASH_DEVICE const void* head_of_cache(const KvCacheParams& p, const DecodeWorkTile& block,
                                          const void* data, const Strides& stride) {
  const int64_t slot =
      p.block_table == nullptr && block.sequence.slot >= 0 ? block.sequence.slot : 0;
  const int64_t bytes = is_quantized(p.cache_dtype) ? 1 : 2;
  return static_cast<const char*>(data) +
         (slot * stride.batch + block.head_k * stride.head) * bytes;
}

template <int kBlockM, int kBlockN>
ANYFLASH_DEVICE CachedWorkTile cached_block(const DecodeParams& p, int index) {
  CachedWorkTile block;
  static_cast<DecodeWorkTile&>(block) = decode_block<kBlockM, kBlockN>(p, index);
  if (block.rows <= 0) return block;
  block.k = head_of_cache(p, block, p.attention.k, p.attention.k_stride);
  block.v = head_of_cache(p, block, p.attention.v, p.attention.v_stride);
  return block;
}

}  // namespace anyflash::sm80
