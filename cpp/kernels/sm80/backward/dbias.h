// The gradient of a bias is that of the scores, summed over every axis that the bias is broadcast
// along. The order of the sum does not depend on that of the CTAs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cute/tensor.hpp>

#include "common/launch.h"
#include "common/layout.h"
#include "common/math.h"
#include "sm80/backward/score_gradient_tile.h"
#include "variant/block_mask.h"
#include "variant/broadcast_tensor.h"
#include "variant/key_range_bounds.h"
#include "variant/sequence.h"

namespace anyflash::sm80 {

// What of an axis is summed over: [first, end).
struct Span {
  int64_t first;
  int64_t end;
};
ANYFLASH_DEVICE Span span_of(int64_t index, bool broadcast, int64_t count) {
  return broadcast ? Span{0, count} : Span{index, index + 1};
}

// The CTA's tile of dbias. Along an axis that the bias is broadcast along there is one.
template <class Traits>
struct DbiasTile {
  bool one_row;
  bool one_col;
  int64_t m;
  int64_t n;
  int64_t head;
  int64_t batch;

  ANYFLASH_DEVICE DbiasTile(const BackwardScratch& params, int64_t index)
      : one_row(params.dbias.stride.row == 0), one_col(params.dbias.stride.col == 0) {
    const int64_t row_tiles = one_row ? 1 : count_tiles(params.dbias_rows, Traits::kBlockM);
    const int64_t col_tiles = one_col ? 1 : count_tiles(params.dbias_columns, Traits::kBlockN);
    m = index % row_tiles;
    index /= row_tiles;
    n = index % col_tiles;
    index /= col_tiles;
    head = index % params.dbias_heads;
    batch = index / params.dbias_heads;
  }

  // Of the tiles of a sequence's rows, and of the tiles of keys that some rows see.
  ANYFLASH_DEVICE Span row_tiles(const Sequence& sequence) const {
    const int64_t tiles = count_tiles(sequence.seqlen_q, Traits::kBlockM);
    const Span span = span_of(m, one_row, tiles);
    return Span{span.first, min(span.end, tiles)};
  }
  ANYFLASH_DEVICE Span key_tiles(const KRange& range) const {
    const Span span = span_of(n, one_col, range.end);
    return Span{max(int64_t{range.begin}, span.first), min(int64_t{range.end}, span.end)};
  }
};

// Shared memory of dbias_kernel: the tiles, later the sums.
template <class Traits>
inline constexpr int kDbiasPitch = Traits::kBlockN + 1;
template <class Traits>
inline constexpr std::size_t kDbiasBytes = std::max(
    sizeof(typename Traits::SharedStorage), sizeof(float) * Traits::kBlockM * kDbiasPitch<Traits>);

// sum += the gradients of one head's scores that `where` stands for.
template <class Traits, class Variant, class Sum>
ANYFLASH_DEVICE void add_score_gradients(const BackwardScratch& params,
                                         const DbiasTile<Traits>& where, const Sequence& sequence,
                                         int64_t batch, int head, Sum& sum) {
  using namespace cute;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(anyflash_smem);
  ScoreGradientTile<Traits> tiles(params, sequence, smem);
  const Mask mask = Mask(sequence, params.attention.window).up_to_last_row();
  const Variant variant(params, sequence, batch, head, typename Variant::Seed(params.attention));
  const BlockMask blocks(params.attention, batch, head);
  const LseAndDelta* const lse_and_delta =
      params.lse_and_delta + params.first_row(sequence, batch, head);
  const int head_k = head / (params.attention.heads / params.attention.heads_k);
  const Span rows = where.row_tiles(sequence);
  for (int64_t m = rows.first; m < rows.end; ++m) {
    const int row0 = static_cast<int>(m) * kBlockM;
    const VisibleKeys visible(params.attention, sequence, batch, head_k, row0, kBlockM);
    const Span keys = where.key_tiles(mask.k_range(row0, kBlockM, kBlockN));
    for (int64_t n = keys.first; n < keys.end; ++n) {
      const int col0 = static_cast<int>(n) * kBlockN;
      if (!blocks.keep(row0, col0)) continue;
      const Visibility seen = visible.of(col0, kBlockN);
      if (!seen.any) continue;
      __syncthreads();  // every warp has done with the tiles before
      tiles.load_rows(head, row0);
      tiles.load_keys(head_k, col0);
      cp_async_wait<0>();
      __syncthreads();  // the tiles are there
      tiles.compute_ds(variant, mask, lse_and_delta + row0, row0, col0, seen.all,
                       [&](const auto& gradient, const auto&) ANYFLASH_INLINE_LAMBDA {
                         CUTE_UNROLL
                         for (int i = 0; i < size(sum); ++i) sum(i) += gradient(i);
                       });
    }
  }
}

// Writes the CTA's tile, which all threads' sums are in; along a broadcast axis they are added.
template <class Traits>
ANYFLASH_DEVICE void write_dbias(const BackwardScratch& params, const DbiasTile<Traits>& where,
                                 const float* sums) {
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  const Strides& stride = params.dbias.stride;
  const int64_t first = where.batch * stride.batch + where.head * stride.head;
  const int rows = where.one_row ? 1 : kBlockM;
  const int cols = where.one_col ? 1 : kBlockN;
  for (int i = threadIdx.x; i < rows * cols; i += Traits::kThreads) {
    const int64_t row = where.m * kBlockM + i / cols;
    const int64_t col = where.n * kBlockN + i % cols;
    if ((!where.one_row && row >= params.dbias_rows) ||
        (!where.one_col && col >= params.dbias_columns)) {
      continue;
    }
    const Span added_rows = span_of(i / cols, where.one_row, kBlockM);
    const Span added_cols = span_of(i % cols, where.one_col, kBlockN);
    float x = 0.0f;
    for (int64_t r = added_rows.first; r < added_rows.end; ++r) {
      for (int64_t c = added_cols.first; c < added_cols.end; ++c) {
        x += sums[r * kDbiasPitch<Traits> + c];
      }
    }
    store_float(params.dbias, first + row * stride.row + col * stride.col, x);
  }
}

// One tile of dbias a CTA. Grid: x = all tiles of all (batch or 1, heads or 1) of dbias.
template <class Traits, class Variant>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    dbias_kernel(const __grid_constant__ BackwardScratch params) {
  using namespace cute;
  const DbiasTile<Traits> where(params, blockIdx.x);
  auto acc = partition_fragment_C(typename Traits::TiledMma{},
                                  Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});
  clear(acc);  // (MMA, MMA_M, MMA_N)
  auto sum = make_tensor(acc.data(), accumulator_as_matrix(acc.layout()));
  const Span batches = span_of(where.batch, params.dbias.stride.batch == 0, params.attention.batch);
  const Span heads = span_of(where.head, params.dbias.stride.head == 0, params.attention.heads);
  for (int64_t batch = batches.first; batch < batches.end; ++batch) {
    const Sequence sequence = sequence_of(params.attention, batch);
    for (int head = static_cast<int>(heads.first); head < heads.end; ++head) {
      add_score_gradients<Traits, Variant>(params, where, sequence, batch, head, sum);
    }
  }

  // Through shared memory: a thread adds what belongs to one element, in order.
  auto* const sums = reinterpret_cast<float*>(anyflash_smem);
  const auto places = ScoreGradientTile<Traits>::coordinates();
  __syncthreads();  // every warp has done with the tiles
  CUTE_UNROLL
  for (int i = 0; i < size(sum); ++i) {
    sums[get<0>(places(i)) * kDbiasPitch<Traits> + get<1>(places(i))] = sum(i);
  }
  __syncthreads();  // all sums are there
  write_dbias(params, where, sums);
}

}  // namespace anyflash::sm80
