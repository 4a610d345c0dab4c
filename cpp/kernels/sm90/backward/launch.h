// Host side of the Hopper backward: one KernelDescriptor per (dtype, head dims).
//
//   key_range_bounds_kernel     bounds of key ranges, where there are any
//   preprocess_kernel           delta and LSE of every row; dq_accum = 0
//   backward_kernel             dK, dV; adds to dq_accum. wide_backward_kernel for wide heads
//   reduce_gqa_partials_kernel  dK, dV, where the heads of a group come in parts
//   postprocess_dq_kernel       dQ from dq_accum
//   dq_by_rows_kernel           dQ without sums in the workspace, instead
//
// The first two, the main kernel and postprocess_dq_kernel may begin before the kernel before them
// has ended (LaunchOrder). Preprocessing lets the main kernel begin when it has waited itself: that
// one loads K and V before it waits, and the last one looks up its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/launch.h"
#include "common/math.h"
#include "common/softmax.h"
#include "cuda/backward_launch.h"
#include "cuda/backward_preprocess.h"
#include "cuda/descriptor.h"
#include "cuda/key_range_bounds.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm90/backward/config.h"
#include "sm90/backward/dq_by_rows.h"
#include "sm90/backward/kernel.h"
#include "sm90/backward/launch_params.h"
#include "sm90/backward/traits.h"
#include "sm90/backward/variants.h"
#include "sm90/backward/wide_kernel.h"
#include "sm90/backward/wide_traits.h"
#include "sm90/family.h"
#include "sm90/tma.h"
#include "variant/backward_scratch.h"

namespace anyflash::sm90 {

// Maps of Q and dO by boxes of `box_rows` rows, and of K and V by boxes of `box_keys` keys. There
// is at least one key.
template <class Element, class Launch>
void make_tensor_maps(Launch& launch, int box_rows, int box_keys) {
  const Attention& a = launch.attention;
  constexpr DType kType = kElementType<Element>;
  make_key_maps(launch, key_shape(a, kType, box_keys));

  TensorMapShape rows = query_shape(a, kType, box_rows);
  if (rows.rows == 0) {  // nothing is loaded, and pointers and strides may be anything
    launch.q_map = launch.dout_map = launch.k_map;
    return;
  }
  launch.q_map = make_tensor_map(a.q, a.q_stride, rows);
  rows.columns = a.head_dim_v;
  launch.dout_map = make_tensor_map(launch.dout, launch.dout_stride, rows);
}

// The kernel that computes dK and dV, and the one that adds up parts of them.
template <class Traits, bool kAddsToDq>
constexpr auto main_kernel() {
  if constexpr (Traits::kIsWide) return wide_backward_kernel<Traits>;
  else return backward_kernel<Traits, kAddsToDq>;
}
template <class Traits>
constexpr auto reduce_kernel() {
  if constexpr (Traits::kIsWide) return wide_reduce_gqa_partials_kernel<Traits>;
  else return reduce_gqa_partials_kernel<Traits>;
}

// dK, dV, and dq_accum unless it is null. There are keys.
template <class Traits>
void launch_main_kernel(const BackwardScratch& scratch, void* stream) {
  BackwardLaunch prepared{};
  static_cast<BackwardScratch&>(prepared) = scratch;
  const Attention& a = prepared.attention;
  make_tensor_maps<typename Traits::Element>(prepared, Traits::kBlockM, Traits::kBlockN);
  if constexpr (!Traits::kIsWide) {
    if (prepared.gqa_partials == nullptr && prepared.grad_dtype != DType::kFloat32) {
      TensorMapShape keys = key_shape(a, kElementType<typename Traits::Element>, kStagedRows);
      prepared.dk_map = make_tensor_map(prepared.dk, prepared.dk_stride, keys);
      keys.columns = a.head_dim_v;
      prepared.dv_map = make_tensor_map(prepared.dv, prepared.dv_stride, keys);
    }
  }
  const int64_t key_blocks = ceil_div(int64_t{a.seqlen_k}, Traits::kBlockN) * a.batch * a.heads_k;
  // Without preprocessing the kernel before may be the one that writes K.
  const LaunchOrder order = a.seqlen_q > 0 && scratch.begins_dq() ? LaunchOrder::kWhenAllowed
                                                                  : LaunchOrder::kAfterPrevious;
  const auto run = [&](auto adds_to_dq) {
    launch_blocks<main_kernel<Traits, decltype(adds_to_dq)::value>(), Traits, Traits::kCtaThreads>(
        key_blocks * prepared.gqa_splits * Traits::kCtas, sizeof(typename Traits::SharedStorage),
        stream, prepared, {order, Traits::kCtas});
  };
  if (prepared.dq_accum != nullptr) run(std::true_type{});
  else run(std::false_type{});
  if (prepared.gqa_partials != nullptr) {
    launch_blocks<reduce_kernel<Traits>(), Traits>(key_blocks * Traits::kCtas, 0, stream, scratch);
  }
}

inline int64_t number_of_keys(const Attention& a) {
  return a.cu_seqlens_k != nullptr ? a.total_k : a.batch * a.seqlen_k;
}

template <class Traits>
void launch_dq_by_rows(const BackwardScratch& scratch, const LaunchContext& context) {
  DqByRowsLaunch prepared{};
  static_cast<BackwardScratch&>(prepared) = scratch;
  const Attention& a = prepared.attention;
  const int64_t row_blocks = ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM);
  prepared.scheduler =
      LptTileScheduler(a.batch, a.heads, a.heads / a.heads_k, row_blocks,
                       heads_per_l2_section(a, context.multiprocessors / Traits::kCtas));
  if (number_of_keys(a) > 0) {
    make_tensor_maps<typename Traits::Element>(prepared, 64, Traits::kBlockN);
  }
  launch_blocks<dq_by_rows_kernel<Traits>, Traits, Traits::kCtaThreads>(
      row_blocks * a.batch * a.heads * Traits::kCtas, sizeof(typename Traits::SharedStorage),
      context.stream, prepared, {LaunchOrder::kAfterPrevious, Traits::kCtas});
}

// The gradient of ALiBi's slopes comes with dQ by rows.
inline BackwardScratch scratch_of(const BackwardParams& params) {
  BackwardScratch scratch{params};
  scratch.deterministic |= params.dalibi_slopes.data != nullptr;
  return scratch;
}

template <class Traits>
std::size_t scratch_bytes(const BackwardParams& params, const LaunchContext&) {
  BackwardScratch scratch = scratch_of(params);
  return place_scratch<Traits>(scratch, nullptr);
}

// softmax_scale is positive.
template <class Traits, class RowTraits, class Variant>
void launch_backward(const BackwardParams& params, const LaunchContext& context) {
  BackwardScratch p = scratch_of(params);
  Attention& a = p.attention;
  p.dtype = kElementType<typename Traits::Element>;
  place_scratch<Traits>(p, static_cast<char*>(context.scratch));
  p.key_scheduler = key_scheduler_of<Traits>(
      p, backward_heads_per_wave(a, Traits::kBlockN, context.multiprocessors / Traits::kCtas));
  a.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  p.lse_unit = Variant::kLseUnit;
  p.ds_scale = static_cast<float>(a.softmax_scale) * Variant::ds_factor(p);

  void* const stream = context.stream;
  make_key_range_bounds(a, stream);
  if (p.begins_dq()) backward_preprocess(p, stream);
  use_rounded_dout(p);
  if (number_of_keys(a) > 0) launch_main_kernel<Traits>(p, stream);
  if constexpr (Traits::kIsWide) {
    launch_dq_by_rows<RowTraits>(p, context);
  } else if (p.deterministic) {
    launch_dq_by_rows<RowTraits>(p, context);
  } else if (p.ends_dq()) {
    const bool is_first = !p.begins_dq() && number_of_keys(a) == 0;
    launch_blocks<postprocess_dq_kernel<Traits>, Traits>(
        ceil_div(int64_t{a.seqlen_q}, Traits::kBlockM) * a.batch * a.heads, 0, stream, p,
        is_first ? LaunchOrder::kAfterPrevious : LaunchOrder::kWhenAllowed);
  }
  if (p.dalibi_slopes.data != nullptr) sum_dalibi_slopes(p, stream);
  if (p.dsinks.data != nullptr) sum_dsinks(p, stream);
}

// Of the kernel that computes dK and dV.
template <class Element, int kHeadDim, int kHeadDimV, class Variant>
using MainTraits = std::conditional_t<is_wide(kHeadDim, kHeadDimV),
                                      WideTraits<Element, kHeadDim, kHeadDimV, Variant>,
                                      BackwardTraits<Element, kHeadDim, kHeadDimV, Variant>>;

template <class Element, int kHeadDim, int kHeadDimV, class Variant>
constexpr KernelDescriptor backward_descriptor(const char* name) {
  using Traits = MainTraits<Element, kHeadDim, kHeadDimV, Variant>;
  using RowTraits = DqTraits<Element, kHeadDim, kHeadDimV, Variant>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kBackward);
  d.head_dim = kHeadDim;  // not those of a CTA
  d.head_dim_v = kHeadDimV;
  d.features = Variant::kFeatures;
  d.least_head_dim = least_head_dim(Variant::kFeatures);
  d.tile = {Traits::kBlockM, Traits::kBlockN, Traits::kCtaThreads / 32, 1};
  d.backward = {scratch_bytes<Traits>, launch_backward<Traits, RowTraits, Variant>};
  if constexpr (!Traits::kIsWide) d.dq_sums_bytes = dq_sums_bytes<Traits>;
  return d;
}

}  // namespace anyflash::sm90
