// Where a CTA works.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash {

// Of the forward.
struct ForwardWorkTile {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head;
  int head_k;
  int first_row;
};

// Of the backward's main kernel.
struct BackwardWorkTile {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head_k;
  int gqa_split;  // of the query heads that share head_k
  int first_key;
};

// Element (row, head, 0) of one sequence in a tensor with q's rows.
template <class T, class Void>
ANYFLASH_DEVICE T* first_of(Void* data, const Strides& stride, const Sequence& sequence, int head,
                            int64_t row = 0) {
  return static_cast<T*>(data) + sequence.batch * stride.batch + head * stride.head +
         (sequence.first_q + row) * stride.row;
}

}  // namespace anyflash
