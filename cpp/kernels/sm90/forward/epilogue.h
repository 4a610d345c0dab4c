// A consumer warpgroup's epilogue: normalise, round, and write the output rows and their LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/epilogue.h"
#include "params.h"
#include "sm90/forward/launch_params.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/stages.h"
#include "sm90/tma.h"
#include "variant/broadcast_tensor.h"
#include "variant/work_tile.h"

namespace anyflash::sm90 {

// Of two words that each lane holds, the even one of two lanes gets both first ones, the odd one both
// second ones.
ANYFLASH_DEVICE uint2 exchange_words(uint32_t first, uint32_t second) {
  const bool is_odd = threadIdx.x % 2 != 0;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, is_odd ? first : second, 1);
  return is_odd ? uint2{got, second} : uint2{first, got};
}

// The rows that exist, rounded. A lane stores 8 bytes, and a quad 32 of a row.
template <class Traits>
ANYFLASH_DEVICE void store_rounded(const ForwardLaunch& params, const ForwardWorkTile& block,
                                   const typename Traits::AccO& acc_o) {
  using Element = typename Traits::Element;
  constexpr int kColumns = 8;  // that a quad holds side by side
  RoundedAccumulator<Element, Traits::kHeadDimV> rounded;
  rounded.round(acc_o);
  const int row0 = block.first_row + static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
  const int col0 = threadIdx.x % 2 * kColumns + threadIdx.x % 4 / 2 * 4;
  CUTE_UNROLL
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = row0 + 8 * i;
    Element* const out = first_of<Element>(params.out, params.out_stride, block.sequence,
                                           block.head, row) + col0;
    CUTE_UNROLL
    for (int col = 0; col < Traits::kHeadDimV; col += 2 * kColumns) {
      const uint32_t* const words = rounded.words + col / kColumns * kThreadRows + i;
      const uint2 pair = exchange_words(words[0], words[kThreadRows]);
      if (row < block.sequence.seqlen_q && col0 + col < params.attention.head_dim_v) {
        *reinterpret_cast<uint2*>(out + col) = pair;
      }
    }
  }
}

// Adds what the guard took out of V, when the whole block is in global memory.
template <class Traits, class Variant>
ANYFLASH_DEVICE void restore_block(const ForwardLaunch& params, const ForwardWorkTile& block,
                                   const Variant& variant) {
  sync_named(static_cast<int>(NamedBarrier::kConsumers), Traits::kThreads);
  if (params.out_dtype == DType::kFloat32) {
    restore_values<Traits, float>(params, block, variant);
  } else {
    restore_values<Traits, typename Traits::Element>(params, block, variant);
  }
}

template <class Traits, class Variant>
ANYFLASH_DEVICE void forward_epilogue(const ForwardLaunch& params, const ForwardWorkTile& block,
                                      ForwardStages<Traits>& stages,
                                      typename Traits::AccO& acc_o, StagedSoftmax& softmax) {
  const int rows = block.sequence.seqlen_q - block.first_row;
  const Variant variant(params.attention, block, Traits::kBlockN);
  auto out = as_matrix(acc_o);
  const float sink =
      params.attention.sinks.data == nullptr
          ? -INFINITY
          : load_float(params.attention.sinks, block.head * params.attention.sinks.stride.head);
  const auto lse = softmax.finish(out, sink, variant.dropout_scale());
  const auto coordinates = accumulator_coordinates<Traits::kHeadDimV>();
  if (params.max_logits != nullptr) {
    reduce_max_logits(params, block, softmax, coordinates, rows);
  }
  if (params.out_dtype == DType::kFloat32) {
    store_float(params, block, out, coordinates, rows);
  } else {
    store_rounded<Traits>(params, block, acc_o);
  }
  if (params.lse != nullptr) store_lse(params, block, lse, coordinates, rows);
  if (stages.take_found_nonfinite()) restore_block<Traits>(params, block, variant);
}

}  // namespace anyflash::sm90
