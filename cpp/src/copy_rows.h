// A strided copy on the GPU that repacks 16-bit tensors for kernels that need rows at multiples of
// 16 bytes. Asynchronous on the stream.
#pragma once

#include <cstdint>

#include "params.h"

namespace anyflash {

struct CopyRowsParams {
  const void* source = nullptr;
  void* target = nullptr;
  Strides source_stride;
  Strides target_stride;
  int64_t batch = 0;
  int64_t rows = 0;
  int64_t heads = 0;
  int source_columns = 0;
  int target_columns = 0;  // further columns than source_columns are filled with zeros
};

void copy_rows(const CopyRowsParams& params, void* stream);

}  // namespace anyflash
