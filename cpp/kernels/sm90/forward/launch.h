// Host side of the Hopper forward kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/element.h"
#include "common/launch.h"
#include "common/math.h"
#include "cuda/descriptor.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm90/family.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/traits.h"
#include "sm90/tma.h"
#include "variant/forward_variants.h"

namespace anyflash::sm90 {

// The maps of one call: Q and K/V in whole tiles, O in a warp's rows.
template <class Traits>
void make_tensor_maps(ForwardLaunch& launch) {
  const Attention& a = launch.attention;
  const bool packed = a.cu_seqlens_q != nullptr;
  TensorMapShape queries{};
  queries.dtype = kElementType<typename Traits::Element>;
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
  if (keys.rows == 0) {  // nothing is loaded, and pointers and strides may be anything
    launch.k_map = launch.v_map = launch.q_map;
  } else {
    launch.k_map = make_tensor_map(a.k, a.k_stride, keys);
    keys.columns = a.head_dim_v;
    launch.v_map = make_tensor_map(a.v, a.v_stride, keys);
  }

  if (launch.out_dtype == DType::kFloat32) return;
  TensorMapShape outputs = queries;
  outputs.columns = a.head_dim_v;
  outputs.box_rows = 16;
  launch.out_map = make_tensor_map(launch.out, launch.out_stride, outputs);
}

// How many CTAs there are. Without a mask they are persistent: as many as multiprocessors, and each
// loads its next block of rows while it writes the results of the one before. With a mask, blocks
// differ in work: there is a CTA for each, the longest first.
inline int forward_ctas(const Attention& a, int blocks, const LaunchContext& context) {
  return a.window.is_bounded() ? blocks : std::min(blocks, context.multiprocessors);
}

// softmax_scale is positive. `ctas`: at most so many, which take blocks one after the other; 0: as
// forward_ctas() says.
template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, const LaunchContext& context, int ctas = 0) {
  const Attention& a = params.attention;
  const int64_t row_blocks = ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM);
  const int blocks = forward_grid_blocks(a, Traits::kBlockM);
  ForwardLaunch prepared{};
  static_cast<ForwardParams&>(prepared) = params;
  prepared.attention.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  prepared.blocks = blocks;
  prepared.scheduler = LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                                        heads_per_l2_section(a, context.multiprocessors));
  make_tensor_maps<Traits>(prepared);
  const int grid = ctas == 0 ? forward_ctas(a, blocks, context) : std::min(blocks, ctas);
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(grid)), dim3(Traits::kCtaThreads),
      sizeof(typename Traits::SharedStorage), context.stream, prepared);
}

template <class Element, int kHeadDim, int kHeadDimV, class Variant>
constexpr KernelDescriptor forward_descriptor(const char* name) {
  using Traits = ForwardTraits<Element, kHeadDim, kHeadDimV>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kForward);
  d.features = Variant::kFeatures;
  d.tile = {Traits::kBlockM, Traits::kBlockN, Traits::kCtaThreads / 32, 1};
  d.forward.scratch_bytes = [](const ForwardParams&, int) { return std::size_t{0}; };
  d.forward.launch = [](const ForwardParams& params, const LaunchContext& context) {
    launch_forward<Traits, Variant>(params, context);
  };
  return d;
}

}  // namespace anyflash::sm90
