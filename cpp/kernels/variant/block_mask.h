// Block-sparse attention: which blocks of scores are kept (Dao et al., arXiv 2205.14135, section 3.3).
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace ANYFLASH_SHARED_NAMESPACE {

class BlockMask {
 public:
  ANYFLASH_HOST_DEVICE BlockMask(const ForwardParams& p, int64_t batch, int head)
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
    return map_ == nullptr || block(row / rows_, col / cols_);
  }

  // Of the rows [first_row, end_row), how do they stand to a tile of keys inside one block, which
  // begins at col?
  enum class Kept { kNone, kSome, kAll };
  ANYFLASH_HOST_DEVICE Kept kept(int first_row, int end_row, int col) const {
    if (map_ == nullptr) return Kept::kAll;
    bool any = false;
    bool all = true;
    for (int r = first_row / rows_; r <= (end_row - 1) / rows_; ++r) {
      const bool one = block(r, col / cols_);
      any |= one;
      all &= one;
    }
    return all ? Kept::kAll : any ? Kept::kSome : Kept::kNone;
  }

 private:
  ANYFLASH_HOST_DEVICE bool block(int row, int col) const {
    return map_[row * row_stride_ + col * col_stride_] != 0;
  }

  const unsigned char* map_;
  int64_t row_stride_;
  int64_t col_stride_;
  int rows_;
  int cols_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
