// What the kernels that join two partial results are told (attention.h: merge_states).
#pragma once

#include <cstdint>

#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

struct MergeParams {
  const void* out_a = nullptr;
  const void* out_b = nullptr;
  void* out = nullptr;
  DType part_dtype = DType::kFloat32;  // of out_a and out_b
  DType out_dtype = DType::kFloat32;
  Strides out_a_stride;
  Strides out_b_stride;
  Strides out_stride;

  const void* lse_a = nullptr;
  const void* lse_b = nullptr;
  void* lse = nullptr;                // null: not wanted
  DType lse_dtype = DType::kFloat32;  // of lse_a and lse_b; on the CPU also kFloat64
  DType lse_out_dtype = DType::kFloat32;
  Strides lse_a_stride;  // (batch, row, head); col is not used
  Strides lse_b_stride;
  Strides lse_stride;

  int64_t batch = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t columns = 0;
};

void merge_states_on_cuda(const MergeParams& params, void* stream);  // asynchronous
void merge_states_on_cpu(const MergeParams& params, int num_threads);

}  // namespace anyflash
