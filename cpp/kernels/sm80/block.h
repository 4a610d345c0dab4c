// Where a CTA works.
#pragma once

#include <cstdint>

#include "variant/sequence.h"

namespace anyflash::sm80 {

struct ForwardBlock {
  Sequence sequence;
  int64_t batch;  // index of the sequence
  int head;
  int head_k;
  int first_row;
};

}  // namespace anyflash::sm80
