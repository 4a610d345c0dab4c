// Which scores count: both which K tiles to visit and which elements to keep. Pure integer code.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace anyflash {

// K tiles of one block of query rows: [0, masked) need no mask, [masked, end) do, the rest is
// skipped.
struct KRange {
  int masked;
  int end;
};

// The whole sequence, or its causal part aligned at the bottom right:
//   keep(i, j)  <=>  j < seqlen_k  and  (not causal or j <= i + seqlen_k - seqlen_q)
class Mask {
 public:
  ANYFLASH_HOST_DEVICE explicit Mask(const ForwardParams& params)
      : seqlen_k_(params.seqlen_k),
        // Not causal: the last key of row 0 is the last of all, and so of every row.
        diagonal_(params.causal ? int64_t{params.seqlen_k} - params.seqlen_q
                                : int64_t{params.seqlen_k} - 1) {}

  // The number of keys that row i sees: a prefix, empty if 0.
  ANYFLASH_HOST_DEVICE int visible(int64_t row) const {
    const int64_t last = row + diagonal_;
    return last < 0 ? 0 : last >= seqlen_k_ ? seqlen_k_ : static_cast<int>(last) + 1;
  }

  ANYFLASH_HOST_DEVICE bool keep(int64_t row, int64_t col) const { return col < visible(row); }

  // Tiles of block_n keys for the rows [first_row, first_row + rows).
  ANYFLASH_HOST_DEVICE KRange k_range(int64_t first_row, int rows, int block_n) const {
    const int all = visible(first_row) / block_n;
    const int last = visible(first_row + rows - 1);
    return KRange{all, last / block_n + (last % block_n != 0)};
  }

 private:
  int seqlen_k_;
  int64_t diagonal_;
};

}  // namespace anyflash
