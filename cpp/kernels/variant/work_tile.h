// Where a CTA works.
#pragma once

#include <cstdint>

#include "variant/sequence.h"

namespace anyflash {

// Of the forward.
struct ForwardBlock {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head;
  int head_k;
  int first_row;
};

// Of the backward's main kernel.
struct BackwardBlock {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head_k;
  int part;  // of the query heads that share head_k
  int first_key;
};

}  // namespace anyflash
