// Host side of the sm_80 forward kernels: one KernelRow per (dtype, head dim).
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>

#include "common/launch.h"
#include "kernel.h"
#include "sm80/fwd_kernel.h"
#include "sm80/traits.h"
#include "variant/mask.h"

namespace anyflash::sm80 {

struct PlainVariant {
  using Mask = anyflash::Mask;
};

template <class Traits, class Variant>
void launch_forward(const ForwardParams& params, const LaunchContext& context) {
  const int64_t row_blocks = (int64_t{params.seqlen_q} + Traits::kBlockM - 1) / Traits::kBlockM;
  const int64_t blocks = row_blocks * params.batch * params.heads;
  if (blocks > INT32_MAX) {
    throw Error(ErrorCode::kUnsupported,
                "batch * heads * ceil(seqlen_q / " + std::to_string(Traits::kBlockM) + ") is " +
                    std::to_string(blocks) + "; a CUDA grid holds at most 2147483647 blocks");
  }
  launch<forward_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(blocks)), dim3(Traits::kThreads),
      sizeof(typename Traits::SharedStorage), context.stream, params);
}

inline std::size_t no_scratch(const ForwardParams&, int) { return 0; }

template <class Element, int kHeadDim>
constexpr KernelRow forward_row(const char* name) {
  using Traits = ForwardTraits<Element, kHeadDim>;
  constexpr DType kDType =
      std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
  return KernelRow{
      name,          Arch::kSm80,
      CpuIsa::kAuto, Op::kForward,
      kDType,        kHeadDim,
      Traits::kTile, sizeof(typename Traits::SharedStorage),
      no_scratch,    launch_forward<Traits, PlainVariant>,
  };
}

}  // namespace anyflash::sm80
