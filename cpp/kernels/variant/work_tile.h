// Where a CTA works.
#pragma once

#include <cstdint>

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

}  // namespace anyflash
