// Host side of the Hopper forward kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/dependent_launch.h"
#include "common/element.h"
#include "common/launch.h"
#include "common/math.h"
#include "cuda/column_pass.h"
#include "cuda/descriptor.h"
#include "cuda/key_range_bounds.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm90/family.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/traits.h"
#include "sm90/tma.h"
#include "variant/forward_variants.h"

namespace anyflash::sm90 {

// Q in whole tiles, O in a warp's rows.
template <class Traits>
void make_query_maps(ForwardLaunch& launch) {
  const Attention& a = launch.attention;
  constexpr DType kType = kElementType<typename Traits::Element>;
  const TensorMapShape queries = query_shape(a, kType, Traits::kWarpgroupRows);
  launch.q_map = make_tensor_map(a.q, a.q_stride, queries);
  if (!Traits::kOutputInQ || launch.out_dtype == DType::kFloat32) return;
  TensorMapShape outputs = queries;
  outputs.columns = a.head_dim_v;
  outputs.box_rows = 16;
  launch.out_map = make_tensor_map(launch.out, launch.out_stride, outputs);
}

template <class Counter>
__global__ void clear_counter(Counter* counter) {
  allow_next_kernel();
  wait_previous_kernel();
  if (threadIdx.x == 0) *counter = 0;
}

// Whether a counter says which block a CTA takes next. Blocks differ in work without a mask, too: a
// head's last one may have few rows, and at a fixed distance the same CTAs would always get it.
template <class Traits>
bool needs_counter(const Attention& a, const LaunchContext& context) {
  return forward_grid_blocks(a, Traits::kBlockM) > context.multiprocessors;
}

// The bounds of key ranges, and the counter behind them.
template <class Traits>
std::size_t forward_scratch_bytes(const ForwardParams& params, const LaunchContext& context) {
  return key_range_bounds_bytes(params.attention) +
         (needs_counter<Traits>(params.attention, context) ? sizeof(unsigned) : 0);
}

// Of all heads of a section: CTAs drift apart in long sequences, and K and V have to stay in the L2
// cache meanwhile (EXPERIMENTS.md).
inline constexpr int64_t kMostSectionKeys = int64_t{1} << 18;

// One pass (cuda/column_pass.h): V and the results are those of its columns.
template <class Traits, class Variant>
void launch_pass(ForwardLaunch& prepared, const LaunchContext& context) {
  const Attention& a = prepared.attention;
  if (a.key_ranges.data != nullptr) {
    make_key_range_bounds(a, context.stream, prepared.taken);
  } else if (prepared.taken != nullptr) {
    launch<clear_counter<unsigned>>(dim3(1), dim3(32), 0, context.stream, prepared.taken,
                                    LaunchOrder::kWhenAllowed);
  }
  make_query_maps<Traits>(prepared);
  const TensorMapShape keys = key_shape(a, kElementType<typename Traits::Element>, Traits::kBlockN);
  if (keys.rows > 0) make_key_maps(prepared, keys);
  else prepared.k_map = prepared.v_map = prepared.q_map;  // of pointers and strides that may be any
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(std::min(prepared.blocks, context.multiprocessors))),
      dim3(Traits::kCtaThreads), sizeof(typename Traits::SharedStorage), context.stream, prepared,
      LaunchOrder::kWhenAllowed);
}

// softmax_scale is positive. CTAs are persistent, at most one a multiprocessor: a block's first
// loads and its results then run beside the products of others.
template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, const LaunchContext& context) {
  const Attention& a = params.attention;
  const int64_t row_blocks = ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM);
  const int blocks = forward_grid_blocks(a, Traits::kBlockM);
  ForwardLaunch prepared{};
  static_cast<ForwardParams&>(prepared) = params;
  prepared.attention.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  prepared.blocks = blocks;
  prepared.scheduler =
      LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                       heads_per_l2_section(a, context.multiprocessors, kMostSectionKeys));
  prepared.attention.key_range_bounds = static_cast<IntervalBounds*>(context.scratch);
  if (needs_counter<Traits>(a, context)) {
    prepared.taken = reinterpret_cast<unsigned*>(static_cast<char*>(context.scratch) +
                                                 key_range_bounds_bytes(a));
  }
  launch_passes<Traits>(prepared, [&] { launch_pass<Traits, Variant>(prepared, context); });
}

template <class Element, int kHeadDim, int kHeadDimV, class Variant>
constexpr KernelDescriptor forward_descriptor(const char* name) {
  using Traits =
      ForwardTraits<Element, kHeadDim, kHeadDimV, TableConfig<kHeadDim, kHeadDimV, Variant>>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kForward);
  d.head_dim_v = kHeadDimV;
  d.features = Variant::kFeatures;
  d.least_head_dim = least_head_dim(Variant::kFeatures);
  d.tile = {Traits::kBlockM, Traits::kBlockN, Traits::kCtaThreads / 32, 1};
  d.forward = {forward_scratch_bytes<Traits>, launch_forward<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm90
