// A sink: one more logit of a row's denominator.
#pragma once

#include <cmath>

#include "common/element.h"
#include "common/macros.h"

namespace anyflash {

// What a sink adds to a row's sum, which counts in units of e^reference: the largest of the row's
// logits and of the sink, or 0 if all are -inf. A sink of +inf takes all of the weight; inf - inf
// would be NaN. One of -inf is none.
ANYFLASH_DEVICE float sink_term(float sink, float reference) {
  return sink == reference ? 1.0f : exp2f((sink - reference) * kLog2E);
}

}  // namespace anyflash
