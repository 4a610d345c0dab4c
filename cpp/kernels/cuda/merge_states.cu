// See merge_states.h. One warp a row, neighbouring lanes neighbouring columns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/element.h"
#include "common/launch.h"
#include "common/merge.h"
#include "merge_states.h"

namespace anyflash {

namespace {

constexpr int kWarps = 8;
constexpr int kLanes = 32;

template <class Part, class Out>
__global__ void merge_states_kernel(const __grid_constant__ MergeParams p) {
  const int64_t count = p.batch * p.rows * p.heads;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  const int lane = threadIdx.x % kLanes;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; i < count; i += step) {
    const int64_t head = i % p.heads;
    const int64_t row = i / p.heads % p.rows;
    const int64_t batch = i / p.heads / p.rows;
    const auto offset = [&](const Strides& s) {
      return batch * s.batch + row * s.row + head * s.head;
    };
    const Merge<float> merge(static_cast<const float*>(p.lse_a)[offset(p.lse_a_stride)],
                             static_cast<const float*>(p.lse_b)[offset(p.lse_b_stride)]);
    const auto* const a = static_cast<const Part*>(p.out_a) + offset(p.out_a_stride);
    const auto* const b = static_cast<const Part*>(p.out_b) + offset(p.out_b_stride);
    auto* const out = static_cast<Out*>(p.out) + offset(p.out_stride);
    for (int64_t col = lane; col < p.columns; col += kLanes) {
      round_to(
          merge.out(to_float(a[col * p.out_a_stride.col]), to_float(b[col * p.out_b_stride.col])),
          out[col * p.out_stride.col]);
    }
    if (p.lse == nullptr) continue;
    __syncwarp();  // lse may be lse_a or lse_b, which all lanes have read now
    if (lane == 0) static_cast<float*>(p.lse)[offset(p.lse_stride)] = merge.lse();
  }
}

// Calls function(element) with an element of the type; float64 does not get here.
template <class Function>
void with_type(DType dtype, const Function& function) {
  if (dtype == DType::kFloat16) return function(__half{});
  if (dtype == DType::kBFloat16) return function(__nv_bfloat16{});
  function(float{});
}

}  // namespace

void merge_states_on_cuda(const MergeParams& params, void* stream) {
  const int64_t count = params.batch * params.rows * params.heads;
  with_type(params.part_dtype, [&](auto part) {
    with_type(params.out_dtype, [&](auto out) {
      launch_grid_stride<merge_states_kernel<decltype(part), decltype(out)>>(
          count, kWarps, kWarps * kLanes, 0, stream, params);
    });
  });
}

}  // namespace anyflash
