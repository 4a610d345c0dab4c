// Queries of a decoding warpgroup, as its products read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/half_queries.h"
#include "common/load.h"
#include "common/macros.h"
#include "common/math.h"
#include "cuda/decode_work_tile.h"
#include "sm90/decode/loader.h"
#include "sm90/panel_tile.h"
#include "sm90/wgmma.h"

namespace anyflash::sm90 {

// Row `row` of those that the tile may have, if it exists.
ANYFLASH_DEVICE const uint16_t* query_row(const DecodeLaunch& params, const DecodeWorkTile& block,
                                          int row) {
  const Attention& a = params.attention;
  return static_cast<const uint16_t*>(a.q) + block.offset(a.q_stride, row < block.rows ? row : 0);
}

// Rows from `first_row` on, by kThreads threads; rows and columns that do not exist become 0. They
// are on their way afterwards (cp.async).
template <class TileQ, int kThreads>
ANYFLASH_DEVICE void load_queries(const DecodeLaunch& params, const DecodeWorkTile& block,
                                  typename TileQ::Element* to, int first_row) {
  const Attention& a = params.attention;
  constexpr int kVector = 8;
  constexpr int kVectors = TileQ::kColumns / kVector;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  for (int i = thread; i < TileQ::kRows * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int first = i % kVectors * kVector;
    const int in_tile = first_row + row;
    const uint16_t* const source = query_row(params, block, in_tile);
    const int columns = in_tile < block.rows ? a.head_dim : 0;
    auto* const piece = piece_of<TileQ>(to, row, i % kVectors);
    if (!params.q_has_vectors) {
      load_elements<uint16_t>(source, a.q_stride.col, first, columns, piece);
    } else {  // all on their way at once
      const auto& from = *reinterpret_cast<const cute::uint128_t*>(source + first);
      auto& to = *reinterpret_cast<cute::uint128_t*>(piece);
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(from, to, first < columns);
    }
  }
  cute::cp_async_fence();
}

// The same for caches of 8 bits. Rows become float16, and q_factor gets what their scores have to
// be multiplied by. Where K is converted in registers, of every sixteen columns each four
// neighbours become the columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9: those that a thread has of K's
// bytes in one register (products.h).
template <class Traits, int kThreads>
class HalfQueries {
  using TileQ = typename Traits::TileQ;
  static constexpr int kPieces = ceil_div(Traits::kHeadDim, 4 * 32);  // of a lane, in each row
  static constexpr int kBatch = 4;                                    // rows whose loads overlap
  using Piece = uint16_t[4];
  using Row = Piece[kPieces];

 public:
  ANYFLASH_DEVICE HalfQueries(const DecodeLaunch& params, const DecodeWorkTile& block,
                              typename Traits::SharedStorage& smem, typename TileQ::Element* to,
                              int first_row)
      : params_(params), block_(block), smem_(smem), to_(to), first_row_(first_row) {}

  ANYFLASH_DEVICE void load() {
    constexpr int kWarps = kThreads / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % kWarps;
    for (int first = warp; first < TileQ::kRows; first += kBatch * kWarps) {
      Row rows[kBatch];
      ANYFLASH_UNROLL
      for (int i = 0; i < kBatch; ++i) load_row(first + i * kWarps, rows[i]);
      ANYFLASH_UNROLL
      for (int i = 0; i < kBatch; ++i) store_row(first + i * kWarps, rows[i]);
    }
  }

 private:
  // The first column of a lane's piece.
  static ANYFLASH_DEVICE int column(int piece) {
    return 4 * (static_cast<int>(threadIdx.x) % 32 + 32 * piece);
  }

  ANYFLASH_DEVICE void load_row(int row, Row& pieces) const {
    const int in_tile = first_row_ + row;
    const uint16_t* const source = query_row(params_, block_, in_tile);
    const int columns = in_tile < block_.rows ? params_.attention.head_dim : 0;
    const int64_t stride = params_.attention.q_stride.col;
    ANYFLASH_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int first = column(i);
      if (params_.q_has_vectors) {
        uint2 words{};
        if (first < columns) words = *reinterpret_cast<const uint2*>(source + first);
        ANYFLASH_UNROLL
        for (int x = 0; x < 4; ++x) {
          pieces[i][x] = static_cast<uint16_t>((x < 2 ? words.x : words.y) >> 16 * (x % 2));
        }
        continue;
      }
      ANYFLASH_UNROLL
      for (int x = 0; x < 4; ++x) {
        const int from = first + x;
        pieces[i][x] = from < columns ? source[from * stride] : uint16_t{0};
      }
    }
  }

  ANYFLASH_DEVICE void store_row(int row, const Row& pieces) {
    const HalfScale scale(Traits::kConvertsQ ? largest_exponent(pieces) : 0);
    ANYFLASH_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      if (column(i) >= Traits::kHeadDim) continue;
      ANYFLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        auto* const to = place_of_pair(row, column(i), half);
        to[0] = half_of(pieces[i][2 * half], scale);
        to[1] = half_of(pieces[i][2 * half + 1], scale);
      }
    }
    if (threadIdx.x % 32 == 0) {
      smem_.scales.q_factor[first_row_ + row] = Traits::kConvertsQ ? scale.inverse : 1.0f;
    }
  }

  // Of the first two of four neighbouring columns, or of the other two.
  ANYFLASH_DEVICE typename TileQ::Element* place_of_pair(int row, int column, int half) const {
    if constexpr (Traits::kSharesRows) {
      return piece_of<TileQ>(to_, row, column / 8) + column % 8 + 2 * half;
    } else {
      return piece_of<TileQ>(to_, row, column / 16 * 2 + half) + column % 16 / 2;
    }
  }

  // Of a row.
  static ANYFLASH_DEVICE int largest_exponent(const Row& pieces) {
    int largest = 0;
    ANYFLASH_UNROLL
    for (const Piece& piece : pieces) {
      ANYFLASH_UNROLL
      for (const uint16_t bits : piece) largest = max(largest, finite_exponent(bits));
    }
    ANYFLASH_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    return largest;
  }

  static ANYFLASH_DEVICE cutlass::half_t half_of(uint16_t bits, const HalfScale& scale) {
    if constexpr (Traits::kConvertsQ) return cutlass::half_t(scaled(bits, scale.power));
    else return cutlass::half_t::bitcast(bits);
  }

  const DecodeLaunch& params_;
  const DecodeWorkTile& block_;
  typename Traits::SharedStorage& smem_;
  typename TileQ::Element* const to_;
  const int first_row_;
};

}  // namespace anyflash::sm90
