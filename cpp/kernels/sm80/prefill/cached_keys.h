// Tiles of keys and values from a cache on their way to shared memory, for the forward's main loop.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/cache.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Where the rows of two tiles lie in the caches of keys and of values; null: no page has the row.
template <class Element, int kBlockN>
struct TileRows {
  const Element* k_head;  // the head's first elements
  const Element* v_head;
  const Element* k[2][kBlockN];
  const Element* v[2][kBlockN];
};

template <class Traits>
class CachedKeyPipeline;

// In the place of TensorKeys: each key lies where the cache of its sequence has it.
template <class Element_, int kBlockN>
struct CachedKeys {
  const KvCacheParams& cache;
  const CachedSequence& sequence;  // in shared memory, as the next: the loop needs the registers
  TileRows<Element_, kBlockN>& rows;

  template <class Traits>
  using Pipeline = CachedKeyPipeline<Traits>;

  // Reads elements of V, (key, column), as floats; 0 where the cache has none.
  template <class Element>
  ANYFLASH_DEVICE auto values(const Attention&, const ForwardWorkTile&) const {
    return [this](int key, int x) {
      const Strides& stride = cache.attention.v_stride;
      const CacheSlot place = place_of(cache, sequence, key);
      if (place.slot < 0) return 0.0f;
      const int64_t row = place.slot * stride.batch + place.row * stride.row;
      return static_cast<float>(rows.v_head[row + x]);
    };
  }
};

// A thread's part of the loads of K, or of V. Key j of a tile goes to row KeyOrder(j).
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
  ANYFLASH_DEVICE CachedTileLoader(const void* any, int columns, Element* tile)
      : any_(any),
        tXsX_(target(tile, threadIdx.x)),
        tXcX_(coordinates(threadIdx.x)),
        columns_(tXcX_, columns) {}

  // A tile whose rows lie there.
  ANYFLASH_DEVICE void load(const Element* const* rows) {
    using namespace cute;
    const Load atom;
    CUTE_UNROLL
    for (int row = 0; row < size<1>(tXsX_); ++row) {
      const Element* source = rows[get<0>(tXcX_(0, row, 0))];
      const bool exists = source != nullptr;
      if (!exists) source = static_cast<const Element*>(any_);
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        auto piece = make_tensor(make_gmem_ptr(source + get<1>(tXcX_(0, row, panel))),
                                 Layout<Int<Tile::kVector>>{});
        copy(atom.with(exists && columns_.ok[panel]), piece, tXsX_(_, row, panel));
      }
    }
  }
  // Goes on to another buffer, `tiles` behind this one.
  ANYFLASH_DEVICE void advance(int tiles) {
    tXsX_.data() = tXsX_.data() + tiles * (Tile::kRows * Tile::kColumns);
  }
  // Takes NaN and infinity out of what this thread has loaded; returns whether there were any.
  ANYFLASH_DEVICE bool clear() { return clear_nonfinite(tXsX_); }

 private:
  const void* const any_;  // an address to name where nothing is read
  Target tXsX_;            // (VECTOR, ROWS, PANELS)
  Coordinates tXcX_;       // (VECTOR, ROWS, PANELS)
  ColumnGuard<kPanels> columns_;
};

// As KeyValuePipeline, with a table between: before Q K^T threads look up a row each of the next
// tile. Behind it K of that tile is loaded, with two buffers V as well; with one, V of a tile is
// loaded while its Q K^T runs.
template <class Traits>
class CachedKeyPipeline {
  using Element = typename Traits::Element;
  using Mma = typename Traits::TiledMma;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr bool kTwoBuffers = Traits::kStages == 2;
  static_assert(kBlockN <= Traits::kThreads);

 public:
  // `first`: the first tile that is visited.
  ANYFLASH_DEVICE CachedKeyPipeline(const Attention& attention,
                                    const CachedKeys<Element, kBlockN>& keys,
                                    const ForwardWorkTile&, typename Traits::SharedStorage& smem,
                                    int first)
      : keys_(keys),
        k_loader_(attention.k, attention.head_dim, smem.k.data()),
        v_loader_(attention.v, attention.head_dim_v, smem.v.data()),
        k_(smem.k.data(), threadIdx.x),
        v_t_(smem.v.data(), threadIdx.x),
        tile_(first) {}

  // The first loads. Only the first tile can hold keys that do not exist: it has `keys`.
  ANYFLASH_DEVICE void start(int keys) {
    find_rows(keys);
    __syncthreads();  // the tile's rows are known
    k_loader_.load(keys_.rows.k[current_]);
    if constexpr (kTwoBuffers) v_loader_.load(keys_.rows.v[current_]);
  }

  template <bool kGuardKeys>
  ANYFLASH_DEVICE void acquire_keys(int, int distance, bool clears) {
    cute::cp_async_wait<0>();
    if constexpr (kTwoBuffers) clear_values(clears);
    __syncthreads();  // K_n is there; every warp has done with the V before, and with its rows
    if constexpr (!kTwoBuffers) v_loader_.load(keys_.rows.v[current_]);
    current_ ^= 1;
    tile_ += distance;
    if (distance != 0) find_rows(kBlockN);
  }

  ANYFLASH_DEVICE void acquire_values(int distance, bool clears) {
    if constexpr (!kTwoBuffers) {
      cute::cp_async_wait<0>();
      clear_values(clears);
    }
    __syncthreads();  // the next rows are known, V_n is there; every warp has done with K_n
    if constexpr (kTwoBuffers) {
      k_loader_.advance(to_other_);
      v_loader_.advance(to_other_);
    }
    if (distance == 0) return;
    k_loader_.load(keys_.rows.k[current_]);
    if constexpr (kTwoBuffers) v_loader_.load(keys_.rows.v[current_]);
  }

  // Goes on to the next tile's buffers.
  ANYFLASH_DEVICE void advance() {
    if constexpr (kTwoBuffers) {
      k_.advance(to_other_ * (TileK::kRows * TileK::kColumns));
      v_t_.advance(to_other_ * (TileV::kRows * TileV::kColumns));
      to_other_ = -to_other_;
    }
  }

  // K_n and V_n^T, as operands.
  ANYFLASH_DEVICE const auto& keys() const { return k_; }
  ANYFLASH_DEVICE const auto& values() const { return v_t_; }

  // Whether this thread took NaN or infinity out of a tile of V.
  ANYFLASH_DEVICE bool found_nonfinite() const { return found_nonfinite_; }

 private:
  // A thread finds one row of tile_, which has `keys`. Before Q K^T, when there are registers.
  ANYFLASH_DEVICE void find_rows(int keys) const {
    const int row = threadIdx.x;
    if (row >= kBlockN) return;
    CacheSlot place{-1, 0};
    if (row < keys) place = place_of(keys_.cache, keys_.sequence, tile_ * kBlockN + row);
    const auto find = [&](const Element* head, const Strides& stride) {
      return place.slot < 0 ? nullptr : head + place.slot * stride.batch + place.row * stride.row;
    };
    const Attention& a = keys_.cache.attention;
    keys_.rows.k[current_][row] = find(keys_.rows.k_head, a.k_stride);
    keys_.rows.v[current_][row] = find(keys_.rows.v_head, a.v_stride);
  }
  ANYFLASH_DEVICE void clear_values(bool clears) {  // this thread's own pieces
    if (clears) found_nonfinite_ |= v_loader_.clear();
  }

  const CachedKeys<Element, kBlockN>& keys_;
  CachedTileLoader<TileK, typename Traits::KeyOrder> k_loader_;
  CachedTileLoader<TileV, typename Traits::KeyOrder> v_loader_;
  LdmatrixOperand<Mma, Side::kB, TileK> k_;
  LdmatrixOperand<Mma, Side::kB, TileV, /*kTransposed=*/true> v_t_;
  int tile_;          // whose rows are looked up
  int current_ = 0;   // which rows are those of the tile that is loaded
  int to_other_ = 1;  // in tiles: where the other buffer is
  bool found_nonfinite_ = false;
};

}  // namespace anyflash::sm80
