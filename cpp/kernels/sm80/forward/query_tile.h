// The query rows of a forward CTA: loaded once, multiplied with every tile of keys.
#pragma once

#include <cute/tensor.hpp>

#include "common/layout.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

template <class Traits>
class QueryTile {
  using Element = typename Traits::Element;
  using Mma = typename Traits::TiledMma;
  using Tile = typename Traits::TileQ;
  using Operand = LdmatrixOperand<Mma, Side::kA, Tile>;
  using BottomOperand = LdmatrixOperand<Mma, Side::kA, Tile, false, Traits::kBottomRows>;
  static constexpr int kTopRows = Traits::kBlockM - Traits::kBottomRows;
  static constexpr bool kInRegisters = Traits::kConfig.queries_in_registers;

 public:
  // Starts to load the tile.
  ANYFLASH_DEVICE QueryTile(const Attention& attention, const ForwardWorkTile& work_tile,
                            Element* tile)
      : tile_(tile),
        operand_(tile, threadIdx.x),
        bottom_(tile + kTopRows * Tile::kPanelColumns, threadIdx.x) {
    load(attention, work_tile);
  }

  // Before the first product. factor: what Q is multiplied by, 1 as a rule.
  ANYFLASH_DEVICE void prepare(float factor) {
    if (kInRegisters || factor != 1.0f) {
      cute::cp_async_wait<0>();
      __syncthreads();  // Q has landed for every thread
    }
    if (factor != 1.0f) {
      multiply_by(factor);
      if (kInRegisters) __syncthreads();  // Q is there
    }
    if constexpr (kInRegisters) {
      CUTE_UNROLL
      for (int i = 0; i < operand_.kBlocks; ++i) operand_.load(tSrQ_, i);
    }
  }

  // acc = Q K^T, for rows from kFirst on along MMA_M. acc is 0 before.
  template <int kFirst, class Acc, class Keys>
  ANYFLASH_DEVICE void multiply(Acc& acc, const Keys& keys) {
    const Mma mma;
    if constexpr (kInRegisters) {
      gemm_register_smem(acc, fragment_from<kFirst>(tSrQ_), keys, mma);
    } else if constexpr (kFirst > 0) {
      gemm_smem_smem(acc, acc, bottom_, keys, mma);
    } else {
      gemm_smem_smem(acc, acc, operand_, keys, mma);
    }
  }

 private:
  ANYFLASH_DEVICE void load(const Attention& attention, const ForwardWorkTile& work_tile) const {
    using namespace cute;
    using Shape = typename Tile::Shape;
    typename Tile::Load load_q;
    int thread = threadIdx.x;
    // With one buffer, ptxas spills in the loop if it keeps for K what it finds for Q here.
    if constexpr (Traits::kStages == 1 && !Traits::kSplitKeysAcrossWarps) {
      asm volatile("" : "+r"(thread));
    }
    auto thread_q = load_q.get_thread_slice(thread);
    auto gQ = gmem_tile<Element>(Shape{}, attention.q, attention.q_stride, work_tile.sequence.batch,
                                 work_tile.head, work_tile.sequence.first_q + work_tile.first_row);
    auto sQ = make_tensor(make_smem_ptr(tile_), typename Tile::Layout{});
    auto tQcQ = thread_q.partition_S(make_identity_tensor(Shape{}));  // (VECTOR, ROWS, PANELS)
    const ColumnGuard<decltype(size<2>(tQcQ))::value> columns(tQcQ, attention.head_dim);
    load_tile<true>(load_q, thread_q.partition_S(gQ), thread_q.partition_D(sQ), tQcQ, columns,
                    work_tile.sequence.seqlen_q - work_tile.first_row);
  }

  // Overwrites Q in shared memory, for the scales that are not positive (-1 or 0).
  ANYFLASH_DEVICE void multiply_by(float factor) const {
    auto sQ = cute::make_tensor(cute::make_smem_ptr(tile_), typename Tile::Layout{});
    for (int i = threadIdx.x; i < cute::size(sQ); i += Traits::kThreads) {
      sQ(i) = Element(static_cast<float>(sQ(i)) * factor);
    }
  }

  Element* tile_;
  Operand operand_;
  BottomOperand bottom_;
  decltype(Operand::fragment()) tSrQ_;  // (MMA, MMA_M, MMA_K), where Q stays in registers
};

}  // namespace anyflash::sm80
