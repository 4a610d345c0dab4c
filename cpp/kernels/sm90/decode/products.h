// The two products of a decoding warpgroup, for a tile of K or V of q's dtype, or of 8 bits.
//
// Tiles of q's dtype are operands in shared memory. Of 8 bits they become float16 in registers: a
// matrix load (ldmatrix) takes two bytes for one element, so that a thread has four neighbouring
// columns of a key, or two columns of two keys, in a word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/finite.h"
#include "common/macros.h"
#include "sm90/accumulator.h"
#include "sm90/decode/transposed.h"
#include "sm90/panel_tile.h"
#include "sm90/products.h"
#include "sm90/ptx.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Calls function(constant) for what a cache of 8 bits stores.
template <class Function>
ANYFLASH_DEVICE void with_stored_type(DType stored, const Function& function) {
  if (stored == DType::kInt8) function(cute::constant<DType, DType::kInt8>{});
  else if (stored == DType::kFloat8E5M2) function(cute::constant<DType, DType::kFloat8E5M2>{});
  else function(cute::constant<DType, DType::kFloat8E4M3>{});
}

// Operand A: sixteen keys from `warp_row` on, kColumns columns from 16 * `first_vector` on. Of each
// sixteen columns, operand columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 are neighbours.
template <DType kStored, class Tile, int kColumns>
ANYFLASH_DEVICE void load_keys(OperandRows<Tile, kColumns>& operand, typename Tile::Element* tile,
                               int warp_row, int first_vector) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ANYFLASH_UNROLL
  for (int pair = 0; pair < kColumns / 32; ++pair) {
    uint32_t stored[4];  // of columns 0 to 15: the upper and lower eight keys; then of 16 to 31
    load_matrices(stored,
                  piece_of<Tile>(tile, warp_row + lane % 16, first_vector + 2 * pair + lane / 16));
    ANYFLASH_UNROLL
    for (int step = 0; step < 2; ++step) {
      uint32_t* const words = operand.words + 8 * pair + 4 * step;
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        words[half] = dequantize_pair<kStored, 0, 1>(stored[2 * step + half]);
        words[2 + half] = dequantize_pair<kStored, 2, 3>(stored[2 * step + half]);
      }
    }
  }
}

// Operand A: sixteen columns of all keys. The upper eight rows are the even columns, the lower
// eight the odd ones.
template <DType kStored, class Tile>
ANYFLASH_DEVICE void load_values(OperandRows<Tile, Tile::kRows>& operand,
                                 typename Tile::Element* tile, int vector) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ANYFLASH_UNROLL
  for (int pair = 0; pair < Tile::kRows / 32; ++pair) {
    uint32_t stored[4];  // of eight keys each
    load_transposed(stored, piece_of<Tile>(tile, 32 * pair + lane, vector));
    ANYFLASH_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t* const words = operand.words + 8 * pair + 2 * i;
      words[0] = dequantize_pair<kStored, 0, 2>(stored[i]);
      words[1] = dequantize_pair<kStored, 1, 3>(stored[i]);
    }
  }
}

// The column of V, of a warp's sixteen, that this thread's upper or lower row of O^T is.
template <class Traits>
ANYFLASH_DEVICE int value_column(int half) {
  return Traits::k8Bit ? 2 * lane_row() + half : lane_row() + 8 * half;
}

// Writes 0 over NaN and infinity in 16 bytes of a tile of V; returns whether there were any.
template <class Traits>
ANYFLASH_DEVICE bool clear_piece(typename Traits::Stored* piece, DType stored) {
  if constexpr (Traits::k8Bit) {
    bool found = false;
    auto* const words = reinterpret_cast<uint32_t*>(piece);
    ANYFLASH_UNROLL
    for (int i = 0; i < 4; ++i) found |= clear_nonfinite_bytes(words[i], stored);
    return found;
  } else {
    auto vector = cute::make_tensor(cute::make_smem_ptr(piece), cute::Int<8>{});
    return clear_nonfinite(vector);
  }
}

// S^T = K Q^T
template <class Traits>
ANYFLASH_DEVICE void make_scores(typename Traits::Scores& scores,
                                 const typename Traits::TileK::Element* keys,
                                 const typename Traits::Operand* queries) {
  using TileK = typename Traits::TileK;
  using TileQ = typename Traits::TileQ;
  issue_transposed<TileK, TileQ, TileQ::kColumns>(scores, keys, queries);
  wgmma_wait<0>();
  pin(scores);
}

// O^T += V^T P^T
template <class Traits>
ANYFLASH_DEVICE void add_values(typename Traits::Scores (&out)[Traits::kOutBlocks],
                                const typename Traits::TileV::Element* values,
                                const typename Traits::Operand* probabilities) {
  using TileV = typename Traits::TileV;
  constexpr int kPanel = TileV::kPanelElements * static_cast<int>(sizeof(*values));
  const OperandDescriptor v(values, kPanel);
  const OperandDescriptor p(probabilities, Traits::TileP::kBytes);
  ANYFLASH_UNROLL
  for (auto& block : out) pin(block);
  wgmma_fence();
  ANYFLASH_UNROLL
  for (int block = 0; block < Traits::kOutBlocks; ++block) {
    ANYFLASH_UNROLL
    for (int step = 0; step < Traits::kBlockN / 16; ++step) {
      Wgmma<typename Traits::Operand, Traits::kRows>::template with_smem<Major::kMN, Major::kK>(
          out[block].data(), v + (block * kPanel + step * 16 * kPanelBytes), p + step * 32, 1);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  ANYFLASH_UNROLL
  for (auto& block : out) pin(block);
}

// Both for a tile of 8-bit elements. Registers hold so many columns of K or V at a time: few, where
// the output takes most of them.
template <class Traits>
constexpr int columns_at_once(int head_dim) {
  if (Traits::kHeadDimV > 256 && Traits::kRows > 16) return 64;
  return head_dim % 128 == 0 ? 128 : std::min(head_dim, 192);
}

template <class Traits>
ANYFLASH_DEVICE void make_scores(typename Traits::Scores& scores,
                                 typename Traits::TileK::Element* keys,
                                 const typename Traits::Operand* queries, int warp, DType stored) {
  using TileQ = typename Traits::TileQ;
  constexpr int kColumns = columns_at_once<Traits>(Traits::kHeadDim);
  constexpr int kPanelQ = TileQ::kPanelElements * static_cast<int>(sizeof(*queries));
  const OperandDescriptor q(queries, kPanelQ);
  ANYFLASH_UNROLL
  for (int first = 0; first < Traits::kHeadDim; first += kColumns) {
    OperandRows<typename Traits::TileK, kColumns> operand;
    with_stored_type(stored, [&](auto type) {
      load_keys<decltype(type)::value>(operand, keys, warp * kWarpRows, first / 16);
    });
    pin_registers<operand.kWords>(operand.words);
    pin(scores);
    wgmma_fence();
    ANYFLASH_UNROLL
    for (int step = 0; step < kColumns / 16; ++step) {
      Wgmma<typename Traits::Operand, Traits::kRows>::template with_registers<Major::kK>(
          scores.data(), operand.words + 4 * step, q + step_bytes(first / 16 + step, kPanelQ),
          first + step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores);
  }
}

template <class Traits>
ANYFLASH_DEVICE void add_values(typename Traits::Scores (&out)[Traits::kOutBlocks],
                                typename Traits::TileV::Element* values,
                                const typename Traits::Operand* probabilities, int warp,
                                DType stored) {
  using Operand = OperandRows<typename Traits::TileV, Traits::kBlockN>;
  constexpr int kBlocks = columns_at_once<Traits>(Traits::kHeadDimV) / 64;
  const OperandDescriptor p(probabilities, Traits::TileP::kBytes);
  ANYFLASH_UNROLL
  for (int first = 0; first < Traits::kOutBlocks; first += kBlocks) {
    Operand operands[kBlocks];
    with_stored_type(stored, [&](auto type) {
      ANYFLASH_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        load_values<decltype(type)::value>(operands[i], values, 4 * (first + i) + warp);
      }
    });
    ANYFLASH_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      pin_registers<Operand::kWords>(operands[i].words);
      pin(out[first + i]);
    }
    wgmma_fence();
    ANYFLASH_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      ANYFLASH_UNROLL
      for (int step = 0; step < Traits::kBlockN / 16; ++step) {
        Wgmma<typename Traits::Operand, Traits::kRows>::template with_registers<Major::kK>(
            out[first + i].data(), operands[i].words + 4 * step, p + step * 32, 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    ANYFLASH_UNROLL
    for (int i = 0; i < kBlocks; ++i) pin(out[first + i]);
  }
}

}  // namespace anyflash::sm90
