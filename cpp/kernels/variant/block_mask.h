// Block-sparse attention: which blocks of scores are kept (Dao et al., arXiv 2205.14135, section
// 3.3).
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/visibility.h"

namespace ANYFLASH_SHARED_NAMESPACE {

class BlockMask {
 public:
  ANYFLASH_HOST_DEVICE BlockMask(const Attention& p, int64_t batch, int head)
      : map_(p.block_mask.data == nullptr
                 ? nullptr
                 : static_cast<const unsigned char*>(p.block_mask.data) +
                       batch * p.block_mask.stride.batch + head * p.block_mask.stride.head),
        row_stride_(p.block_mask.stride.row),
        col_stride_(p.block_mask.stride.col),
        rows_(p.block_size_q),
        cols_(p.block_size_k) {}

  ANYFLASH_HOST_DEVICE bool active() const { return map_ != nullptr; }

  ANYFLASH_HOST_DEVICE bool keep(int row, int col) const {
    return map_ == nullptr || map_[row / rows_ * row_stride_ + col / cols_ * col_stride_] != 0;
  }

  // What the rows [row, end_row) see of the keys [key, end_key), all of which exist. Some do.
  ANYFLASH_HOST_DEVICE Visibility see(int row, int end_row, int key, int end_key) const {
    Visibility seen{false, true};
    for (int i = row / rows_; i <= (end_row - 1) / rows_; ++i) {
      for (int j = key / cols_; j <= (end_key - 1) / cols_; ++j) {
        const bool kept = map_[i * row_stride_ + j * col_stride_] != 0;
        seen.any |= kept;
        seen.all &= kept;
      }
    }
    return seen;
  }

  // Calls visit(begin, end) for the parts of [begin, end) that lie in kept blocks: of keys that a
  // row may see, or of rows that may see a key.
  template <class Visit>
  ANYFLASH_HOST_DEVICE void visit_keys(int row, int begin, int end, const Visit& visit) const {
    visit_parts(map_ + row / rows_ * row_stride_, col_stride_, cols_, begin, end, visit);
  }
  template <class Visit>
  ANYFLASH_HOST_DEVICE void visit_rows(int key, int begin, int end, const Visit& visit) const {
    visit_parts(map_ + key / cols_ * col_stride_, row_stride_, rows_, begin, end, visit);
  }

  // The map's row for one tile of queries, to be asked for tiles of keys; tiles divide blocks.
  class Row {
   public:
    ANYFLASH_HOST_DEVICE Row(const BlockMask& blocks, int row, int tile_keys)
        : map_(blocks.map_ == nullptr ? nullptr
                                      : blocks.map_ + row / blocks.rows_ * blocks.row_stride_),
          stride_(blocks.col_stride_),
          tiles_(static_cast<uint32_t>(blocks.cols_ / tile_keys)),
          inverse_(tiles_ == 0 ? 0 : 0xffffffffu / tiles_) {}

    ANYFLASH_HOST_DEVICE bool keep(int tile) const {
      if (map_ == nullptr) return true;
      // tile / tiles_, or one less: a product instead of a division.
      const auto n = static_cast<uint32_t>(tile);
      uint32_t block = static_cast<uint32_t>(uint64_t{n} * inverse_ >> 32);
      if ((block + 1) * tiles_ <= n) ++block;
      return map_[block * stride_] != 0;
    }

   private:
    const unsigned char* map_;
    int64_t stride_;
    uint32_t tiles_;
    uint32_t inverse_;
  };

 private:
  template <class Visit>
  ANYFLASH_HOST_DEVICE static void visit_parts(const unsigned char* map, int64_t stride, int size,
                                               int begin, int end, const Visit& visit) {
    int left = size - begin % size;  // of the block in which `begin` lies
    for (int block = begin / size; begin < end; ++block, left = size) {
      const int next = end - begin < left ? end : begin + left;
      if (map[block * stride] != 0) visit(begin, next);
      begin = next;
    }
  }

  const unsigned char* map_;
  int64_t row_stride_;
  int64_t col_stride_;
  int rows_;
  int cols_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
