// Which tiles of keys a block of query rows visits, in which order.
#pragma once

#include "common/macros.h"
#include "params.h"
#include "variant/key_range_bounds.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

struct KeyTile {
  int n;          // -1: there is none
  bool sees_all;  // each row each key, masks by position apart
};

// KRange's tiles, but for those that the variant leaves out.
template <class Variant>
struct KeyTiles {
  Mask mask;
  Variant variant;
  KRange range;
  KeyTile first;

  ANYFLASH_DEVICE KeyTiles(const Attention& attention, const ForwardWorkTile& work_tile, int rows,
                           int keys)
      : mask(work_tile.sequence.seqlen_q, work_tile.sequence.seqlen_k,
             uniform(work_tile.sequence.shift), attention.window),
        variant(attention, work_tile, rows, keys),
        range(mask.k_range(work_tile.first_row, rows, keys)),
        first(visited<Variant::kOps>(range.first())) {}

  ANYFLASH_DEVICE KeyTile next(int n) const { return visited<Variant::kOps>(range.next(n)); }
  // The same of tiles that need no mask.
  template <ScoreOps kOps>
  ANYFLASH_DEVICE KeyTile next_unmasked(int n) const {
    return visited<kOps>(n > range.unmasked_begin ? n - 1 : -1);
  }

 private:
  // All lanes have the same: what a reduction makes of it lies in a uniform register. In another
  // one, kept through the loops, it makes the plain kernel spill.
  ANYFLASH_DEVICE static int uniform(int x) {
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(x)));
  }

  template <ScoreOps kOps>
  ANYFLASH_DEVICE KeyTile visited(int n) const {
    while (n >= 0) {
      const Visibility seen = variant.template see<kOps>(n);
      if (seen.any) return {n, seen.all};
      n = range.next(n);
    }
    return {-1, true};
  }
};

}  // namespace anyflash::sm80
