// See cuda/backward_preprocess.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "common/element.h"
#include "common/launch.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/reduce.h"
#include "common/softmax.h"
#include "cuda/backward_preprocess.h"
#include "variant/broadcast_tensor.h"
#include "variant/sequence.h"

namespace anyflash {

namespace {

constexpr int kThreads = 256;
constexpr int kRowThreads = 8;  // neighbouring lanes share a row
constexpr int kVector = 8;      // elements that a lane takes at once
constexpr std::size_t kSumBytes = kThreads / 32 * sizeof(float);  // shared memory of block_sum()

template <class Element>
struct alignas(16) Vector {
  Element x[kVector];
};

// The columns [col, col + 8) of a row, 0 where there are none: 16-bit rows hold whole vectors,
// float32 ones are read element by element.
template <class Element>
ANYFLASH_DEVICE void load_row(float (&to)[kVector], const void* data, DType dtype, int64_t offset,
                              int64_t col_stride, int col, int columns) {
  if (dtype == DType::kFloat32) {
    const float* const row = static_cast<const float*>(data) + offset;
    for (int i = 0; i < kVector; ++i) {
      to[i] = col + i < columns ? row[(col + i) * col_stride] : 0.0f;
    }
  } else {
    const auto all =
        *reinterpret_cast<const Vector<Element>*>(static_cast<const Element*>(data) + offset + col);
    for (int i = 0; i < kVector; ++i) to[i] = to_float(all.x[i]);
  }
}

// A lane's part of the sum of dout * out over at most kColumnsAtOnce columns of a row. All loads
// come first: memory is far.
constexpr int kColumnsAtOnce = 256;
template <class Element>
ANYFLASH_DEVICE float row_product(const Element* dout, const Element* out, int lane, int columns) {
  constexpr int kPieces = kColumnsAtOnce / (kRowThreads * kVector);
  Vector<Element> a[kPieces];
  Vector<Element> b[kPieces];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int col = (piece * kRowThreads + lane) * kVector;
    if (col >= columns) continue;
    a[piece] = *reinterpret_cast<const Vector<Element>*>(dout + col);
    b[piece] = *reinterpret_cast<const Vector<Element>*>(out + col);
  }
  float sum = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int col = (piece * kRowThreads + lane) * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (col + i < columns) sum += to_float(a[piece].x[i]) * to_float(b[piece].x[i]);
    }
  }
  return sum;
}

ANYFLASH_DEVICE float row_sum(float x) {
  for (int distance = kRowThreads / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// One CTA a tile of block_m rows of a (batch, head) pair.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    preprocess_kernel(const __grid_constant__ BackwardScratch p) {
  const Attention& a = p.attention;
  const int row_blocks = ceil_div(a.seqlen_q, p.block_m);
  const int row0 = static_cast<int>(blockIdx.x) % row_blocks * p.block_m;
  const int pair = static_cast<int>(blockIdx.x) / row_blocks;
  const int64_t batch = pair / a.heads;
  const int head = pair % a.heads;
  const Sequence sequence = sequence_of(a, batch);
  if (row0 >= sequence.seqlen_q) return;
  const int64_t padded = p.first_row(sequence, batch, head) + row0;
  const auto offset = [&](const Strides& stride, int64_t row) {
    return sequence.batch * stride.batch + head * stride.head +
           (sequence.first_q + row) * stride.row;
  };

  const int lane = static_cast<int>(threadIdx.x) % kRowThreads;
  for (int r = static_cast<int>(threadIdx.x) / kRowThreads; r < p.block_m;
       r += kThreads / kRowThreads) {
    const int row = row0 + r;
    const bool exists = row < sequence.seqlen_q;
    float sum = 0.0f;
    const bool short_types = p.dout_dtype != DType::kFloat32 && p.out_dtype != DType::kFloat32;
    if (exists && short_types) {
      const auto* const dout = static_cast<const Element*>(p.dout) + offset(p.dout_stride, row);
      const auto* const out = static_cast<const Element*>(p.out) + offset(p.out_stride, row);
      for (int first = 0; first < a.head_dim_v; first += kColumnsAtOnce) {
        sum += row_product(dout + first, out + first, lane, a.head_dim_v - first);
      }
    } else if (exists) {
      for (int col = lane * kVector; col < a.head_dim_v; col += kRowThreads * kVector) {
        float dout[kVector];
        float out[kVector];
        load_row<Element>(dout, p.dout, p.dout_dtype, offset(p.dout_stride, row), p.dout_stride.col,
                          col, a.head_dim_v);
        load_row<Element>(out, p.out, p.out_dtype, offset(p.out_stride, row), p.out_stride.col, col,
                          a.head_dim_v);
        if (p.dout_rounded != nullptr) {
          Vector<Element> rounded;
          for (int i = 0; i < kVector; ++i) {
            round_to(dout[i], rounded.x[i]);
            dout[i] = to_float(rounded.x[i]);  // delta belongs to the dP that the kernels compute
          }
          const int64_t columns = ceil_div(a.head_dim_v, kVector) * kVector;
          const int64_t rows = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
          const int64_t at = (sequence.batch * a.heads + head) * rows + sequence.first_q + row;
          *reinterpret_cast<Vector<Element>*>(static_cast<Element*>(p.dout_rounded) + at * columns +
                                              col) = rounded;
        }
        for (int i = 0; i < kVector; ++i) sum += col + i < a.head_dim_v ? dout[i] * out[i] : 0.0f;
      }
    }
    sum = row_sum(sum);
    if (lane != 0) continue;
    // Beyond a padded tensor's end, no row is read.
    LseAndDelta lse_and_delta{exists || a.cu_seqlens_q != nullptr ? INFINITY : kFarLse, 0.0f};
    if (exists) {
      const float lse = p.lse[offset(p.lse_stride, row)];
      if (fabsf(lse) != INFINITY) {
        lse_and_delta.lse = lse * p.lse_unit;
        lse_and_delta.delta = sum - (p.dlse == nullptr ? 0.0f : p.dlse[offset(p.dlse_stride, row)]);
      }
    }
    p.set_lse_and_delta(padded + r, lse_and_delta);
  }
  if (p.slopes_log2 != nullptr && row0 == 0 && threadIdx.x == 0) {
    const Strides& stride = a.alibi_slopes.stride;
    p.slopes_log2[pair] =
        load_float(a.alibi_slopes, batch * stride.batch + head * stride.head) * kLog2E;
  }
  if (p.dq_accum == nullptr) return;
  auto* const sums = reinterpret_cast<float4*>(p.dq_accum + padded * p.dq_columns);
  for (int i = threadIdx.x; i < p.block_m * p.dq_columns / 4; i += kThreads) {
    sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}

// One CTA a head.
__global__ void __launch_bounds__(kThreads)
    sum_dsinks_kernel(const __grid_constant__ BackwardScratch p) {
  const int head = blockIdx.x;
  const float sink = load_float(p.attention.sinks, head * p.attention.sinks.stride.head);
  float sum = 0.0f;
  for (int64_t batch = 0; batch < p.attention.batch; ++batch) {
    const Sequence sequence = sequence_of(p.attention, batch);
    const int64_t first = p.first_row(sequence, batch, head);
    for (int row = threadIdx.x; row < sequence.seqlen_q; row += kThreads) {
      const LseAndDelta lse_and_delta = p.lse_and_delta_of(first + row);
      const float probability = expf(sink - lse_and_delta.lse / p.lse_unit);
      if (lse_and_delta.lse != INFINITY) sum -= probability * lse_and_delta.delta;
    }
  }
  sum = block_sum<kThreads>(sum, reinterpret_cast<float*>(anyflash_smem));
  if (threadIdx.x == 0) store_float(p.dsinks, head * p.dsinks.stride.head, sum);
}

// One CTA a (batch or 1, head).
__global__ void __launch_bounds__(kThreads)
    sum_dalibi_slopes_kernel(const __grid_constant__ BackwardScratch p) {
  const int head = static_cast<int>(blockIdx.x) % p.attention.heads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) / p.attention.heads;
  const int64_t count = p.dalibi_slopes.stride.batch == 0 ? p.attention.batch : 1;
  const int64_t row_blocks = p.slope_sums_of_head(p.attention.seqlen_q);
  float sum = 0.0f;
  for (int64_t batch = first; batch < first + count; ++batch) {
    const float* const parts = p.slope_sums + (batch * p.attention.heads + head) * row_blocks;
    for (int64_t i = threadIdx.x; i < row_blocks; i += kThreads) sum += parts[i];
  }
  sum = block_sum<kThreads>(sum, reinterpret_cast<float*>(anyflash_smem));
  const Strides& stride = p.dalibi_slopes.stride;
  if (threadIdx.x == 0) {
    store_float(p.dalibi_slopes, first * stride.batch + head * stride.head, sum);
  }
}

}  // namespace

void backward_preprocess(const BackwardScratch& params, void* stream) {
  const int64_t blocks = ceil_div(int64_t{params.attention.seqlen_q}, params.block_m) *
                         params.attention.batch * params.attention.heads;
  if (blocks == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (params.dtype == DType::kFloat16) {
    launch<preprocess_kernel<__half>>(grid, dim3(kThreads), 0, stream, params);
  } else {
    launch<preprocess_kernel<__nv_bfloat16>>(grid, dim3(kThreads), 0, stream, params);
  }
}

void sum_dsinks(const BackwardScratch& params, void* stream) {
  launch<sum_dsinks_kernel>(dim3(params.attention.heads), dim3(kThreads), kSumBytes, stream,
                            params);
}

void sum_dalibi_slopes(const BackwardScratch& params, void* stream) {
  const int64_t outputs = params.attention.heads *
                          (params.dalibi_slopes.stride.batch == 0 ? 1 : params.attention.batch);
  if (outputs == 0) return;
  launch<sum_dalibi_slopes_kernel>(dim3(static_cast<unsigned>(outputs)), dim3(kThreads), kSumBytes,
                                   stream, params);
}

}  // namespace anyflash
