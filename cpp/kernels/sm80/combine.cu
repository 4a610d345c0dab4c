// See combine.h. One CTA a row of the result: with weights exp(lse_s) / (exp(sink) + sum exp(lse)),
// out = sum_s weight_s out_s. Splits without keys (lse -inf) have not written theirs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "common/launch.h"
#include "sm80/combine.h"
#include "variant/auxiliary.h"

namespace anyflash::sm80 {

namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kWarps = 4;
constexpr int kLanes = 32;
constexpr int kThreads = kWarps * kLanes;
constexpr int kColumns = 256;                    // the largest head dim
constexpr int kPerLane = kColumns / kLanes / 4;  // pieces of four columns
constexpr int kParts = 8;                        // that are loaded at once

struct Smem {
  float warp[kWarps];
  float weight[kThreads];  // of splits
  bool seen[kThreads];
  alignas(16) float out[kWarps][kColumns];
};

// Over the CTA, in the same order whenever it runs.
template <class Op>
__device__ __forceinline__ float reduce(float x, Smem& smem, const Op& op) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  __syncthreads();  // every warp has done with what lay there
  if (threadIdx.x % kLanes == 0) smem.warp[threadIdx.x / kLanes] = x;
  __syncthreads();  // all warps' numbers are there
  x = smem.warp[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) x = op(x, smem.warp[warp]);
  return x;
}

__device__ __forceinline__ void store(const KvCacheParams& p, DType q_dtype, int64_t index,
                                      float x) {
  const GradientOutput target{p.out, p.out_dtype == DType::kFloat32 ? p.out_dtype : q_dtype, {}};
  store_float(target, index, x);
}

// acc += weight * part, of this lane's columns, for kParts splits at once: their loads overlap.
// Columns that do not exist are read where the part has padding, but not written.
template <int kParts>
__device__ __forceinline__ void add_parts(const CombineParams& params, const Smem& smem,
                                          int64_t rows, int64_t row, int first, int split, int lane,
                                          float4 (&acc)[kPerLane]) {
  const int columns = part_columns(params.result);
  float4 parts[kParts][kPerLane];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int at = split + i * kWarps;
    const bool seen = at < kThreads && smem.seen[at];
    const int64_t part = ((first + at) * rows + row) * columns;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int col = (j * kLanes + lane) * 4;
      parts[i][j] = seen && col < columns
                        ? *reinterpret_cast<const float4*>(params.out + part + col)
                        : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int at = split + i * kWarps;
    const float weight = at < kThreads ? smem.weight[at] : 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      acc[j].x += weight * parts[i][j].x;
      acc[j].y += weight * parts[i][j].y;
      acc[j].z += weight * parts[i][j].z;
      acc[j].w += weight * parts[i][j].w;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams params) {
  auto& smem = *reinterpret_cast<Smem*>(anyflash_smem);
  const KvCacheParams& p = params.result;
  const int thread = threadIdx.x;
  const int warp = thread / kLanes;
  const int lane = thread % kLanes;
  const int64_t rows = lse_stride_of_split(p);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t query = row % p.seqlen_q;
    const int64_t head = row / p.seqlen_q % p.heads;
    const int64_t batch = row / p.seqlen_q / p.heads;
    const float sink =
        p.sinks.data == nullptr ? -INFINITY : load_float(p.sinks, head * p.sinks.stride.head);
    float top = sink;
    for (int s = thread; s < p.num_splits; s += kThreads) {
      top = fmaxf(top, params.lse[s * rows + row]);
    }
    top = reduce(top, smem, [](float a, float b) { return fmaxf(a, b); });
    const float reference = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
    for (int s = thread; s < p.num_splits; s += kThreads) {
      sum += exp2f((params.lse[s * rows + row] - reference) * kLog2E);
    }
    sum = reduce(sum, smem, [](float a, float b) { return a + b; });
    if (sink != -INFINITY) sum += exp2f((sink - reference) * kLog2E);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (thread == 0 && p.lse != nullptr) {
      const Strides& stride = p.lse_stride;
      p.lse[batch * stride.batch + head * stride.head + query * stride.row] =
          sum == 0.0f ? -INFINITY : reference + logf(sum);
    }

    float4 acc[kPerLane] = {};
    for (int first = 0; first < p.num_splits; first += kThreads) {
      // Weights first: then the loads of the parts depend on nothing that has to be waited for.
      const int count = min(kThreads, p.num_splits - first);
      __syncthreads();  // every warp has done with the weights before
      const float lse = thread < count ? params.lse[(first + thread) * rows + row] : -INFINITY;
      smem.weight[thread] = exp2f((lse - reference) * kLog2E) * inverse;
      smem.seen[thread] = lse != -INFINITY;
      __syncthreads();  // the weights are there
      for (int split = warp; split < count; split += kParts * kWarps) {
        add_parts<kParts>(params, smem, rows, row, first, split, lane, acc);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      *reinterpret_cast<float4*>(&smem.out[warp][(i * kLanes + lane) * 4]) = acc[i];
    }
    __syncthreads();  // every warp's sums are there
    const Strides& stride = p.out_stride;
    const int64_t offset = batch * stride.batch + query * stride.row + head * stride.head;
    for (int col = thread; col < p.head_dim_v; col += kThreads) {
      float x = smem.out[0][col];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x += smem.out[w][col];
      store(p, params.q_dtype, offset + col * stride.col, x);
    }
  }
}

}  // namespace

void combine_splits(const CombineParams& params, void* stream) {
  const int64_t rows = lse_stride_of_split(params.result);
  if (rows == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 16;  // a grid-stride loop does the rest
  launch<combine_kernel>(dim3(static_cast<unsigned>(std::min(rows, kMaxBlocks))), dim3(kThreads),
                         sizeof(Smem), stream, params);
}

}  // namespace anyflash::sm80
