// Which of the newest keys a query sees: tree attention of speculative decoding.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/cache.h"

namespace ANYFLASH_SHARED_NAMESPACE {

class TreeMask {
 public:
  ANYFLASH_HOST_DEVICE TreeMask(const KvCacheParams& p, int64_t batch, const CachedSequence& s)
      : data_(p.tree_mask.data == nullptr
                  ? nullptr
                  : static_cast<const unsigned char*>(p.tree_mask.data) +
                        batch * p.tree_mask.stride.batch + s.first_q * p.tree_mask.stride.row),
        row_stride_(p.tree_mask.stride.row),
        col_stride_(p.tree_mask.stride.col),
        first_key_(s.seqlen_k - s.seqlen_q),
        end_key_(first_key_ + p.tree_columns) {}

  ANYFLASH_HOST_DEVICE bool active() const { return data_ != nullptr; }
  // Keys before it are not in the tree; negative where there are fewer keys than queries.
  ANYFLASH_HOST_DEVICE int first_key() const { return first_key_; }
  ANYFLASH_HOST_DEVICE bool keep(int64_t query, int key) const {
    if (data_ == nullptr || key < first_key_ || key >= end_key_) return true;
    return data_[query * row_stride_ + (int64_t{key} - first_key_) * col_stride_] != 0;
  }

 private:
  const unsigned char* data_;
  int64_t row_stride_;
  int64_t col_stride_;
  int first_key_;
  int end_key_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
