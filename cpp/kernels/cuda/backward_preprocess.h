// What the backward needs of every query row before its products, and the sums of small gradients
// after them. Asynchronous on the stream.
#pragma once

#include "variant/backward_scratch.h"

namespace anyflash {

// LSE and delta; slopes_log2, dq_accum = 0 and dout_rounded, where there are such.
void backward_preprocess(const BackwardScratch& params, void* stream);

// dsinks = -sum over batch and rows of exp(sink - lse) delta, in a fixed order.
void sum_dsinks(const BackwardScratch& params, void* stream);

// dalibi_slopes = sum of slope_sums, in a fixed order.
void sum_dalibi_slopes(const BackwardScratch& params, void* stream);

}  // namespace anyflash
