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

// Divides `memory` (null: only the size is wanted) among what the kernels need there. Returns the
// bytes used.
template <class Traits>
std::size_t place_scratch(BackwardScratch& p, char* memory) {
  const Attention& a = p.attention;
  const bool packed = a.cu_seqlens_q != nullptr;
  const auto padded = [](int64_t rows) {
    return (rows + Traits::kBlockM - 1) / Traits::kBlockM * Traits::kBlockM;
  };
  const int64_t heads = (packed ? 1 : a.batch) * a.heads;
  p.gqa_splits = gqa_splits(a.heads, a.heads_k);
  p.block_m = Traits::kBlockM;
  p.padded_rows = packed ? padded(a.total_q + a.batch * Traits::kBlockM) : padded(a.seqlen_q);
  p.dq_columns = Traits::kHeadDim;
  std::size_t used = 0;
  const auto take = [&](auto*& at, int64_t count) {
    constexpr std::size_t kAlignment = 256;
    if (memory != nullptr) at = reinterpret_cast<decltype(+at)>(memory + used);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(*at);
    used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  take(p.lse_delta, heads * p.padded_rows);
  if (!p.deterministic) take(p.dq_accum, heads * p.padded_rows * p.dq_columns);
  if (p.dout_dtype == DType::kFloat32) {
    const int64_t columns = (a.head_dim_v + 7) / 8 * 8;
    auto* rounded = static_cast<typename Traits::Element*>(nullptr);
    take(rounded, heads * (packed ? a.total_q : a.seqlen_q) * columns);
    p.dout_rounded = rounded;
  }
  if (a.alibi_slopes.data != nullptr) take(p.slopes_log2, a.batch * a.heads);
  if (p.gqa_splits > 1) {
    constexpr int kBlockN = Traits::kBlockN;
    p.key_blocks = packed ? a.total_k / kBlockN + a.batch : (a.seqlen_k + kBlockN - 1) / kBlockN;
    const int64_t parts = (packed ? 1 : a.batch) * a.heads_k * p.key_blocks * p.gqa_splits;
    take(p.gqa_partials, parts * kGqaPartialElements<Traits>);
    take(p.gqa_nonfinite_dout, parts);
  }
  if (p.dalibi_slopes.data != nullptr) {
    take(p.slope_sums, a.batch * a.heads * ((int64_t{a.seqlen_q} + 63) / 64));
  }
  return used;
}

template <class Traits>
std::size_t backward_scratch_bytes(const BackwardParams& params, const LaunchContext&) {
  BackwardScratch scratch{params};
  return place_scratch<Traits>(scratch, nullptr);
}

// Runs kKernel on `blocks` CTAs, none where there is nothing to do.
template <auto kKernel, class Traits, int kThreads = Traits::kThreads>
void launch_blocks(int64_t blocks, std::size_t smem_bytes, void* stream,
                   const BackwardScratch& params) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported, "the problem needs " + std::to_string(blocks) +
                                             " CTAs; a CUDA grid holds at most 2147483647");
  }
  launch<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), smem_bytes, stream, params);
}

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
  if (p.dout_rounded != nullptr) {
    const int64_t columns = (a.head_dim_v + 7) / 8 * 8;
    const int64_t rows = a.cu_seqlens_q != nullptr ? a.total_q : a.seqlen_q;
    p.dout = p.dout_rounded;
    p.dout_stride = Strides{a.heads * rows * columns, columns, rows * columns, 1};
  }
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
