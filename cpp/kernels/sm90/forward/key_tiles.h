// Which tiles of keys a block of query rows visits. By position alone, everyone can tell from the
// block's range. Where a variant leaves tiles out, a warp finds those that are left
// (tile_lists.h), and the loader describes each to consumers when it loads its keys.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/forward/blocks.h"
#include "sm90/visited_tiles.h"
#include "variant/mask.h"

namespace anyflash::sm90 {

ANYFLASH_DEVICE KRange uniform(const KRange& range) {
  return KRange{uniform(range.begin), uniform(range.unmasked_begin), uniform(range.unmasked_end),
                uniform(range.end)};
}

// A consumer's: where it is in the order of tiles, which ends with those that need no mask. kMasked
// says whether the tile may be one that does.
template <class Traits, class Variant, bool kSkips = Variant::kSkipsTiles>
class TileCursor {
 public:
  static constexpr bool kIsMixed = false;  // tiles with a mask may come after others

  template <class Stages>
  ANYFLASH_DEVICE TileCursor(Stages&, const BlockWork& block)
      : range_(uniform(block.range)), n_(range_.first()) {}

  ANYFLASH_DEVICE int n() const { return n_; }
  ANYFLASH_DEVICE bool exists() const { return n_ >= 0; }
  ANYFLASH_DEVICE bool needs_mask() const { return range_.needs_mask(n_); }
  ANYFLASH_DEVICE bool sees_all() const { return true; }
  // Whether the tile is for the loop over tiles that need a mask, or for the one behind it.
  template <bool kMasked>
  ANYFLASH_DEVICE bool is_in_loop() const {
    return exists() && (!kMasked || needs_mask());
  }
  template <bool kMasked = true>
  ANYFLASH_DEVICE bool is_last() const {
    return next<kMasked>() < 0;
  }
  // To the next tile, when its K has come.
  template <bool kMasked = true, class Stages>
  ANYFLASH_DEVICE void move(Stages& stages) {
    n_ = next<kMasked>();
    if (exists()) stages.wait_keys();
  }

 private:
  template <bool kMasked>
  ANYFLASH_DEVICE int next() const {
    return kMasked ? range_.next(n_) : n_ > range_.unmasked_begin ? n_ - 1 : -1;
  }

  KRange range_;
  int n_;
};

// As the loader tells: the tile's K has come.
template <class Traits, class Variant>
class TileCursor<Traits, Variant, true> {
 public:
  static constexpr bool kIsMixed = true;

  template <class Stages>
  ANYFLASH_DEVICE TileCursor(Stages& stages, const BlockWork& block) {
    if (uniform(block.range.first()) >= 0) word_ = stages.wait_key_tile();
  }

  ANYFLASH_DEVICE int n() const { return tile().n; }
  ANYFLASH_DEVICE bool exists() const { return tile().exists(); }
  ANYFLASH_DEVICE bool needs_mask() const { return tile().needs_mask; }
  ANYFLASH_DEVICE bool sees_all() const { return tile().sees_all; }
  template <bool kMasked>
  ANYFLASH_DEVICE bool is_in_loop() const {
    return exists() && needs_mask() == kMasked;
  }
  template <bool = true>
  ANYFLASH_DEVICE bool is_last() const {
    return tile().is_last;
  }
  template <bool = true, class Stages>
  ANYFLASH_DEVICE void move(Stages& stages) {
    word_ = is_last() ? KeyTile{}.packed() : stages.wait_key_tile();
  }

 private:
  ANYFLASH_DEVICE KeyTile tile() const { return KeyTile::unpacked(word_); }

  int word_ = KeyTile{}.packed();  // registers are few
};

}  // namespace anyflash::sm90
