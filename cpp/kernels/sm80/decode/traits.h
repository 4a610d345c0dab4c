// Types that a decoding kernel is made of.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "common/macros.h"
#include "sm80/decode/config.h"
#include "sm80/decode/work_tile.h"
#include "sm80/smem_tile.h"
#include "sm80/tiled_mma.h"

namespace anyflash::sm80 {

// k8Bit: the cache's elements have 8 bits (is_quantized). Two of them are moved as if they were one
// Operand, up to the registers. With two head dims attention is latent: V is the first columns of
// K, and comes with it.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, bool k8Bit_>
struct DecodeTraits {
  using Element = Element_;  // of Q and of results
  // Of the products.
  using Operand = std::conditional_t<k8Bit_, cutlass::half_t, Element>;
  static constexpr bool kConvertsQ = !std::is_same_v<Operand, Element>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr bool k8Bit = k8Bit_;
  static constexpr bool kLatent = kHeadDim != kHeadDimV;
  static constexpr DecodeConfig kConfig = decode_config(kHeadDim, kBlockM_, k8Bit, kLatent);
  static_assert(kConfig.head_dim > 0, "config.h lacks a row that kernels.cmake asks for");
  static constexpr Tile kTile = kConfig.tile;
  static constexpr bool kOwnsSm = false;  // so clusters stay on half of the SMs (suits_cluster)
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kKeyWarps = kConfig.key_warps;
  static constexpr bool kJoinsInCluster = true;  // where there are clusters
  static constexpr int kColumnWarps = kConfig.column_warps;
  static constexpr int kGroupThreads = kThreads / kKeyWarps;        // that share keys
  static constexpr int kMmaThreads = kGroupThreads / kColumnWarps;  // and columns of V
  static constexpr int kWarpColumns = kHeadDimV / kColumnWarps;
  static constexpr int kWarpKeys = kBlockN / kKeyWarps;
  static constexpr int kStoredDim = k8Bit ? kHeadDim / 2 : kHeadDim;
  // Q stays in registers where O and the scores leave room for it.
  static constexpr bool kHoldsQ = kHeadDim <= 128 && kBlockM < 64;
  static_assert(kStages >= 2 && kWarpKeys % 16 == 0);

  using TileQ = SmemTile<Operand, kThreads, kBlockM, kHeadDim>;
  using TileKv = SmemTile<Operand, kThreads, kBlockN, kStoredDim>;
  static constexpr int kWarpOffset = kWarpKeys * TileKv::kPanelColumns;
  static constexpr int kStoredWarpColumns = (k8Bit ? kHeadDimV / 2 : kHeadDimV) / kColumnWarps;
  static constexpr int kTileElements = cute::cosize_v<typename TileKv::Layout>;

  // Rows of O are padded so that the eight rows that a warp writes at once lie in different banks.
  static constexpr int kOutStride = kHeadDimV + 8;
  struct ValueTiles {
    alignas(128) Operand own_v[kStages][kTileElements];
  };
  struct NoTiles {};  // latent: the values are columns of the keys
  struct Buffers : std::conditional_t<kLatent, NoTiles, ValueTiles> {
    alignas(128) Operand q[cute::cosize_v<typename TileQ::Layout>];
    alignas(128) Operand k[kStages][kTileElements];
    float q_factor[kBlockM];          // 8-bit caches: what Q's rows have to be multiplied by
    float k_scale[kStages][kBlockN];  // the same, where keys have scales of their own
    float v_scale[kStages][kBlockN];

    ANYFLASH_DEVICE Operand* v(int stage) {
      if constexpr (kLatent) return k[stage];
      else return this->own_v[stage];
    }
  };
  struct Result {  // after the loop, in the place of the buffers
    alignas(16) float out[kKeyWarps][kBlockM][kOutStride];
    float lse[kKeyWarps][kBlockM];
    float split_lse[kBlockM];  // of all parts, where a cluster joins splits
  };
  struct SharedStorage {
    union {
      Buffers buffers;
      Result result;
    };
    CachedWorkTile block;
  };

  using TiledMma =
      cute::TiledMMA<MmaAtom<Operand>,
                     cute::Layout<cute::Shape<cute::Int<kBlockM / 16>, cute::_1, cute::_1>>,
                     cute::Tile<cute::Int<kBlockM>, cute::_16, cute::_16>>;
  using LoadPair = cute::Copy_Atom<cute::UniversalCopy<uint32_t>, Operand>;

  // 8-bit K: a lane gets four neighbouring columns of every 16 at once. mma.sync takes them for the
  // columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. Q is read in the same order.
  using QColumns = std::conditional_t<
      k8Bit,
      cute::Layout<cute::Shape<cute::_2, cute::_4, cute::_2, cute::Int<kHeadDim / 16>>,
                   cute::Stride<cute::_1, cute::_4, cute::_2, cute::_16>>,
      cute::Layout<cute::Int<kHeadDim>>>;
  // 8-bit V: of every 16 columns the even ones become one block of eight, the odd ones the next.
  using OutColumns =
      std::conditional_t<k8Bit,
                         cute::Layout<cute::Shape<cute::_8, cute::_2, cute::Int<kWarpColumns / 16>>,
                                      cute::Stride<cute::_2, cute::_1, cute::_16>>,
                         cute::Layout<cute::Int<kWarpColumns>>>;

  // A thread's place among kMmaThreads, its group's number, which of the output's columns it has.
  ANYFLASH_DEVICE static int mma_thread() { return static_cast<int>(threadIdx.x) % kMmaThreads; }
  ANYFLASH_DEVICE static int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
  ANYFLASH_DEVICE static int column_warp() {
    return static_cast<int>(threadIdx.x) / kMmaThreads % kColumnWarps;
  }
};

}  // namespace anyflash::sm80
