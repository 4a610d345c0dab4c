#include "repack.h"

#include <cstdint>
#include <cstdlib>

#include "arguments.h"
#include "copy_rows.h"
#include "describe.h"
#include "workspace.h"

namespace anyflash {

namespace {

CopyRowsParams copy_of(const TensorView& t) {
  CopyRowsParams copy;
  copy.batch = t.shape[0];
  copy.rows = t.shape[1];
  copy.heads = t.shape[2];
  copy.source_columns = copy.target_columns = static_cast<int>(t.shape[3]);
  return copy;
}

void copy_to_workspace(const Repacked& repacked, char* workspace, void* stream) {
  CopyRowsParams copy = copy_of(repacked.tensor);
  copy.source = repacked.tensor.data;
  copy.source_stride = strides_of(repacked.tensor);
  copy.target = workspace + repacked.offset;
  copy.target_stride = repacked.stride;
  copy.target_columns = repacked.columns;
  copy_rows(copy, stream);
}

}  // namespace

bool fits_kernel(const TensorView& t, const InputRules& rules) {
  const auto is_whole = [&](int64_t elements) {
    const auto bytes = static_cast<uint64_t>(elements) * static_cast<uint64_t>(bytes_of(t.dtype));
    return bytes % static_cast<uint64_t>(rules.alignment) == 0;
  };
  if (std::abs(t.stride[1]) > rules.max_row_stride) return false;
  if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<uint64_t>(rules.alignment) != 0) {
    return false;
  }
  if (!is_whole(t.shape[3]) || t.stride[3] != 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (t.shape[i] <= 1) continue;
    if (!is_whole(t.stride[i])) return false;
    if (rules.positive_strides && t.stride[i] <= 0) return false;
  }
  return true;
}

bool has_box_slots(const TensorView& cache) {
  constexpr int64_t kAlignment = 16;  // bytes
  const int64_t elements = kAlignment / bytes_of(cache.dtype);
  return cache.stride[0] > 0 && cache.stride[0] % elements == 0;
}

Repacked plan_repack(const TensorView& tensor, const InputRules& rules, std::size_t& total) {
  Repacked repacked;
  if (fits_kernel(tensor, rules)) return repacked;
  const auto& n = tensor.shape;
  const int64_t elements = rules.alignment / bytes_of(tensor.dtype);
  const int64_t columns = (n[3] + elements - 1) / elements * elements;
  const int64_t bytes = n[0] * n[1] * n[2] * columns * bytes_of(tensor.dtype);
  repacked.needed = true;
  repacked.tensor = tensor;
  repacked.stride = {n[1] * n[2] * columns, n[2] * columns, columns, 1};
  repacked.columns = static_cast<int>(columns);
  repacked.offset = reserve(total, static_cast<std::size_t>(bytes));
  return repacked;
}

void repack_input(const Repacked& repacked, char* workspace, void* stream, const void*& data,
                  Strides& stride) {
  if (!repacked.needed) return;
  copy_to_workspace(repacked, workspace, stream);
  data = workspace + repacked.offset;
  stride = repacked.stride;
}

void redirect_output(const Repacked& repacked, bool packed, char* workspace, void* stream,
                     void*& data, Strides& stride) {
  if (!repacked.needed) return;
  if (packed) copy_to_workspace(repacked, workspace, stream);
  data = workspace + repacked.offset;
  stride = repacked.stride;
}

void write_back(const Repacked& repacked, const char* workspace, void* stream) {
  if (!repacked.needed) return;
  CopyRowsParams copy = copy_of(repacked.tensor);
  copy.source = workspace + repacked.offset;
  copy.source_stride = repacked.stride;
  copy.target = repacked.tensor.data;
  copy.target_stride = strides_of(repacked.tensor);
  copy_rows(copy, stream);
}

}  // namespace anyflash
