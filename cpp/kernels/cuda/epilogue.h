// What forward epilogues read and write straight from registers: results over other keys, LSE,
// max_logits, float32 results, and what NaN containment took out of V. Rows are accumulators' rows,
// four lanes of a quad to each.
#pragma once

#include <cmath>
#include <cute/tensor.hpp>

#include "common/macros.h"
#include "common/merge.h"
#include "cuda/restore_nonfinite.h"
#include "params.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// Reads elements of V, (key, column), as floats.
template <class Element>
ANYFLASH_DEVICE auto tensor_values(const Attention& attention, const ForwardWorkTile& work_tile) {
  const Strides& stride = attention.v_stride;
  const auto* const v = static_cast<const Element*>(attention.v) +
                        work_tile.sequence.batch * stride.batch + work_tile.head_k * stride.head +
                        work_tile.sequence.first_k * stride.row;
  return [v, row = stride.row](int key, int x) { return static_cast<float>(v[key * row + x]); };
}

// Gives what was taken out of partly hidden tiles of V to the rows that see it. values: as
// tensor_values().
template <class Traits, class Out, class Variant, class Values>
ANYFLASH_DEVICE void restore_values(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                    const Variant& variant, const Values& values) {
  constexpr int kBlockN = Traits::kBlockN;
  const Sequence& sequence = work_tile.sequence;
  const Mask mask(sequence, params.attention.window);
  Out* const out = first_of<Out>(params.out, params.out_stride, sequence, work_tile.head);
  const KRange range = mask.k_range(work_tile.first_row, Traits::kBlockM, kBlockN);
  const IndexRange rows{work_tile.first_row,
                        min(work_tile.first_row + Traits::kBlockM, sequence.seqlen_q)};
  for (int tile = range.begin; tile < range.end; ++tile) {
    const bool cleared = range.needs_mask(tile) || variant.may_hide_in(tile);
    if (!cleared || !variant.template see<Variant::kOps>(tile).any) continue;
    const IndexRange keys{tile * kBlockN, min((tile + 1) * kBlockN, sequence.seqlen_k)};
    restore_nonfinite<Traits::kThreads>(
        keys, rows, params.attention.head_dim_v, values,
        [&](int row, int key) {
          if (!mask.keep(row, key) || !variant.keep(row, key)) return TermWeight::kHidden;
          return variant.is_dropped(row, key) ? TermWeight::kDropped : TermWeight::kVisible;
        },
        [&](int row, int x) -> Out& {
          return out[row * params.out_stride.row + x * params.out_stride.col];
        });
  }
}

// Joins the rows' results with those over other keys, some columns at a time, whose loads are under
// way together. Before anything is written where these are, all threads of a row have to get here.
template <class Matrix, class Lse, class Coordinates>
ANYFLASH_DEVICE void join_prior(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                Matrix& out_matrix, Lse& lse, const Coordinates& coordinates,
                                int rows) {
  constexpr int kColumns = decltype(cute::size<1>(out_matrix))::value;
  constexpr int kChunk = kColumns % 16 == 0 ? 16 : 8;
  static_assert(kColumns % kChunk == 0);
  const Prior& prior = params.prior;
  const auto* const prior_out = first_of<const float>(
      prior.out, prior.out_stride, work_tile.sequence, work_tile.head, work_tile.first_row);
  const auto* const prior_lse = first_of<const float>(
      prior.lse, prior.lse_stride, work_tile.sequence, work_tile.head, work_tile.first_row);
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(out_matrix); ++row) {
    const int i = cute::get<0>(coordinates(row, 0));
    if (i >= rows) continue;
    const Merge<float> merge(prior_lse[i * prior.lse_stride.row], lse(row));
    const float* const of_row = prior_out + i * prior.out_stride.row;
    CUTE_UNROLL
    for (int first = 0; first < kColumns; first += kChunk) {
      float before[kChunk];
      CUTE_UNROLL
      for (int col = 0; col < kChunk; ++col) {
        const int x = cute::get<1>(coordinates(row, first + col));
        before[col] = x < prior.columns ? of_row[x * prior.out_stride.col] : 0.0f;
      }
      CUTE_UNROLL
      for (int col = 0; col < kChunk; ++col) {
        out_matrix(row, first + col) = merge.out(before[col], out_matrix(row, first + col));
      }
    }
    lse(row) = merge.lse();
  }
}

// The largest score of a row that exists goes to the (batch, head)'s maximum: integers order floats
// of one sign, and negative ones the other way round.
template <class Softmax, class Coordinates>
ANYFLASH_DEVICE void reduce_max_logits(const ForwardParams& params,
                                       const ForwardWorkTile& work_tile, const Softmax& softmax,
                                       const Coordinates& coordinates, int rows) {
  float maximum = -INFINITY;
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(coordinates); ++row) {
    if (cute::get<0>(coordinates(row, 0)) < rows) {
      maximum = fmaxf(maximum, softmax.max_score(row));
    }
  }
  CUTE_UNROLL
  for (int distance = 16; distance >= 4; distance /= 2) {  // the four lanes of a quad agree
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, distance));
  }
  if (threadIdx.x % 32 != 0 || maximum == -INFINITY) return;
  float* const target = params.max_logits + work_tile.batch * params.max_logits_stride.batch +
                        work_tile.head * params.max_logits_stride.head;
  maximum += 0.0f;  // -0 becomes 0
  if (maximum >= 0.0f) {
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(maximum));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(target), __float_as_uint(maximum));
  }
}

// Each row's LSE is held by the four lanes of a quad; the lane with the row's column 0 writes it.
template <class Lse, class Coordinates>
ANYFLASH_DEVICE void store_lse(const ForwardParams& params, const ForwardWorkTile& work_tile,
                               const Lse& lse, const Coordinates& coordinates, int rows) {
  using namespace cute;
  if (get<1>(coordinates(0, 0)) != 0) return;
  float* const gLse = first_of<float>(params.lse, params.lse_stride, work_tile.sequence,
                                      work_tile.head, work_tile.first_row);
  CUTE_UNROLL
  for (int row = 0; row < size(lse); ++row) {
    const int i = get<0>(coordinates(row, 0));
    if (i < rows) gLse[i * params.lse_stride.row] = lse(row);
  }
}

// The accumulators as they are, element by element and with any strides.
template <class Matrix, class Coordinates>
ANYFLASH_DEVICE void store_float_rows(const ForwardParams& params, const ForwardWorkTile& work_tile,
                                      const Matrix& out_matrix, const Coordinates& coordinates,
                                      int rows) {
  using namespace cute;
  float* const gO = first_of<float>(params.out, params.out_stride, work_tile.sequence,
                                    work_tile.head, work_tile.first_row);
  CUTE_UNROLL
  for (int row = 0; row < size<0>(out_matrix); ++row) {
    const int i = get<0>(coordinates(row, 0));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(out_matrix); ++col) {
      const int x = get<1>(coordinates(row, col));
      if (i < rows && x < params.attention.head_dim_v) {
        gO[i * params.out_stride.row + x * params.out_stride.col] = out_matrix(row, col);
      }
    }
  }
}

}  // namespace anyflash
