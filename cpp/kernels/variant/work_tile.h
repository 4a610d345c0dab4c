// Where a CTA works.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "variant/key_range_bounds.h"
#include "variant/key_ranges.h"
#include "variant/sequence.h"

namespace anyflash {

// Of the forward.
struct ForwardWorkTile {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head;
  int head_k;
  int first_row;
};

// Of the backward's main kernel.
struct BackwardWorkTile {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head_k;
  int gqa_split;  // of the query heads that share head_k
  int first_key;
  KeyRangeBounds ranges;  // of the keys
};

// For kernels of a variant that knows key ranges.
template <class Variant, int kBlockN>
ANYFLASH_DEVICE void find_key_ranges(const Attention& p, BackwardWorkTile& block) {
  if constexpr ((Variant::kFeatures & kKeyRanges) != 0) {
    const KeyTileBounds tiles(p, block.sequence, block.batch, block.head_k);
    block.ranges = tiles.of(block.first_key, kBlockN);
  }
}
// What the rows from `row` on see of its keys, masks by position apart.
ANYFLASH_DEVICE Visibility see(const Attention& p, const BackwardWorkTile& block, int row,
                               int rows) {
  const KeyRanges ranges(p, block.sequence, block.batch, block.head_k);
  return block.ranges.seen_by(ranges.places_of(row, rows));
}

// Element (row, head, 0) of one sequence in a tensor with q's rows.
template <class T, class Void>
ANYFLASH_DEVICE T* first_of(Void* data, const Strides& stride, const Sequence& sequence, int head,
                            int64_t row = 0) {
  return static_cast<T*>(data) + sequence.batch * stride.batch + head * stride.head +
         (sequence.first_q + row) * stride.row;
}

}  // namespace anyflash
