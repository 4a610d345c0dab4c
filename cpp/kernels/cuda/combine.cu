// See combine.h. With weights exp(lse_s) / (exp(sink) + sum exp(lse)),  out = sum_s weight_s out_s.
// Splits without keys (lse -inf) have not written theirs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "common/dependent_launch.h"
#include "common/element.h"
#include "common/launch.h"
#include "common/sink.h"
#include "common/store.h"
#include "cuda/combine.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"

namespace anyflash {

namespace {

constexpr int kWarps = kPartSums;
constexpr int kLanes = 32;
constexpr int kThreads = kWarps * kLanes;
constexpr int kColumns = 256;                    // of a row that are joined at once
constexpr int kPerLane = kColumns / kLanes / 4;  // pieces of four columns
constexpr int kParts = 8;                        // that are loaded at once

// Of the warps that share a row.
template <int kRowWarps>
struct Smem {
  alignas(16) float out[kRowWarps][kColumns];
  float warp[kRowWarps];
  float weight[kRowWarps * kLanes];  // of splits
  bool seen[kRowWarps * kLanes];
};

// kColumns columns of a row of the result by kRowWarps warps, which are a whole CTA if there are
// more than one.
template <int kRowWarps>
class RowCombiner {
  static constexpr int kRowThreads = kRowWarps * kLanes;
  using Sums = PartSums<kPartSums / kRowWarps>;
  static_assert(kParts % kPartSums == 0);

 public:
  __device__ RowCombiner(const CombineParams& params, Smem<kRowWarps>& smem)
      : params_(params),
        p_(params.result),
        smem_(smem),
        rows_(lse_stride_of_split(params.result)),
        columns_(part_columns(params.result)),
        thread_(static_cast<int>(threadIdx.x) % kRowThreads) {}

  // The columns from first_column on, and with the first ones the row's LSE.
  __device__ void combine(int64_t row, int first_column) {
    first_column_ = first_column;
    const Place place = place_of(row);
    if (!place.exists) return;
    const auto [exists, batch, head, query] = place;
    const float sink = p_.attention.sinks.data == nullptr
                           ? -INFINITY
                           : load_float(p_.attention.sinks, head * p_.attention.sinks.stride.head);
    float top = sink;
    for (int s = thread_; s < p_.num_splits; s += kRowThreads) top = fmaxf(top, lse(s, row));
    top = reduce(top, [](float a, float b) { return fmaxf(a, b); });
    const float reference = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
    for (int s = thread_; s < p_.num_splits; s += kRowThreads) {
      sum += exp2f((lse(s, row) - reference) * kLog2E);
    }
    sum = reduce(sum, [](float a, float b) { return a + b; });
    sum += sink_term(sink, reference);
    if (thread_ == 0 && first_column == 0 && p_.lse != nullptr) {
      const Strides& stride = p_.lse_stride;
      p_.lse[batch * stride.batch + head * stride.head + query * stride.row] =
          sum == 0.0f ? -INFINITY : reference + logf(sum);
    }

    Sums sums[kPerLane];
    add_splits(row, reference, sum == 0.0f ? 0.0f : 1.0f / sum, sums);
    float acc[kPerLane][4];
#pragma unroll
    for (int i = 0; i < kPerLane * 4; ++i) acc[i / 4][i % 4] = sums[i / 4].column(i % 4);
    if (!add_warps(acc)) return;
    const Strides& stride = p_.out_stride;
    const int64_t offset = batch * stride.batch + query * stride.row + head * stride.head;
    if (p_.out_dtype == DType::kFloat32) store(static_cast<float*>(p_.out) + offset, acc);
    else if (params_.q_dtype == DType::kFloat16) store(static_cast<__half*>(p_.out) + offset, acc);
    else store(static_cast<__nv_bfloat16*>(p_.out) + offset, acc);
  }

 private:
  // Where a row of the parts goes.
  struct Place {
    bool exists;
    int64_t batch;  // these as in p_.out
    int64_t head;
    int64_t query;
  };

  __device__ Place place_of(int64_t row) const {
    const Attention& a = p_.attention;
    const int64_t rows = part_rows(p_);
    const Place place{true, row / rows / a.heads, row / rows % a.heads, row % rows};
    if (a.cu_seqlens_q == nullptr) return place;
    const int64_t batch =
        p_.packed_parts ? sequence_of_row(a.cu_seqlens_q, a.batch, place.query) : place.batch;
    const PackedRows of = packed_rows(a.cu_seqlens_q, batch, a.total_q, a.seqlen_q);
    const int64_t query = p_.packed_parts ? place.query - of.first : place.query;
    const bool exists = p_.least_queries <= of.length && of.length <= p_.most_queries &&
                        0 <= query && query < of.length;
    return {exists, 0, place.head, of.first + query};
  }

  static __device__ void sync() {
    if constexpr (kRowWarps == 1) __syncwarp();
    else __syncthreads();
  }

  __device__ float lse(int64_t split, int64_t row) const {
    return params_.lse[split * rows_ + row];
  }

  // Over the row's threads, in the same order whenever it runs.
  template <class Op>
  __device__ float reduce(float x, const Op& op) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    if constexpr (kRowWarps == 1) return x;
    sync();  // every warp has done with what lay there
    if (thread_ % kLanes == 0) smem_.warp[thread_ / kLanes] = x;
    sync();  // all warps' numbers are there
    x = smem_.warp[0];
#pragma unroll
    for (int warp = 1; warp < kRowWarps; ++warp) x = op(x, smem_.warp[warp]);
    return x;
  }

  // sums += weight * part over this warp's splits, of this lane's columns.
  __device__ void add_splits(int64_t row, float reference, float inverse, Sums (&sums)[kPerLane]) {
    for (int first = 0; first < p_.num_splits; first += kRowThreads) {
      // Weights first: then the loads of the parts depend on nothing that has to be waited for.
      sync();  // every warp has done with the weights before
      const int split = first + thread_;
      const float part = split < p_.num_splits ? lse(split, row) : -INFINITY;
      smem_.weight[thread_] = exp2f((part - reference) * kLog2E) * inverse;
      smem_.seen[thread_] = part != -INFINITY;
      sync();  // the weights are there
      const int count = min(kRowThreads, p_.num_splits - first);
      for (int i = thread_ / kLanes; i < count; i += kParts * kRowWarps) {
        add_parts(first, i, row, sums);
      }
    }
  }

  // kParts of them: their loads overlap. What a part has between its columns and its end is read,
  // but not written to the result.
  __device__ void add_parts(int first, int split, int64_t row, Sums (&sums)[kPerLane]) const {
    const int lane = thread_ % kLanes;
    float4 parts[kParts][kPerLane];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = split + i * kRowWarps;
      const bool seen = at < kRowThreads && smem_.seen[at];
      const int64_t part = ((first + at) * rows_ + row) * columns_;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int col = first_column_ + (j * kLanes + lane) * 4;
        parts[i][j] = seen && col < columns_
                          ? *reinterpret_cast<const float4*>(params_.out + part + col)
                          : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = split + i * kRowWarps;
      const float weight = at < kRowThreads ? smem_.weight[at] : 0.0f;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) sums[j].add(i, weight, parts[i][j]);
    }
  }

  // The sum over the warps, in the first one; false in the others.
  __device__ bool add_warps(float (&acc)[kPerLane][4]) {
    if constexpr (kRowWarps == 1) return true;
    const int warp = thread_ / kLanes;
    const int first = thread_ % kLanes * 4;
#pragma unroll
    for (int i = 0; i < kPerLane * 4; ++i) {
      smem_.out[warp][i / 4 * kLanes * 4 + first + i % 4] = acc[i / 4][i % 4];
    }
    sync();  // every warp's sums are there
    if (warp != 0) return false;
#pragma unroll
    for (int w = 1; w < kRowWarps; ++w) {
#pragma unroll
      for (int i = 0; i < kPerLane * 4; ++i) {
        acc[i / 4][i % 4] += smem_.out[w][i / 4 * kLanes * 4 + first + i % 4];
      }
    }
    return true;
  }

  template <class Out>
  __device__ void store(Out* row, const float (&acc)[kPerLane][4]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int col = first_column_ + (i * kLanes + thread_ % kLanes) * 4;
      store_four(acc[i], row + col * p_.out_stride.col, p_.out_stride.col,
                 p_.attention.head_dim_v - col);
    }
  }

  const CombineParams& params_;
  const KvCacheParams& p_;
  Smem<kRowWarps>& smem_;
  int64_t rows_;
  int columns_;
  int first_column_ = 0;
  int thread_;  // of the row
};

// Pieces of kColumns columns of all rows.
__host__ __device__ int64_t pieces(const CombineParams& params) {
  return lse_stride_of_split(params.result) * ceil_div(part_columns(params.result), kColumns);
}

template <int kRowWarps>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams params) {
  allow_next_kernel();
  wait_previous_kernel();
  constexpr int kRows = kWarps / kRowWarps;
  const int place = static_cast<int>(threadIdx.x) / (kRowWarps * kLanes);
  RowCombiner<kRowWarps> combiner(params, reinterpret_cast<Smem<kRowWarps>*>(anyflash_smem)[place]);
  const int64_t rows = lse_stride_of_split(params.result);
  const int64_t count = pieces(params);
  for (int64_t i = int64_t{blockIdx.x} * kRows + place; i < count;
       i += int64_t{gridDim.x} * kRows) {
    const int64_t columns = i / rows;
    combiner.combine(i - columns * rows, static_cast<int>(columns) * kColumns);
  }
}

template <int kRowWarps>
void launch_combine(const CombineParams& params, void* stream) {
  constexpr int kRows = kWarps / kRowWarps;
  launch_grid_stride<combine_kernel<kRowWarps>>(pieces(params), kRows, kThreads,
                                                kRows * sizeof(Smem<kRowWarps>), stream, params,
                                                LaunchOrder::kWhenAllowed);
}

}  // namespace

void combine_splits(const CombineParams& params, void* stream) {
  // A warp a row where it has all of its splits on their way at once.
  if (params.result.num_splits <= kParts) launch_combine<1>(params, stream);
  else launch_combine<kWarps>(params, stream);
}

}  // namespace anyflash
