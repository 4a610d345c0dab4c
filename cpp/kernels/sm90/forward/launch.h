// Host side of the Hopper forward kernels.
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "common/launch.h"
#include "common/softmax.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/traits.h"
#include "sm90/tma.h"

namespace anyflash::sm90 {

// The maps of one call: Q and K/V in whole tiles, O in a warp's rows.
template <class Traits>
void make_tensor_maps(ForwardLaunch& launch) {
  const Attention& a = launch.attention;
  constexpr DType kType = std::is_same_v<typename Traits::Element, cutlass::half_t>
                              ? DType::kFloat16
                              : DType::kBFloat16;
  const bool packed = a.cu_seqlens_q != nullptr;
  TensorMapShape queries{};
  queries.dtype = kType;
  queries.columns = a.head_dim;
  queries.rows = packed ? a.total_q : a.seqlen_q;
  queries.heads = a.heads;
  queries.batch = packed ? 1 : a.batch;
  queries.box_rows = Traits::kBlockM;
  launch.q_map = make_tensor_map(a.q, a.q_stride, queries);

  TensorMapShape keys = queries;
  keys.rows = packed ? a.total_k : a.seqlen_k;
  keys.heads = a.heads_k;
  keys.box_rows = Traits::kBlockN;
  const bool any = keys.rows > 0;  // if not, the pointers may be null
  launch.k_map = make_tensor_map(any ? a.k : a.q, a.k_stride, keys);
  keys.columns = a.head_dim_v;
  launch.v_map = make_tensor_map(any ? a.v : a.q, a.v_stride, keys);

  if (launch.out_dtype == DType::kFloat32) return;
  TensorMapShape outputs = queries;
  outputs.columns = a.head_dim_v;
  outputs.box_rows = 16;
  launch.out_map = make_tensor_map(launch.out, launch.out_stride, outputs);
}

// softmax_scale is positive. `ctas`: 0 for one a block of rows, else so many at most, which take
// blocks one after the other.
template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, int ctas, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t row_blocks = (int64_t{a.seqlen_q} + Traits::kBlockM - 1) / Traits::kBlockM;
  const int64_t blocks = row_blocks * a.batch * a.heads;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads * ceil(seqlen_q / " + std::to_string(Traits::kBlockM) + ") is " +
                    std::to_string(blocks) + "; a CUDA grid holds at most 2147483647 blocks");
  }
  if (blocks == 0) return;
  ForwardLaunch prepared{};
  static_cast<ForwardParams&>(prepared) = params;
  prepared.attention.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  prepared.blocks = static_cast<int>(blocks);
  prepared.scheduler = LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                                        heads_per_l2_section(a, context.multiprocessors));
  make_tensor_maps<Traits>(prepared);
  const int64_t grid = ctas == 0 ? blocks : std::min<int64_t>(blocks, ctas);
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(grid)), dim3(Traits::kCtaThreads),
      sizeof(typename Traits::SharedStorage), context.stream, prepared);
}

}  // namespace anyflash::sm90
