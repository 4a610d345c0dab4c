// Host side of the sm_80 backward kernels: one KernelDescriptor per (dtype, head dims, variant).
//
//   preprocess_kernel           delta and LSE of every row; dq_accum = 0
//   backward_kernel             dK, dV; adds to dq_accum
//   reduce_gqa_partials_kernel  dK, dV, where the heads of a group come in parts
//   postprocess_dq_kernel       dQ from dq_accum
//   deterministic_dq_kernel     dQ without atomics, instead; sums for ALiBi's slopes
//   dbias_kernel, sum_*         the other gradients, where they are wanted
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "common/launch.h"
#include "common/math.h"
#include "common/softmax.h"
#include "cuda/backward_launch.h"
#include "cuda/backward_preprocess.h"
#include "cuda/descriptor.h"
#include "grid_heuristics.h"
#include "kernel_descriptor.h"
#include "sm80/backward/dbias.h"
#include "sm80/backward/deterministic_dq.h"
#include "sm80/backward/gqa_partials.h"
#include "sm80/backward/kernel.h"
#include "sm80/backward/traits.h"
#include "sm80/family.h"
#include "variant/backward_scratch.h"
#include "variant/backward_single_feature.h"
#include "variant/backward_variants.h"

namespace anyflash::sm80 {

template <class Traits, class RowTraits, class Scores>
void launch_backward(const BackwardParams& params, const LaunchContext& context) {
  BackwardScratch p{params};
  Attention& a = p.attention;
  p.dtype = kElementType<typename Traits::Element>;
  p.heads_per_l2_section = backward_heads_per_l2_section(a, context.multiprocessors);
  place_scratch<Traits>(p, static_cast<char*>(context.scratch));
  // What 16-bit numbers make of such a scale is 0, as in the forward.
  if (std::fabs(a.softmax_scale) < kLeastScale) a.softmax_scale = 0.0;
  a.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  p.lse_unit = Scores::kLseUnit;
  p.ds_scale = static_cast<float>(a.softmax_scale) * Scores::ds_factor(p);

  void* const stream = context.stream;
  const auto blocks = [](int64_t extent, int tile) { return (extent + tile - 1) / tile; };
  const int64_t pairs = a.batch * a.heads;
  backward_preprocess(p, stream);
  use_rounded_dout(p);
  launch_blocks<backward_kernel<Traits, Scores>, Traits>(
      blocks(a.seqlen_k, Traits::kBlockN) * a.batch * a.heads_k * p.gqa_splits,
      sizeof(typename Traits::SharedStorage), stream, p);
  if (p.gqa_partials != nullptr) {
    launch_blocks<reduce_gqa_partials_kernel<Traits, Scores>, Traits>(
        blocks(a.seqlen_k, Traits::kBlockN) * a.batch * a.heads_k,
        sizeof(GqaPartialsStorage<Traits>), stream, p);
  }
  if (!p.deterministic) {
    launch_blocks<postprocess_dq_kernel<Traits>, Traits, Traits::kRowThreads>(
        blocks(a.seqlen_q, Traits::kBlockM) * pairs,
        sizeof(typename Traits::template Buffer<typename Traits::TileQ>), stream, p);
  }
  if (p.deterministic || p.slope_sums != nullptr) {
    launch_blocks<deterministic_dq_kernel<RowTraits, Scores>, RowTraits>(
        blocks(a.seqlen_q, RowTraits::kBlockM) * pairs, sizeof(typename RowTraits::SharedStorage),
        stream, p);
  }
  if constexpr ((Scores::kFeatures & kBias) != 0) {
    if (p.dbias.data != nullptr) {
      const Strides& stride = p.dbias.stride;
      const int64_t tiles = (stride.row == 0 ? 1 : blocks(p.dbias_rows, RowTraits::kBlockM)) *
                            (stride.col == 0 ? 1 : blocks(p.dbias_columns, RowTraits::kBlockN));
      launch_blocks<dbias_kernel<RowTraits, Scores>, RowTraits>(
          p.dbias_batch * p.dbias_heads * tiles, kDbiasBytes<RowTraits>, stream, p);
    }
  }
  if (p.dalibi_slopes.data != nullptr) sum_dalibi_slopes(p, stream);
  if (p.dsinks.data != nullptr) sum_dsinks(p, stream);
}

template <class Element, int kHeadDim, int kHeadDimV, class Scores,
          TileConfig kTileConfig = TileConfig::kDefault>
constexpr KernelDescriptor backward_descriptor(const char* name) {
  using Traits = BackwardTraits<Element, kHeadDim, kHeadDimV, Scores::kGeneric, Scores::kQuadKeys,
                                kTileConfig>;
  using RowTraits = DeterministicDqTraits<Element, kHeadDim, kHeadDimV>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kBackward, kTileConfig);
  d.features = Scores::kFeatures;
  d.tile = Traits::kRound;
  d.bits_group = Traits::kConfig.bits_group;
  d.smem_bytes = std::max(sizeof(typename Traits::SharedStorage), kDbiasBytes<RowTraits>);
  d.backward = {backward_scratch_bytes<Traits>, launch_backward<Traits, RowTraits, Scores>};
  return d;
}

}  // namespace anyflash::sm80
