// Which tiles of query rows a block of keys visits, where a variant leaves tiles out, as the warp
// finds that loads them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "variant/backward_scratch.h"
#include "variant/mask.h"
#include "variant/visibility.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// As QueryTileIterator, by all lanes of a warp. Each asks about a tile of its own: then a hidden
// tile costs next to nothing.
template <class Traits, class Variant>
class VisitedRows {
 public:
  ANYFLASH_DEVICE VisitedRows(const BackwardScratch& params, const BackwardWorkTile& block,
                              const Mask& mask)
      : params_(params),
        block_(block),
        range_(mask.m_range(block.first_key, Traits::kBlockN, Traits::kBlockM)),
        heads_(query_heads(params, block)),
        asked_(range_.begin) {
    look_ahead();
  }

  ANYFLASH_DEVICE bool valid() const { return left_ != 0; }
  ANYFLASH_DEVICE int head() const { return heads_.begin; }
  ANYFLASH_DEVICE int row() const { return (asked_ - 32 + lane_of_tile()) * Traits::kBlockM; }
  ANYFLASH_DEVICE bool needs_mask() const { return (masked_ >> lane_of_tile() & 1) != 0; }
  ANYFLASH_DEVICE void advance() {
    left_ &= left_ - 1;
    look_ahead();
  }

 private:
  ANYFLASH_DEVICE int lane_of_tile() const { return __ffs(static_cast<int>(left_)) - 1; }

  // Until some tile is left, or there are no more.
  ANYFLASH_DEVICE void look_ahead() {
    if (range_.begin >= range_.end) return;
    while (left_ == 0 && heads_.begin < heads_.end) {
      if (asked_ >= range_.end) {
        asked_ = range_.begin;
        ++heads_.begin;
        continue;
      }
      ask();
    }
  }
  ANYFLASH_DEVICE void ask() {
    const int m = asked_ + static_cast<int>(threadIdx.x) % 32;
    Visibility seen{false, false};
    if (m < range_.end) {
      seen = Variant::template see<Traits::kBlockM, Traits::kBlockN>(params_, block_, head(),
                                                                     m * Traits::kBlockM);
    }
    left_ = __ballot_sync(0xffffffffu, seen.any);
    masked_ = __ballot_sync(0xffffffffu, !seen.all || range_.needs_mask(m));
    asked_ += 32;
  }

  const BackwardScratch& params_;
  const BackwardWorkTile& block_;
  MRange range_;
  HeadRange heads_;      // from the one that is asked about
  int asked_;            // the first of its tiles that have not been asked about
  uint32_t left_ = 0;    // a bit for each lane whose tile is visited and has not been yet
  uint32_t masked_ = 0;  // and for each whose tile needs a mask
};

}  // namespace anyflash::sm90
