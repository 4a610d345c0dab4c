// The backward's main kernel for head dims above 256: dK, or dV, of one block of keys a CTA. The
// launch for dK also adds to dQ.
#pragma once

#include <cute/tensor.hpp>

#include "common/launch.h"
#include "cuda/backward_grid.h"
#include "cuda/gqa_partials.h"
#include "sm80/backward/column_chunks.h"
#include "sm80/backward/epilogue.h"
#include "sm80/backward/mainloop_by_chunks.h"
#include "variant/backward_scratch.h"

namespace anyflash::sm80 {

// Sums of one gradient: an accumulator a chunk of columns.
template <class Traits>
class ChunkedSums {
  using Shape = cute::Shape<cute::Int<Traits::kBlockN>, cute::Int<Traits::kChunkColumns>>;
  using Acc = decltype(cute::partition_fragment_C(typename Traits::KeyMma{}, Shape{}));
  using Chunk = typename Traits::KeyChunk;
  static constexpr int kElements = Traits::kBlockN * Traits::kChunkColumns;

 public:
  ANYFLASH_DEVICE ChunkedSums() {
    for_each_chunk([](int, auto& acc) ANYFLASH_INLINE_LAMBDA { cute::clear(acc); });
  }

  ANYFLASH_DEVICE auto& chunks() { return chunks_; }

  // In a part of a group of query heads, and from one.
  ANYFLASH_DEVICE void store_part(float* part) {
    for_each_chunk([&](int i, auto& acc) ANYFLASH_INLINE_LAMBDA {
      store_sums(part + i * kElements, acc, threadIdx.x, Traits::kThreads);
    });
  }
  ANYFLASH_DEVICE void add_part(const float* part) {
    for_each_chunk([&](int i, auto& acc) ANYFLASH_INLINE_LAMBDA {
      add_sums(acc, part + i * kElements, threadIdx.x, Traits::kThreads);
    });
  }

  // Scaled, to where `target` is, through `smem` where they are rounded.
  template <class Out, class Smem>
  ANYFLASH_DEVICE void write(const GradientTile<Out>& target, float scale, Smem& smem) {
    for_each_chunk([&](int chunk, auto& acc) ANYFLASH_INLINE_LAMBDA {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(acc); ++i) acc(i) *= scale;
      store_gradient<Chunk, typename Traits::KeyOrder>(
          target.from_column(chunk * Traits::kChunkColumns), typename Traits::KeyMma{}, acc, smem);
      __syncthreads();  // every thread has read its pieces
    });
  }

 private:
  template <class Function>
  ANYFLASH_DEVICE void for_each_chunk(const Function& function) {
    cute::for_each(cute::make_int_sequence<Traits::kChunks>{}, [&](auto i) ANYFLASH_INLINE_LAMBDA {
      function(i, cute::get<decltype(i)::value>(chunks_));
    });
  }

  cute::array<Acc, Traits::kChunks> chunks_;  // (MMA, MMA_N, MMA_D)
};

// Writes the gradient of the CTA's keys, also of those that are not used.
template <class Traits, class Variant, KeyGradient kWhich>
ANYFLASH_DEVICE void write_chunks(const BackwardScratch& params, const BackwardWorkTile& block,
                                  ChunkedSums<Traits>& sums, typename Traits::SharedStorage& smem,
                                  bool nonfinite_dout) {
  visit_gradient_type<Traits>(params, [&](auto type) {
    using Out = decltype(type);
    if constexpr (kWhich == KeyGradient::kDk) {
      sums.write(dk_tile<Out>(params, block), params.ds_scale, smem.k);
    } else {
      const auto dv = dv_tile<Out>(params, block);
      sums.write(dv, Variant::p_scale(params), smem.k);  // dV is there afterwards
      if (nonfinite_dout) restore_dout<Traits, Variant>(params, block, dv);
    }
  });
}

// Grid: as backward_kernel's.
template <class Traits, class Variant, KeyGradient kWhich>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_by_chunks_kernel(const __grid_constant__ BackwardScratch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  BackwardWorkTile here = backward_block<Traits::kBlockN>(params, blockIdx.x);
  if (here.first_key >= here.sequence.all_keys) return;  // shorter than the longest
  if (threadIdx.x == 0) {
    find_key_ranges<Variant, Traits::kBlockN>(params.attention, here);
    smem.block = here;
    smem.nonfinite_keys = smem.nonfinite_dout = 0;
  }
  __syncthreads();  // read from there, because the loop needs the registers
  const BackwardWorkTile& block = smem.block;

  ChunkedSums<Traits> sums;
  mainloop_by_chunks<Traits, Variant, kWhich>(params, block, smem, sums.chunks());

  cute::cp_async_wait<0>();
  __syncthreads();  // every warp has done with K, and nothing is on its way there
  const bool nonfinite_dout = smem.nonfinite_dout != 0;
  if (params.gqa_partials == nullptr) {
    write_chunks<Traits, Variant, kWhich>(params, block, sums, smem, nonfinite_dout);
    return;
  }
  const int64_t part = first_part<Traits>(params, block) + block.gqa_split;
  sums.store_part(params.gqa_partials + part * kGqaPartialElements<Traits>);
  if (kWhich == KeyGradient::kDv && threadIdx.x == 0) {
    params.gqa_nonfinite_dout[part] = nonfinite_dout;
  }
}

// The gradient of a block of keys from its parts, in their order. Grid: as
// reduce_gqa_partials_kernel's.
template <class Traits, class Variant, KeyGradient kWhich>
__global__ void __launch_bounds__(Traits::kThreads)
    reduce_chunked_partials_kernel(const __grid_constant__ BackwardScratch params) {
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  BackwardWorkTile block = key_block_at<Traits::kBlockN>(params, blockIdx.x);
  if (block.first_key >= block.sequence.all_keys) return;
  find_key_ranges<Variant, Traits::kBlockN>(params.attention, block);

  ChunkedSums<Traits> sums;
  bool nonfinite_dout = false;
  const int64_t first = first_part<Traits>(params, block);
  for (int64_t part = first; part < first + params.gqa_splits; ++part) {
    sums.add_part(params.gqa_partials + part * kGqaPartialElements<Traits>);
    if (kWhich == KeyGradient::kDv) nonfinite_dout |= params.gqa_nonfinite_dout[part];
  }
  write_chunks<Traits, Variant, kWhich>(params, block, sums, smem, nonfinite_dout);
}

}  // namespace anyflash::sm80
