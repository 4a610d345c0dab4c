// Which tiles of keys a block of query rows visits, as a warp of the producer finds them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "variant/key_range_bounds.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

struct KeyTile {
  int n = -1;               // -1: there is none
  bool needs_mask = false;  // some row of the block may not see some of its keys
  bool sees_all = true;     // each row each key, masks by position apart
  bool is_last = true;

  ANYFLASH_DEVICE bool exists() const { return n >= 0; }

  // All in one word, which a warp reads at once.
  ANYFLASH_DEVICE int packed() const {
    return n * 8 + (needs_mask ? 1 : 0) + (sees_all ? 2 : 0) + (is_last ? 4 : 0);
  }
  ANYFLASH_DEVICE static KeyTile unpacked(int word) {
    return {word >> 3, (word & 1) != 0, (word & 2) != 0, (word & 4) != 0};
  }
};

// Tile n of a block's range, and whether its rows see something of it.
template <class Traits, class Variant>
ANYFLASH_DEVICE KeyTile look_at_tile(const Attention& attention, const ForwardWorkTile& rows,
                                     const KRange& range, int n, bool& is_visited) {
  const Variant variant(attention, rows, Traits::kBlockM, Traits::kBlockN);
  const Visibility seen = variant.template see<Variant::kOps>(n);
  is_visited = seen.any;
  return {n, range.needs_mask(n) || !seen.all, seen.all};
}

// The tiles of a block in turn, by position alone: for the loaders of the forward, where there is
// no finder, and of dq_by_rows_kernel.
template <class Traits, class Variant, bool kSkips = Variant::kSkipsTiles>
class VisitedTiles {
 public:
  ANYFLASH_DEVICE void begin(const Attention&, const ForwardWorkTile&, const KRange& range) {
    next_ = range.first();
  }
  // One that does not exist after the last.
  ANYFLASH_DEVICE KeyTile next(const Attention&, const ForwardWorkTile&, const KRange& range) {
    const int n = next_;
    if (n >= 0) next_ = range.next(n);
    return {n, range.needs_mask(n)};
  }

 private:
  int next_ = -1;
};

// Without those of which the variant's rows see nothing (dq_by_rows_kernel). All lanes of the
// loader's warp ask it, each about a tile of its own: then a hidden tile costs next to nothing.
template <class Traits, class Variant>
class VisitedTiles<Traits, Variant, true> {
 public:
  ANYFLASH_DEVICE void begin(const Attention&, const ForwardWorkTile&, const KRange&) {
    asked_ = 0;
    left_ = 0;
  }
  ANYFLASH_DEVICE KeyTile next(const Attention& attention, const ForwardWorkTile& rows,
                               const KRange& range) {
    look_ahead(attention, rows, range);
    if (left_ == 0) return {};
    const int word = __shfl_sync(0xffffffffu, word_, __ffs(static_cast<int>(left_)) - 1);
    left_ &= left_ - 1;
    return KeyTile::unpacked(word);
  }

 private:
  // Until some tile is left, or there are no more.
  ANYFLASH_DEVICE void look_ahead(const Attention& attention, const ForwardWorkTile& rows,
                                  const KRange& range) {
    while (left_ == 0 && asked_ < range.size()) {
      const int place = asked_ + static_cast<int>(threadIdx.x) % 32;
      asked_ += 32;
      bool is_left = false;
      if (place < range.size()) {
        word_ = look_at_tile<Traits, Variant>(attention, rows, range, range.at(place), is_left)
                    .packed();
      }
      left_ = __ballot_sync(0xffffffffu, is_left);
    }
  }

  int asked_ = 0;      // places in the range's order
  int word_ = 0;       // KeyTile's, of this lane's tile
  uint32_t left_ = 0;  // a bit for each lane whose tile is visited and has not been yet
};

}  // namespace anyflash::sm90
