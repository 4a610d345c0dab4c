// See copy_rows.h. One thread an element of the target, columns fastest.
#include "common/launch.h"
#include "copy_rows.h"

namespace anyflash {

namespace {

constexpr int kThreads = 256;

__global__ void copy_rows_kernel(const __grid_constant__ CopyRowsParams p) {
  const auto* source = static_cast<const uint16_t*>(p.source);
  auto* target = static_cast<uint16_t*>(p.target);
  const int64_t count = p.batch * p.rows * p.heads * p.target_columns;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t col = i % p.target_columns;
    const int64_t head = i / p.target_columns % p.heads;
    const int64_t row = i / (p.target_columns * p.heads) % p.rows;
    const int64_t batch = i / (p.target_columns * p.heads * p.rows);
    const auto offset = [&](const Strides& s) {
      return batch * s.batch + row * s.row + head * s.head + col * s.col;
    };
    target[offset(p.target_stride)] =
        col < p.source_columns ? source[offset(p.source_stride)] : uint16_t{0};
  }
}

}  // namespace

void copy_rows(const CopyRowsParams& params, void* stream) {
  const int64_t count = params.batch * params.rows * params.heads * params.target_columns;
  launch_grid_stride<copy_rows_kernel>(count, kThreads, kThreads, 0, stream, params);
}

}  // namespace anyflash
