// Types of the Hopper kernels for latent attention with many rows, whose warpgroups share them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/decode_work_tile.h"
#include "sm90/accumulator.h"
#include "sm90/decode/traits.h"
#include "sm90/panel_tile.h"
#include "sm90/pipeline.h"

namespace anyflash::sm90 {

// Rows are the rows of the products here: S = Q K^T, O = P V. Each warpgroup makes the scores of
// half of the keys, for all rows, and half of the output's columns. Of a 16-bit cache, two tiles of
// 64 keys are in use at once (paired_tiles.h). One of 8 bits is converted once, into shared memory
// (converted_tiles.h).
template <class Element_, int kHeadDim_, int kHeadDimV_, bool k8Bit_>
struct SharedRowsTraits : DecodeTraits<Element_, kHeadDim_, kHeadDimV_, 64, k8Bit_> {
  using Base = DecodeTraits<Element_, kHeadDim_, kHeadDimV_, 64, k8Bit_>;
  using typename Base::Operand;
  using typename Base::Stored;
  using typename Base::TileK;  // as it is stored
  static_assert(Base::kLatent && Base::kWarpgroups == 2);
  static constexpr bool kSharesRows = true;
  static constexpr bool kPairsTiles = !k8Bit_;

  static constexpr int kKeys = kPairsTiles ? Base::kBlockN : Base::kBlockN / 2;  // of a warpgroup
  using TileQ = PanelTile<Operand, Base::kBlockM, kHeadDim_>;
  using Keys = PanelTile<Operand, Base::kBlockN, kHeadDim_>;     // as products read them
  using Values = PanelTile<Operand, Base::kBlockN, kHeadDimV_>;  // the first panels of `Keys`
  using TileP = PanelTile<Operand, Base::kBlockM, Base::kBlockN>;
  using Scores = Accumulator<kKeys>;
  static constexpr int kOutColumns = kHeadDimV_ / 2;
  using Out = Accumulator<kOutColumns>;

  // V's columns are half the first warpgroup's and half the second one's. P takes the place of K's
  // other columns, when scores have been made.
  static constexpr int kHalfPanels = Values::kPanels / 2;
  static constexpr int kOtherPanels = Keys::kPanels - Values::kPanels;
  static_assert(Values::kPanels % 2 == 0 && TileP::kPanels == kOtherPanels);

  // A tile of 16 bits comes in these parts, the others last.
  using HalfTile = PanelTile<Operand, Base::kBlockN, kHalfPanels * kPanelColumns>;
  using OtherTile = PanelTile<Operand, Base::kBlockN, kOtherPanels * kPanelColumns>;
  static constexpr int kOthers = 2;  // the number of that part
  struct Parts {
    Ring<1> of_tiles[2][3];
  };
  struct Tile {
    Ring<1> ring;
    typename Base::Scales scales;
  };

  // Behind a tile of 8 bits lies what it is converted to.
  static constexpr int kTileElements =
      TileK::kSize + (kPairsTiles ? 0 : Keys::kBytes / static_cast<int>(sizeof(Stored)));
  struct SharedStorage : std::conditional_t<kPairsTiles, Parts, Tile> {
    union {
      alignas(1024) Stored tiles[Base::kBuffers][kTileElements];
      float result[Base::kBlockM][Base::kOutStride];  // after the loop, not yet divided by the sums
    };
    alignas(1024) Operand q[TileQ::kSize];
    float of_warps[4][Base::kBlockM];           // maxima, or sums, of each warpgroup's keys; else 0
    float maximum[Base::kBlockM];               // of products
    SplitKeys seen[Base::kBlockM];              // by each row, of the split
    bool found_by_warps[Base::kConsumerWarps];  // NaN or infinity in V
    DecodeWorkTile block;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");
};

}  // namespace anyflash::sm90
