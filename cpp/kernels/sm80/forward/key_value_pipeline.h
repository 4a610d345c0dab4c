// Tiles of K and V on their way to shared memory, and what waits for them.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "cuda/epilogue.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// A thread's part of the loads of K, or of V: tiles of Tile::kRows keys, by cp.async. Key j of a
// tile goes to row KeyOrder(j).
template <class Tile, class KeyOrder>
class KeyTileLoader {
  using Element = typename Tile::Element;
  using Load = typename Tile::Load;
  using Shape = typename Tile::Shape;

  ANYFLASH_HOST_DEVICE static auto source(const void* data, const Strides& stride,
                                          const ForwardWorkTile& work_tile, int thread) {
    return Load{}.get_thread_slice(thread).partition_S(
        gmem_tile<Element>(Shape{}, data, stride, work_tile.sequence.batch, work_tile.head_k,
                           work_tile.sequence.first_k));
  }
  ANYFLASH_HOST_DEVICE static auto target(Element* tile, int thread) {
    using namespace cute;
    const auto by_key = composition(typename Tile::Layout{}, make_tile(KeyOrder{}, _));
    return Load{}.get_thread_slice(thread).partition_D(make_tensor(make_smem_ptr(tile), by_key));
  }
  ANYFLASH_HOST_DEVICE static auto coordinates(int thread) {
    return Load{}.get_thread_slice(thread).partition_S(cute::make_identity_tensor(Shape{}));
  }
  using Source = decltype(source(nullptr, Strides{}, ForwardWorkTile{}, 0));
  using Target = decltype(target(nullptr, 0));
  using Coordinates = decltype(coordinates(0));

 public:
  // `first`: the first tile to be loaded.
  ANYFLASH_DEVICE KeyTileLoader(const void* data, const Strides& stride,
                                const ForwardWorkTile& work_tile, int columns, Element* tile,
                                int first)
      : stride_(stride),
        tXgX_(source(data, stride, work_tile, threadIdx.x)),
        tXsX_(target(tile, threadIdx.x)),
        tXcX_(coordinates(threadIdx.x)),
        columns_(tXcX_, columns) {
    move(first);
  }

  // kGuardKeys: only `keys` of the tile may exist.
  template <bool kGuardKeys>
  ANYFLASH_DEVICE void load(int keys = 0) {
    load_tile<kGuardKeys>(Load{}, tXgX_, tXsX_, tXcX_, columns_, keys);
  }
  // Goes on to another tile of the sequence.
  ANYFLASH_DEVICE void move(int tiles) {
    tXgX_.data() = tXgX_.data() + int64_t{tiles} * Tile::kRows * stride_.row;
  }
  // Goes on to another buffer, `tiles` behind this one.
  ANYFLASH_DEVICE void advance(int tiles) {
    tXsX_.data() = tXsX_.data() + tiles * (Tile::kRows * Tile::kColumns);
  }
  // Takes NaN and infinity out of what this thread has loaded; returns whether there were any.
  ANYFLASH_DEVICE bool clear() { return clear_nonfinite(tXsX_); }

 private:
  const Strides& stride_;
  Source tXgX_;       // (VECTOR, ROWS, PANELS)
  Target tXsX_;       // (VECTOR, ROWS, PANELS)
  Coordinates tXcX_;  // (VECTOR, ROWS, PANELS)
  ColumnGuard<decltype(cute::size<2>(Target{}))::value> columns_;
};

// With one buffer each for K and V, a tile of K arrives while P V of the tile before runs. Its tile
// of V arrives while its Q K^T runs. With two, both arrive during all of the tile before. Waits are
// for everything that is on its way, so that a commit means something to ptxas only
// (ForwardConfig::commits_after_k).
template <class Traits>
class KeyValuePipeline {
  using Mma = typename Traits::TiledMma;
  using TileK = typename Traits::TileK;
  using TileV = typename Traits::TileV;
  static constexpr bool kTwoBuffers = Traits::kStages == 2;

 public:
  // `first`: the first tile that is visited.
  template <class Keys>
  ANYFLASH_DEVICE KeyValuePipeline(const Attention& attention, const Keys&,
                                   const ForwardWorkTile& work_tile,
                                   typename Traits::SharedStorage& smem, int first)
      : k_loader_(attention.k, attention.k_stride, work_tile, attention.head_dim, smem.k.data(),
                  first),
        v_loader_(attention.v, attention.v_stride, work_tile, attention.head_dim_v, smem.v.data(),
                  first),
        k_(smem.k.data(), threadIdx.x),
        v_t_(smem.v.data(), threadIdx.x) {}

  // The first loads. Only the first tile can hold keys that do not exist: it has `keys`.
  ANYFLASH_DEVICE void start(int keys) {
    k_loader_.template load<true>(keys);
    if constexpr (kTwoBuffers) v_loader_.template load<true>(keys);
  }

  // Waits for K_n, and starts to load what is due: with one buffer V_n, which holds `keys`, else
  // K of the next tile, `distance` tiles on (0: there is none).
  template <bool kGuardKeys>
  ANYFLASH_DEVICE void acquire_keys(int keys, int distance, bool clears) {
    cute::cp_async_wait<0>();
    if constexpr (kTwoBuffers) clear_values(clears);
    __syncthreads();  // K_n is there; every warp has done with the V before
    if constexpr (kTwoBuffers) {
      k_loader_.advance(to_other_);
      v_loader_.advance(to_other_);
      load_next_keys(distance);
    } else {
      v_loader_.template load<kGuardKeys>(keys);
    }
    v_loader_.move(distance);
  }

  // Waits for V_n, and starts to load what is due of the next tile.
  ANYFLASH_DEVICE void acquire_values(int distance, bool clears) {
    if constexpr (kTwoBuffers) {
      // Here rather than with K, so that Q K^T does not wait behind it.
      if (distance != 0) v_loader_.template load<false>();
    } else {
      cute::cp_async_wait<0>();
      clear_values(clears);
      __syncthreads();  // V_n is there; every warp has done with K_n
      load_next_keys(distance);
    }
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
  ANYFLASH_DEVICE void load_next_keys(int distance) {
    if (distance == 0) return;
    k_loader_.move(distance);
    k_loader_.template load<false>();
    if constexpr (Traits::kConfig.commits_after_k) cute::cp_async_fence();
  }
  ANYFLASH_DEVICE void clear_values(bool clears) {  // this thread's own pieces
    if (clears) found_nonfinite_ |= v_loader_.clear();
  }

  KeyTileLoader<TileK, typename Traits::KeyOrder> k_loader_;
  KeyTileLoader<TileV, typename Traits::KeyOrder> v_loader_;
  LdmatrixOperand<Mma, Side::kB, TileK> k_;
  LdmatrixOperand<Mma, Side::kB, TileV, /*kTransposed=*/true> v_t_;
  int to_other_ = 1;  // in tiles: where the other buffer is
  bool found_nonfinite_ = false;
};

// Where the keys of a sequence lie: one after the other. For those of a cache see sm80/prefill.
struct TensorKeys {
  template <class Traits>
  using Pipeline = KeyValuePipeline<Traits>;

  // Reads elements of V, (key, column), as floats.
  template <class Element>
  ANYFLASH_DEVICE static auto values(const Attention& attention, const ForwardWorkTile& work_tile) {
    return tensor_values<Element>(attention, work_tile);
  }
};

}  // namespace anyflash::sm80
