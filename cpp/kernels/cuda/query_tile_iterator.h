// Which tiles of query rows a CTA of the backward's main kernel visits, and in which order.
#pragma once

#include "common/macros.h"
#include "variant/backward_scratch.h"
#include "variant/block_mask.h"
#include "variant/key_range_bounds.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash {

// The query heads of a CTA's part of a group.
struct HeadRange {
  int begin;
  int end;
};
ANYFLASH_DEVICE HeadRange query_heads(const BackwardScratch& params,
                                      const BackwardWorkTile& block) {
  const int larger = params.larger_splits;
  const int group = params.split_heads * params.gqa_splits + larger;
  const int begin =
      block.head_k * group + block.gqa_split * params.split_heads + min(block.gqa_split, larger);
  return {begin, begin + params.split_heads + (block.gqa_split < larger ? 1 : 0)};
}

// The tiles that a CTA visits, head by head. In each head a few tiles need a mask.
template <class Traits, class Variant>
class QueryTileIterator {
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  ANYFLASH_DEVICE QueryTileIterator(const BackwardScratch& params, const BackwardWorkTile& block,
                                    const Mask& mask)
      : params_(params),
        block_(block),
        range_(mask.m_range(block.first_key, kBlockN, kBlockM)),
        m_(range_.begin) {
    const int last_top_row = m_ * kBlockM + Traits::kTopRows - 1;
    begins_on_diagonal_ = mask.end_key(last_top_row) <= block.first_key + Traits::kTopKeys;
    const HeadRange heads = query_heads(params, block);
    head_ = heads.begin;
    end_head_ = range_.begin < range_.end ? heads.end : heads.begin;
    skip_hidden();
  }

  // From now on a tile with rows that do not exist needs a mask.
  ANYFLASH_DEVICE void mask_rows_beyond(int seqlen_q) {
    if (range_.end * kBlockM > seqlen_q && range_.unmasked_begin < range_.unmasked_end) {
      range_.unmasked_end = min(range_.unmasked_end, range_.end - 1);
    }
  }

  ANYFLASH_DEVICE bool valid() const { return head_ < end_head_; }
  ANYFLASH_DEVICE bool needs_mask() const {
    return range_.needs_mask(m_) ||
           Variant::template needs_masked_loop<kBlockM, kBlockN>(params_, block_, head_, row());
  }
  // Whether only DiagonalTop and DiagonalBottom of the tile are seen.
  ANYFLASH_DEVICE bool on_diagonal() const { return begins_on_diagonal_ && m_ == range_.begin; }
  // What the tile's rows see of the block's keys, masks by position apart.
  ANYFLASH_DEVICE Visibility see() const {
    if constexpr ((Variant::kFeatures & kKeyRanges) == 0) {
      return {true, true};
    } else {
      return anyflash::see(params_.attention, block_, row(), kBlockM);
    }
  }
  ANYFLASH_DEVICE int head() const { return head_; }
  ANYFLASH_DEVICE int row() const { return m_ * kBlockM; }
  ANYFLASH_DEVICE void advance() {
    step();
    skip_hidden();
  }

 private:
  ANYFLASH_DEVICE void step() {
    if (++m_ < range_.end) return;
    m_ = range_.begin;
    ++head_;
  }
  ANYFLASH_DEVICE void skip_hidden() {
    if constexpr ((Variant::kFeatures & (kBlockMask | kKeyRanges)) != 0) {
      while (valid() && (!keeps_block() || !see().any)) {
        step();
      }
    }
  }
  // Tiles divide blocks.
  ANYFLASH_DEVICE bool keeps_block() const {
    return (Variant::kFeatures & kBlockMask) == 0 ||
           BlockMask(params_.attention, block_.batch, head_).keep(row(), block_.first_key);
  }

  const BackwardScratch& params_;
  const BackwardWorkTile& block_;
  MRange range_;
  int m_;
  int head_;
  int end_head_;
  bool begins_on_diagonal_;
};

}  // namespace anyflash
