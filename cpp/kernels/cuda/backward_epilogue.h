// Where the backward's gradients go, and what NaN containment took out of dO.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/restore_nonfinite.h"
#include "variant/backward_scratch.h"
#include "variant/block_mask.h"
#include "variant/mask.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash {

// Rows of one head of a tensor: from `first` on, `count` of them exist.
struct TileRows {
  int64_t batch;
  int head;
  int64_t first;
  int count;
};
ANYFLASH_DEVICE TileRows query_rows(const Sequence& sequence, int head, int row0) {
  return {sequence.batch, head, sequence.first_q + row0, sequence.seqlen_q - row0};
}
ANYFLASH_DEVICE TileRows key_rows(const Sequence& sequence, int head_k, int col0) {
  return {sequence.batch, head_k, sequence.first_k + col0, sequence.seqlen_k - col0};
}

// Where a tile of a gradient goes: its first row, of which `rows` and `columns` exist.
template <class Out>
struct GradientTile {
  Out* data;
  const Strides& stride;
  int rows;
  int columns;
  bool accumulates = false;  // only of float32

  // Its columns from one on.
  ANYFLASH_DEVICE GradientTile from_column(int column) const {
    GradientTile tile = *this;
    tile.data += column * stride.col;
    tile.columns -= column;
    return tile;
  }

  // Element by element, as float32 goes. No other thread has the element: the atomic addition is
  // there because nothing waits for it.
  ANYFLASH_DEVICE void store(int row, int col, float value) const {
    if (row >= rows || col >= columns) return;
    float* const target = data + row * stride.row + col * stride.col;
    if (accumulates) atomicAdd(target, value);
    else *target = value;
  }
};

template <class Out>
ANYFLASH_DEVICE GradientTile<Out> gradient_tile(void* data, const Strides& stride,
                                                const TileRows& rows, int columns,
                                                bool accumulates) {
  Out* const first = static_cast<Out*>(data) + rows.batch * stride.batch + rows.head * stride.head +
                     rows.first * stride.row;
  GradientTile<Out> tile{first, stride, rows.count, columns};
  tile.accumulates = accumulates;
  return tile;
}

// Calls visit() with a value of the gradients' type.
template <class Traits, class Visit>
ANYFLASH_DEVICE void visit_gradient_type(const BackwardScratch& params, const Visit& visit) {
  if (params.grad_dtype == DType::kFloat32) visit(float{});
  else visit(typename Traits::Element{});
}

// The CTA's keys in dK and dV, also those that are not used.
ANYFLASH_DEVICE TileRows all_key_rows(const BackwardWorkTile& block) {
  return {block.sequence.batch, block.head_k, block.sequence.first_k + block.first_key,
          block.sequence.all_keys - block.first_key};
}
template <class Out>
ANYFLASH_DEVICE GradientTile<Out> dk_tile(const BackwardScratch& params,
                                          const BackwardWorkTile& block) {
  return gradient_tile<Out>(params.dk, params.dk_stride, all_key_rows(block),
                            params.attention.head_dim, params.accumulates_dkv);
}
template <class Out>
ANYFLASH_DEVICE GradientTile<Out> dv_tile(const BackwardScratch& params,
                                          const BackwardWorkTile& block) {
  return gradient_tile<Out>(params.dv, params.dv_stride, all_key_rows(block),
                            params.attention.head_dim_v, params.accumulates_dkv);
}

// Adds what clear_nonfinite() took out of dO to the dV of the keys that see it. `dv` begins with
// column `first_column`.
template <class Traits, class Variant, class Out>
ANYFLASH_DEVICE void restore_dout(const BackwardScratch& params, const BackwardWorkTile& block,
                                  const GradientTile<Out>& dv, int first_column = 0) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr bool kHasBlocks = (Variant::kFeatures & kBlockMask) != 0;
  const Sequence& sequence = block.sequence;
  const Mask mask = Mask(sequence, params.attention.window).up_to_last_row();
  const MRange range = mask.m_range(block.first_key, Traits::kBlockN, kBlockM);
  const IndexRange keys{block.first_key, min(block.first_key + Traits::kBlockN, sequence.seqlen_k)};
  const int group = params.attention.heads / params.attention.heads_k;
  for (int head = block.head_k * group; head < (block.head_k + 1) * group; ++head) {
    const Variant variant(params, sequence, block.batch, head,
                          typename Variant::Seed(params.attention));
    const BlockMask blocks(params.attention, block.batch, head);
    const auto* const dout =
        static_cast<const Element*>(params.dout) + sequence.batch * params.dout_stride.batch +
        head * params.dout_stride.head + sequence.first_q * params.dout_stride.row;
    for (int m = range.begin; m < range.end; ++m) {
      const bool cleared = range.needs_mask(m) || (m + 1) * kBlockM > sequence.seqlen_q ||
                           Variant::template needs_masked_loop<kBlockM, Traits::kBlockN>(
                               params, block, head, m * kBlockM);
      if (!cleared) continue;
      const IndexRange rows{m * kBlockM, min((m + 1) * kBlockM, sequence.seqlen_q)};
      if (kHasBlocks && blocks.active() &&
          !blocks.see(rows.begin, rows.end, keys.begin, keys.end).any) {
        continue;
      }
      restore_nonfinite<Traits::kThreads>(
          rows, keys, dv.columns,
          [&](int row, int x) {
            return static_cast<float>(dout[row * params.dout_stride.row + first_column + x]);
          },
          [&](int key, int row) {
            if (kHasBlocks && !blocks.keep(row, key)) return TermWeight::kHidden;
            if (!mask.keep(row, key) || !variant.keep(row, key)) return TermWeight::kHidden;
            return variant.is_dropped(row, key) ? TermWeight::kDropped : TermWeight::kVisible;
          },
          [&](int key, int x) -> Out& {
            return dv.data[(key - block.first_key) * dv.stride.row + x * dv.stride.col];
          });
    }
  }
}

}  // namespace anyflash
