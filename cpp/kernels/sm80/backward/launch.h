// Host side of the sm_80 backward kernels: one KernelDescriptor per (dtype, head dims, variant).
//
//   preprocess_kernel           delta and LSE of every row; dq_accum = 0
//   backward_kernel             dK, dV; adds to dq_accum (kernel_by_chunks.h: first dK, then dV)
//   reduce_gqa_partials_kernel  dK, dV, where the heads of a group come in parts
//   postprocess_dq_kernel       dQ from dq_accum
//   deterministic_dq_kernel     dQ without atomics, instead; sums for ALiBi's slopes
//   dbias_kernel, sum_*         the other gradients, where they are wanted
#pragma once

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cstdint>
#include <string>
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
#include "sm80/backward/dbias.h"
#include "sm80/backward/deterministic_dq.h"
#include "sm80/backward/gqa_partials.h"
#include "sm80/backward/kernel.h"
#include "sm80/backward/kernel_by_chunks.h"
#include "sm80/backward/traits.h"
#include "sm80/family.h"
#include "variant/backward_scratch.h"
#include "variant/backward_single_feature.h"
#include "variant/backward_variants.h"

namespace anyflash::sm80 {

// dK and dV, and dS K into dq_accum.
template <class Traits, class Variant>
void launch_key_gradients(const BackwardScratch& p, void* stream) {
  const Attention& a = p.attention;
  const int64_t blocks = ceil_div(a.seqlen_k, Traits::kBlockN) * a.batch * a.heads_k;
  const bool in_parts = p.gqa_partials != nullptr;
  if constexpr (Traits::kChunks == 1) {
    launch_blocks<backward_kernel<Traits, Variant>, Traits>(
        blocks * p.gqa_splits, sizeof(typename Traits::SharedStorage), stream, p);
    if (!in_parts) return;
    launch_blocks<reduce_gqa_partials_kernel<Traits, Variant>, Traits>(
        blocks, sizeof(GqaPartialsStorage<Traits>), stream, p);
  } else {
    const auto launch_one = [&](auto which) {
      constexpr KeyGradient kWhich = decltype(which)::value;
      constexpr std::size_t kBytes = sizeof(typename Traits::SharedStorage);
      launch_blocks<backward_by_chunks_kernel<Traits, Variant, kWhich>, Traits>(
          blocks * p.gqa_splits, kBytes, stream, p);
      if (!in_parts) return;
      launch_blocks<reduce_chunked_partials_kernel<Traits, Variant, kWhich>, Traits>(blocks, kBytes,
                                                                                     stream, p);
    };
    launch_one(std::integral_constant<KeyGradient, KeyGradient::kDk>{});
    launch_one(std::integral_constant<KeyGradient, KeyGradient::kDv>{});
  }
}

// dQ where it must be deterministic, and sums for ALiBi's slopes.
template <class RowTraits, class Variant>
void launch_deterministic_dq(BackwardScratch p, void* stream) {
  const Attention& a = p.attention;
  const int64_t row_blocks = ceil_div(a.seqlen_q, RowTraits::kBlockM);
  const int columns = p.deterministic ? a.head_dim : 1;
  for (int first = 0; first < columns; first += RowTraits::kDqColumns) {
    p.dq_first_column = first;
    launch_blocks<deterministic_dq_kernel<RowTraits, Variant>, RowTraits>(
        row_blocks * a.batch * a.heads, sizeof(typename RowTraits::SharedStorage), stream, p);
    p.slope_sums = nullptr;  // they are there
  }
}

template <class Traits, class RowTraits, class Variant>
void launch_backward(const BackwardParams& params, const LaunchContext& context) {
  BackwardScratch p{params};
  Attention& a = p.attention;
  p.dtype = kElementType<typename Traits::Element>;
  place_scratch<Traits>(p, static_cast<char*>(context.scratch));
  p.key_scheduler =
      key_scheduler_of<Traits>(p, backward_heads_per_l2_section(a, context.multiprocessors));
  a.softmax_scale = softmax_scale_on_gpu(a.softmax_scale);
  a.scale_log2 = static_cast<float>(a.softmax_scale) * kLog2E;
  p.lse_unit = Variant::kLseUnit;
  p.ds_scale = static_cast<float>(a.softmax_scale) * Variant::ds_factor(p);

  void* const stream = context.stream;
  make_key_range_bounds(a, stream);
  backward_preprocess(p, stream);
  use_rounded_dout(p);
  launch_key_gradients<Traits, Variant>(p, stream);
  if (!p.deterministic) {
    launch_blocks<postprocess_dq_kernel<Traits>, Traits, Traits::kRowThreads>(
        ceil_div(a.seqlen_q, Traits::kBlockM) * a.batch * a.heads,
        sizeof(typename Traits::template Buffer<typename Traits::TileDq>), stream, p);
  }
  if (p.deterministic || p.slope_sums != nullptr) {
    launch_deterministic_dq<RowTraits, Variant>(p, stream);
  }
  if constexpr ((Variant::kFeatures & kBias) != 0) {
    if (p.dbias.data != nullptr) {
      const Strides& stride = p.dbias.stride;
      const int64_t tiles = (stride.row == 0 ? 1 : ceil_div(p.dbias_rows, RowTraits::kBlockM)) *
                            (stride.col == 0 ? 1 : ceil_div(p.dbias_columns, RowTraits::kBlockN));
      launch_blocks<dbias_kernel<RowTraits, Variant>, RowTraits>(
          p.dbias_batch * p.dbias_heads * tiles, kDbiasBytes<RowTraits>, stream, p);
    }
  }
  if (p.dalibi_slopes.data != nullptr) sum_dalibi_slopes(p, stream);
  if (p.dsinks.data != nullptr) sum_dsinks(p, stream);
}

template <class Element, int kHeadDim, int kHeadDimV, class Variant,
          TileConfig kTileConfig = TileConfig::kDefault>
constexpr KernelDescriptor backward_descriptor(const char* name) {
  using Whole = BackwardTraits<Element, kHeadDim, kHeadDimV, Variant::kGeneric,
                               Variant::kKeysInRuns, kTileConfig>;
  using Traits = std::conditional_t<Whole::kChunks == 1, Whole, ChunkedTraits<Whole>>;
  using RowTraits = DeterministicDqTraits<Element, kHeadDim, kHeadDimV>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kBackward, kTileConfig);
  d.features = Variant::kFeatures;
  d.tile = Traits::kRound;
  d.bits_group = Traits::kConfig.bits_group;
  d.smem_bytes = std::max(sizeof(typename Traits::SharedStorage), kDbiasBytes<RowTraits>);
  d.backward = {backward_scratch_bytes<Traits>, launch_backward<Traits, RowTraits, Variant>};
  return d;
}

}  // namespace anyflash::sm80
