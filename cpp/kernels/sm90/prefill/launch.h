// The Hopper prefill kernels: the forward, of packed queries over a cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/dependent_launch.h"
#include "common/element.h"
#include "common/launch.h"
#include "common/macros.h"
#include "common/math.h"
#include "cuda/descriptor.h"
#include "cuda/partial_results.h"
#include "cuda/prefill_block.h"
#include "cuda/prefill_launch.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "sm90/cache_boxes.h"
#include "sm90/family.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/launch.h"
#include "sm90/forward/traits.h"
#include "sm90/prefill/cached_block.h"

namespace anyflash::sm90 {

template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kCtaThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillLaunch params) {
  run_forward<Traits, Variant>(params);
}

// In the workspace: parts of results, blocks of query rows, and the counter of those taken.
template <class Traits>
struct PrefillScratch {
  std::size_t row_blocks;
  std::size_t taken;
  std::size_t bytes;

  explicit PrefillScratch(const KvCacheParams& params)
      : row_blocks(ceil_div(parts_bytes(params), sizeof(PackedBlock)) * sizeof(PackedBlock)),
        taken(row_blocks + static_cast<std::size_t>(packed_blocks<Traits::kBlockM>(params)) *
                               sizeof(PackedBlock)),
        bytes(taken + sizeof(unsigned)) {}
};

template <class Traits>
std::size_t prefill_scratch_bytes(const KvCacheParams& params, const LaunchContext&) {
  return PrefillScratch<Traits>(params).bytes;
}

// Finds the blocks, a warp each, for the CTAs that take them: these would find each once for every
// head, while nothing else is loaded.
struct ListParams {
  KvCacheParams cache;
  PackedBlock* row_blocks;
  int count;
  unsigned* taken;
};
inline constexpr int kListThreads = 128;
template <int kBlockM>
__global__ void __launch_bounds__(kListThreads)
    list_blocks(const __grid_constant__ ListParams params) {
  wait_previous_kernel();
  allow_next_kernel();
  const int thread = static_cast<int>(blockIdx.x * kListThreads + threadIdx.x);
  if (thread == 0) *params.taken = 0;
  if (thread / 32 >= params.count) return;
  const PackedBlock found = find_packed_block<kBlockM>(params.cache, thread / 32);
  if (thread % 32 == 0) params.row_blocks[thread / 32] = found;
}

template <class Traits, class Variant>
void launch_prefill(const KvCacheParams& params, const LaunchContext& context) {
  const PrefillScratch<Traits> scratch(params);
  char* const base = static_cast<char*>(context.scratch);
  ListParams list{};
  list.cache = params;
  list.row_blocks = reinterpret_cast<PackedBlock*>(base + scratch.row_blocks);
  list.count = static_cast<int>(packed_blocks<Traits::kBlockM>(params));
  list.taken = reinterpret_cast<unsigned*>(base + scratch.taken);
  PrefillLaunch prepared{};
  prepared.cache = params.num_splits > 1 ? partial_params(params, context) : params;
  set_forward(prepared, params, prepared.cache);
  prepared.attention.scale_log2 = static_cast<float>(prepared.attention.softmax_scale) * kLog2E;
  prepared.blocks = prefill_blocks<Traits::kBlockM>(params);
  prepared.row_blocks = list.row_blocks;
  prepared.taken = list.taken;
  make_query_maps<Traits>(prepared);
  make_cache_maps(prepared, prepared.cache, kElementType<typename Traits::Element>,
                  Traits::kBlockN);
  launch<list_blocks<Traits::kBlockM>>(
      dim3(static_cast<unsigned>(ceil_div(list.count, kListThreads / 32))), dim3(kListThreads), 0,
      context.stream, list, LaunchOrder::kWhenAllowed);
  launch<prefill_kernel<Traits, Variant>>(
      dim3(static_cast<unsigned>(std::min(prepared.blocks, context.multiprocessors))),
      dim3(Traits::kCtaThreads), sizeof(typename Traits::SharedStorage), context.stream, prepared,
      LaunchOrder::kWhenAllowed);
  if (params.num_splits > 1) {
    combine_parts<typename Traits::Element>(params, prepared.cache, context.stream);
  }
}

template <class Element, int kHeadDim, int kHeadDimV, class Variant>
constexpr KernelDescriptor prefill_descriptor(const char* name) {
  using Traits =
      ForwardTraits<Element, kHeadDim, kHeadDimV, TableConfig<kHeadDim, kHeadDimV>, CachedBlock>;
  KernelDescriptor d = descriptor<Traits>(kFamily, name, Op::kDecode);
  d.features = Variant::kFeatures;
  d.tile = {Traits::kBlockM, Traits::kBlockN, Traits::kCtaThreads / 32, 1};
  d.prefill = true;
  d.loads_boxes = true;
  d.decode = {prefill_scratch_bytes<Traits>, launch_prefill<Traits, Variant>};
  return d;
}

}  // namespace anyflash::sm90
