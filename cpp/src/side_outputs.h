// What ForwardPlan writes beside the kernel's results: the dropout mask, and the value that the
// kernels' maxima begin with.
#pragma once

#include <cstdint>

#include "params.h"

namespace anyflash {

struct SideOutputs {
  ForwardParams params;
  unsigned char* dropout_mask = nullptr;  // null: not wanted
  Strides dropout_mask_stride;
  int64_t dropout_mask_rows = 0;
  int64_t dropout_mask_columns = 0;
};

// params.max_logits = -inf, where it is wanted. dropout_mask = 1 where a probability is kept, 0
// where it is dropped; all of it, also beyond the lengths of packed sequences.
void fill_side_outputs(const SideOutputs& outputs, void* stream);  // CUDA, asynchronous
void fill_side_outputs_on_cpu(const SideOutputs& outputs, int num_threads);

}  // namespace anyflash
