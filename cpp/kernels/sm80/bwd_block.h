// Where a CTA of the backward's main kernel works.
#pragma once

#include <cstdint>

#include "variant/sequence.h"

namespace anyflash::sm80 {

struct BackwardBlock {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head_k;
  int part;  // of the query heads that share head_k
  int first_key;
};

}  // namespace anyflash::sm80
