// See cuda/backward_preprocess.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "common/dependent_launch.h"
#include "common/element.h"
#include "common/launch.h"
#include "common/macros.h"
#include "common/math.h"
#include "common/reduce.h"
#include "common/softmax.h"
#include "cuda/backward_grid.h"
#include "cuda/backward_preprocess.h"
#include "variant/broadcast_tensor.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

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

// A row of the tile's head, of out or another tensor like it.
template <class T>
ANYFLASH_DEVICE const T* row_of(const void* data, const Strides& stride,
                                const ForwardWorkTile& tile, int row) {
  return first_of<const T>(data, stride, tile.sequence, tile.head, row);
}

// The columns [col, col + 8) of a row, 0 where there are none: 16-bit rows hold whole vectors,
// float32 ones are read element by element.
template <class Element>
ANYFLASH_DEVICE void load_columns(float (&to)[kVector], const void* data, DType dtype,
                                  const Strides& stride, const ForwardWorkTile& tile, int row,
                                  int col, int columns) {
  if (dtype == DType::kFloat32) {
    const float* const from = row_of<float>(data, stride, tile, row);
    for (int i = 0; i < kVector; ++i) {
      to[i] = col + i < columns ? from[(col + i) * stride.col] : 0.0f;
    }
  } else {
    const auto all =
        *reinterpret_cast<const Vector<Element>*>(row_of<Element>(data, stride, tile, row) + col);
    for (int i = 0; i < kVector; ++i) to[i] = to_float(all.x[i]);
  }
}

ANYFLASH_DEVICE float row_sum(float x) {
  for (int distance = kRowThreads / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Of a row that exists, from its LSE and the sum of dout * out.
ANYFLASH_DEVICE LseAndDelta lse_and_delta_of(const BackwardScratch& p, const ForwardWorkTile& tile,
                                             int row, float lse, float sum) {
  if (fabsf(lse) == INFINITY) return {INFINITY, 0.0f};
  const float dlse = p.dlse == nullptr ? 0.0f : *row_of<float>(p.dlse, p.dlse_stride, tile, row);
  return {lse * p.lse_unit, sum - dlse};
}

// Beyond a padded tensor's end, no row is read.
ANYFLASH_DEVICE LseAndDelta no_row(const BackwardScratch& p) {
  return {p.attention.cu_seqlens_q != nullptr ? INFINITY : kFarLse, 0.0f};
}

// LSE and delta of the tile's rows r, r + kStride, ... of 16-bit tensors: kRows of them. All loads
// of kPieces * 64 columns come before what is done with them, since memory is far.
template <class Element, int kRows, int kPieces>
ANYFLASH_DEVICE void preprocess_rows(const BackwardScratch& p, const ForwardWorkTile& tile, int r,
                                     int64_t first_row) {
  constexpr int kStride = kThreads / kRowThreads;
  const int lane = static_cast<int>(threadIdx.x) % kRowThreads;
  const int columns = p.attention.head_dim_v;
  const int rows = min(p.block_m, tile.sequence.seqlen_q - tile.first_row);
  float lse[kRows];
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = r + i * kStride;
    lse[i] = row < rows ? *row_of<float>(p.lse, p.lse_stride, tile, tile.first_row + row) : 0.0f;
    sums[i] = 0.0f;
  }
#pragma unroll 1
  for (int first = 0; first < columns; first += kPieces * kRowThreads * kVector) {
    // Not of Elements: each would take a register.
    uint4 dout[kRows][kPieces];
    uint4 out[kRows][kPieces];
    const auto for_each_piece = [&](const auto& function) ANYFLASH_INLINE_LAMBDA {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const int col = first + (piece * kRowThreads + lane) * kVector;
          if (r + i * kStride < rows && col < columns) function(i, piece, col);
        }
      }
    };
    for_each_piece([&](int i, int piece, int col) ANYFLASH_INLINE_LAMBDA {
      const int row = tile.first_row + r + i * kStride;
      dout[i][piece] =
          *reinterpret_cast<const uint4*>(row_of<Element>(p.dout, p.dout_stride, tile, row) + col);
      out[i][piece] =
          *reinterpret_cast<const uint4*>(row_of<Element>(p.out, p.out_stride, tile, row) + col);
    });
    for_each_piece([&](int i, int piece, int col) ANYFLASH_INLINE_LAMBDA {
      const auto& x = reinterpret_cast<const Vector<Element>&>(dout[i][piece]);
      const auto& y = reinterpret_cast<const Vector<Element>&>(out[i][piece]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sums[i] += col + j < columns ? to_float(x.x[j]) * to_float(y.x[j]) : 0.0f;
      }
    });
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = r + i * kStride;
    const float sum = row_sum(sums[i]);
    if (lane != 0 || row >= p.block_m) continue;
    p.set_lse_and_delta(
        first_row + row,
        row < rows ? lse_and_delta_of(p, tile, tile.first_row + row, lse[i], sum) : no_row(p));
  }
}

// The same of one row, where dout or out is float32. A float32 dout is also rounded.
template <class Element>
ANYFLASH_DEVICE void preprocess_float_row(const BackwardScratch& p, const ForwardWorkTile& tile,
                                          int r, int64_t first_row) {
  const int lane = static_cast<int>(threadIdx.x) % kRowThreads;
  const int columns = p.attention.head_dim_v;
  const int row = tile.first_row + r;
  const bool exists = row < tile.sequence.seqlen_q;
  float sum = 0.0f;
  for (int col = lane * kVector; exists && col < columns; col += kRowThreads * kVector) {
    float dout[kVector];
    float out[kVector];
    load_columns<Element>(dout, p.dout, p.dout_dtype, p.dout_stride, tile, row, col, columns);
    load_columns<Element>(out, p.out, p.out_dtype, p.out_stride, tile, row, col, columns);
    if (p.dout_rounded != nullptr) {
      Vector<Element> rounded;
      for (int i = 0; i < kVector; ++i) {
        round_to(dout[i], rounded.x[i]);
        dout[i] = to_float(rounded.x[i]);  // delta belongs to the dP that the kernels compute
      }
      const Attention& a = p.attention;
      const int64_t rows = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
      const int64_t at =
          (tile.sequence.batch * a.heads + tile.head) * rows + tile.sequence.first_q + row;
      auto* const rounded_row =
          static_cast<Element*>(p.dout_rounded) + at * ceil_div(columns, kVector) * kVector;
      *reinterpret_cast<Vector<Element>*>(rounded_row + col) = rounded;
    }
    for (int i = 0; i < kVector; ++i) sum += col + i < columns ? dout[i] * out[i] : 0.0f;
  }
  sum = row_sum(sum);
  if (lane != 0) return;
  LseAndDelta values = no_row(p);
  if (exists) {
    values = lse_and_delta_of(p, tile, row, *row_of<float>(p.lse, p.lse_stride, tile, row), sum);
  }
  p.set_lse_and_delta(first_row + r, values);
}

// One CTA a tile of block_m rows of a (batch, head) pair. kHasFloat: dout or out is float32.
template <class Element, bool kHasFloat>
__global__ void __launch_bounds__(kThreads, kHasFloat ? 1 : 4)
    preprocess_kernel(const __grid_constant__ BackwardScratch p) {
  wait_previous_kernel();
  allow_next_kernel();  // which may load K and V before it waits
  const Attention& a = p.attention;
  const ForwardWorkTile tile = row_block_at(p, p.block_m, static_cast<int>(blockIdx.x));
  if (tile.first_row >= tile.sequence.seqlen_q) return;
  const int64_t first_row = p.first_row(tile.sequence, tile.batch, tile.head) + tile.first_row;

  if (p.dq_accum != nullptr) {  // first, since nobody waits for a store
    auto* const sums = reinterpret_cast<float4*>(p.dq_accum + first_row * p.dq_columns);
    for (int i = threadIdx.x; i < p.block_m * p.dq_columns / 4; i += kThreads) {
      sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  if (p.slopes_log2 != nullptr && tile.first_row == 0 && threadIdx.x == 0) {
    const Strides& stride = a.alibi_slopes.stride;
    const float slope =
        load_float(a.alibi_slopes, tile.batch * stride.batch + tile.head * stride.head);
    p.slopes_log2[tile.batch * a.heads + tile.head] = slope * kLog2E;
  }
  constexpr int kRows = kThreads / kRowThreads;  // at a time
  int r = static_cast<int>(threadIdx.x) / kRowThreads;
  if constexpr (kHasFloat) {
    for (; r < p.block_m; r += kRows) preprocess_float_row<Element>(p, tile, r, first_row);
  } else if (a.head_dim_v <= 64) {
#pragma unroll 1
    for (; r < p.block_m; r += 2 * kRows) preprocess_rows<Element, 2, 1>(p, tile, r, first_row);
  } else {
#pragma unroll 1
    for (; r < p.block_m; r += kRows) preprocess_rows<Element, 1, 2>(p, tile, r, first_row);
  }
}

// Delta of a row, without what dout holds where out is 0. With a sink, the LSE of a row that sees
// no key is finite: its out is 0, and its dout may be anything.
ANYFLASH_DEVICE float delta_where_out_counts(const BackwardScratch& p, const Sequence& sequence,
                                             int head, int row) {
  const auto place = [&](const Strides& stride) {
    return sequence.batch * stride.batch + head * stride.head +
           (sequence.first_q + row) * stride.row;
  };
  const BroadcastTensor dout{p.dout, p.dout_dtype, p.dout_stride};
  const BroadcastTensor out{p.out, p.out_dtype, p.out_stride};
  float sum = 0.0f;
  for (int col = 0; col < p.attention.head_dim_v; ++col) {
    const float x = load_float(out, place(out.stride) + col * out.stride.col);
    if (x != 0.0f) sum += x * load_float(dout, place(dout.stride) + col * dout.stride.col);
  }
  return p.dlse == nullptr ? sum : sum - p.dlse[place(p.dlse_stride)];
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
      auto [lse, delta] = p.lse_and_delta_of(first + row);
      if (lse == INFINITY) continue;
      if (delta != delta) delta = delta_where_out_counts(p, sequence, head, row);
      sum -= expf(sink - lse / p.lse_unit) * delta;
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
  const auto run = [&](auto element) {
    using Element = decltype(element);
    const auto launch_kernel = [&](auto has_float) {
      launch<preprocess_kernel<Element, decltype(has_float)::value>>(
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, params,
          LaunchOrder::kWhenAllowed);
    };
    if (params.dout_dtype == DType::kFloat32 || params.out_dtype == DType::kFloat32) {
      launch_kernel(std::true_type{});
    } else {
      launch_kernel(std::false_type{});
    }
  };
  if (params.dtype == DType::kFloat16) run(__half{});
  else run(__nv_bfloat16{});
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
