// Tiles of keys and values from a cache, for the forward's main loop.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "variant/cache.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

template <class Tile, class KeyOrder>
class CachedTileLoader;

// In the place of TensorKeys: each key lies where the cache of its sequence has it.
struct CachedKeys {
  const KvCacheParams& cache;
  const CachedSequence& sequence;  // in shared memory: the loop needs the registers

  template <class Tile, class KeyOrder>
  using Loader = CachedTileLoader<Tile, KeyOrder>;

  // Reads elements of V, (key, column), as floats; 0 where the cache has none.
  template <class Element>
  ANYFLASH_DEVICE auto values(const Attention& attention, const ForwardWorkTile& block) const {
    const auto* const v =
        static_cast<const Element*>(attention.v) + block.head_k * attention.v_stride.head;
    return [v, this](int key, int x) {
      const Strides& stride = cache.attention.v_stride;
      const CacheSlot place = place_of(cache, sequence, key);
      if (place.slot < 0) return 0.0f;
      return static_cast<float>(v[place.slot * stride.batch + place.row * stride.row + x]);
    };
  }
};

// As KeyTileLoader. The block table is asked for each row when the row is loaded: it is in the L1
// cache as a rule, and no register has to keep its answer.
template <class Tile, class KeyOrder>
class CachedTileLoader {
  using Element = typename Tile::Element;
  using Load = typename Tile::Load;

  ANYFLASH_HOST_DEVICE static auto target(Element* tile, int thread) {
    using namespace cute;
    const auto by_key = composition(typename Tile::Layout{}, make_tile(KeyOrder{}, _));
    return Load{}.get_thread_slice(thread).partition_D(make_tensor(make_smem_ptr(tile), by_key));
  }
  ANYFLASH_HOST_DEVICE static auto coordinates(int thread) {
    return Load{}.get_thread_slice(thread).partition_S(
        cute::make_identity_tensor(typename Tile::Shape{}));
  }
  using Target = decltype(target(nullptr, 0));
  using Coordinates = decltype(coordinates(0));
  static constexpr int kPanels = decltype(cute::size<2>(Target{}))::value;

 public:
  // `first`: the first tile to be loaded.
  ANYFLASH_DEVICE CachedTileLoader(const CachedKeys& keys, const void* data, const Strides& stride,
                                   const ForwardWorkTile& block, int columns, Element* tile,
                                   int first)
      : keys_(keys),
        stride_(stride),
        head_(static_cast<const Element*>(data) + block.head_k * stride.head),
        tXsX_(target(tile, threadIdx.x)),
        tXcX_(coordinates(threadIdx.x)),
        columns_(tXcX_, columns),
        first_key_(first * Tile::kRows) {}

  // kGuardKeys: only `keys` of the tile may exist.
  template <bool kGuardKeys>
  ANYFLASH_DEVICE void load(int keys = 0) {
    using namespace cute;
    const Load atom;
    CUTE_UNROLL
    for (int row = 0; row < size<1>(tXsX_); ++row) {
      const int key = get<0>(tXcX_(0, row, 0));
      CacheSlot place{-1, 0};
      if (!kGuardKeys || key < keys) {
        place = place_of(keys_.cache, keys_.sequence, first_key_ + key);
      }
      const bool exists = place.slot >= 0;
      const Element* const source =
          head_ + (exists ? place.slot * stride_.batch + place.row * stride_.row : 0);
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        auto piece = make_tensor(make_gmem_ptr(source + get<1>(tXcX_(0, row, panel))),
                                 Layout<Int<Tile::kVector>>{});
        copy(atom.with(exists && columns_.ok[panel]), piece, tXsX_(_, row, panel));
      }
    }
  }
  // Goes on to another tile of the sequence.
  ANYFLASH_DEVICE void move(int tiles) { first_key_ += tiles * Tile::kRows; }
  // Goes on to another buffer, `tiles` behind this one.
  ANYFLASH_DEVICE void advance(int tiles) {
    tXsX_.data() = tXsX_.data() + tiles * (Tile::kRows * Tile::kColumns);
  }
  // Takes NaN and infinity out of what this thread has loaded; returns whether there were any.
  ANYFLASH_DEVICE bool clear() { return clear_nonfinite(tXsX_); }

 private:
  const CachedKeys& keys_;
  const Strides& stride_;
  const Element* head_;
  Target tXsX_;       // (VECTOR, ROWS, PANELS)
  Coordinates tXcX_;  // (VECTOR, ROWS, PANELS)
  ColumnGuard<kPanels> columns_;
  int first_key_;
};

}  // namespace anyflash::sm80
