// How the C interfaces of forward.cu and backward.cu tell strides.
#pragma once

#include <cstdint>

#include "params.h"

// From those of (batch, row, head); a row's columns are adjacent.
inline anyflash::Strides strides(const int64_t (&of)[3]) {
  anyflash::Strides result;
  result.batch = of[0];
  result.row = of[1];
  result.head = of[2];
  return result;
}
