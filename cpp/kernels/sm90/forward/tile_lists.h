// Which tiles of keys are left where a variant leaves some out. A warp finds them while another
// loads those found before: to find them takes longer than to load them.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/forward/blocks.h"
#include "sm90/pipeline.h"
#include "sm90/visited_tiles.h"
#include "variant/mask.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// Tiles of one block of query rows, in the order in which they are visited. A block has one list or
// more. A list is empty only if the block has no tile.
struct TileList {
  static constexpr int kNoMoreBlocks = -1;

  int count;
  int words[32];  // KeyTile's
};

inline constexpr int kTileLists = 2;  // the finder's next one, and the one that is read

// Takes all blocks of the CTA in turn, and finds their tiles. By a warp.
template <class Traits, class Variant>
class TileFinder {
  using Block = typename Traits::Block;
  using Launch = typename Block::Launch;

 public:
  ANYFLASH_DEVICE TileFinder(const Launch& params, typename Traits::SharedStorage& smem)
      : params_(params), smem_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  ANYFLASH_DEVICE void find() {
    BlockScheduler<Traits> scheduler(params_);
    for (unsigned i = 0;; ++i) {
      Block& block = smem_.blocks[i % Traits::kKnownBlocks];
      if (lane_ == 0) scheduler.take(block);
      __syncwarp();
      if (!block.exists()) break;
      find_tiles(block);
    }
    smem_.list_ring.empty[place_.stage()].wait(place_.parity() ^ 1);
    if (lane_ == 0) smem_.tile_lists[place_.stage()].count = TileList::kNoMoreBlocks;
    release(smem_.list_ring.full[place_.stage()]);
  }

 private:
  // Each lane has a tile, and a bit says whether it is visited.
  struct Found {
    int word;
    uint32_t lanes;
  };

  ANYFLASH_DEVICE void find_tiles(Block& block) {
    const KRange range = block.range;
    int asked = 0;
    Found found = find_next(block, range, asked);
    if (found.lanes == 0) {  // consumers see no key
      __syncwarp();          // all lanes have read the range
      if (lane_ == 0) block.range = KRange{0, 0, 0, 0};
    }
    for (;;) {
      const Found next = find_next(block, range, asked);
      tell(found, next.lanes == 0);
      if (next.lanes == 0) return;
      found = next;
    }
  }

  // Goes on until some tile is found, or there are no more.
  ANYFLASH_DEVICE Found find_next(const Block& block, const KRange& range, int& asked) const {
    Found found{0, 0};
    while (found.lanes == 0 && asked < range.size()) {
      const int place = asked + lane_;
      asked += 32;
      bool is_visited = false;
      if (place < range.size()) {
        const KeyTile tile = look_at_tile<Traits, Variant>(params_.attention, block.tile, range,
                                                           range.at(place), is_visited);
        found.word = tile.packed();
      }
      found.lanes = __ballot_sync(0xffffffffu, is_visited);
    }
    return found;
  }

  ANYFLASH_DEVICE void tell(const Found& found, bool are_last) {
    TileList& list = smem_.tile_lists[place_.stage()];
    smem_.list_ring.empty[place_.stage()].wait(place_.parity() ^ 1);
    const uint32_t from_here = found.lanes >> lane_;
    if ((from_here & 1) != 0) {
      KeyTile tile = KeyTile::unpacked(found.word);
      tile.is_last = are_last && from_here == 1;
      list.words[__popc(found.lanes) - __popc(from_here)] = tile.packed();
    }
    if (lane_ == 0) list.count = __popc(found.lanes);
    __syncwarp();  // all words are there
    release(smem_.list_ring.full[place_.stage()]);
    place_.advance();
  }

  const Launch& params_;
  typename Traits::SharedStorage& smem_;
  int lane_;
  RingPlace<kTileLists> place_;
};

// The lists, as the thread that loads reads them.
template <class Traits>
class ListedTiles {
 public:
  ANYFLASH_DEVICE explicit ListedTiles(typename Traits::SharedStorage& smem) : smem_(smem) {}

  // The next block's tiles; false after the last block.
  ANYFLASH_DEVICE bool begin_block() {
    wait_list();
    is_over_ = count_ <= 0;
    if (count_ == TileList::kNoMoreBlocks) return false;
    if (is_over_) release_list();
    return true;
  }
  // One that does not exist after the last.
  ANYFLASH_DEVICE KeyTile next(const Attention&, const ForwardWorkTile&, const KRange&) {
    if (is_over_) return {};
    if (read_ == count_) wait_list();
    const KeyTile tile = KeyTile::unpacked(smem_.tile_lists[place_.stage()].words[read_++]);
    if (read_ == count_) release_list();
    is_over_ = tile.is_last;
    return tile;
  }

 private:
  ANYFLASH_DEVICE void wait_list() {
    smem_.list_ring.full[place_.stage()].wait(place_.parity());
    count_ = smem_.tile_lists[place_.stage()].count;
    read_ = 0;
  }
  ANYFLASH_DEVICE void release_list() {
    smem_.list_ring.empty[place_.stage()].arrive();
    place_.advance();
  }

  typename Traits::SharedStorage& smem_;
  RingPlace<kTileLists> place_;
  int count_ = 0;
  int read_ = 0;
  bool is_over_ = true;  // no tile is left to read
};

}  // namespace anyflash::sm90
