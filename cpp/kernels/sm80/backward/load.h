// Tiles from global to shared memory by cp.async: Q and dO by rows, K and V once for a CTA.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/finite.h"
#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "sm80/copy.h"
#include "sm80/tiled_mma.h"
#include "variant/backward_scratch.h"
#include "variant/sequence.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// What a thread copies of a tile whose row r lies in row Order(r) of shared memory, and where that
// is in the tile: (VECTOR, ROWS, PANELS).
template <class Tile, class Order, class Element>
ANYFLASH_DEVICE auto pieces_in_smem(Element* tile, int thread) {
  using namespace cute;
  const auto sX = make_tensor(make_smem_ptr(tile), typename Tile::Layout{});
  return typename Tile::Load{}.get_thread_slice(thread).partition_D(
      make_tensor(sX.data(), composition(sX.layout(), make_tile(Order{}, _))));
}
template <class Tile>
ANYFLASH_DEVICE auto places_of_pieces(int thread) {
  return typename Tile::Load{}.get_thread_slice(thread).partition_S(
      cute::make_identity_tensor(typename Tile::Shape{}));
}

// A thread's share of the loads of one tile.
template <class Tile, class Order>
class TileLoader {
  using Element = typename Tile::Element;
  static constexpr int kPanels = Tile::kColumns / Tile::kPanelColumns;

 public:
  ANYFLASH_DEVICE TileLoader(Element* tile, int thread)
      : thread_(thread),
        tXsX_(pieces_in_smem<Tile, Order>(tile, thread)),
        tXcX_(places_of_pieces<Tile>(thread)) {}

  // What does not exist becomes 0.
  ANYFLASH_DEVICE void load(const void* data, const Strides& stride, const TileRows& rows,
                            int columns) {
    auto gX =
        gmem_tile<Element>(typename Tile::Shape{}, data, stride, rows.batch, rows.head, rows.first);
    const ColumnGuard<kPanels> guard(tXcX_, columns);
    load_tile<true>(load_, load_.get_thread_slice(thread_).partition_S(gX), tXsX_, tXcX_, guard,
                    rows.count);
  }
  // Goes on to a tile that lies `elements` elements behind this one.
  ANYFLASH_DEVICE void advance(int elements) { tXsX_.data() = tXsX_.data() + elements; }

  // Of what the thread itself has loaded.
  ANYFLASH_DEVICE bool is_finite() const { return all_finite(tXsX_); }
  ANYFLASH_DEVICE bool clear_nonfinite() { return anyflash::clear_nonfinite(tXsX_); }

 private:
  int thread_;
  typename Tile::Load load_;
  decltype(pieces_in_smem<Tile, Order>(static_cast<Element*>(nullptr), 0)) tXsX_;
  decltype(places_of_pieces<Tile>(0)) tXcX_;
};

// Q and dO of one tile of query rows, by the threads that share it.
template <class Traits>
class RowLoader {
  using Order = PlainKeyOrder<Traits::kBlockM>;
  using TileQ = typename Traits::TileQ;
  using TileDO = typename Traits::TileDO;

 public:
  ANYFLASH_DEVICE RowLoader(const BackwardScratch& params, const Sequence& sequence,
                            typename Traits::SharedStorage& smem)
      : params_(params),
        sequence_(sequence),
        smem_(smem),
        q_(smem.q[0].data(), Traits::row_thread()),
        dout_(smem.dout[0].data(), Traits::row_thread()) {}

  template <class Tiles>
  ANYFLASH_DEVICE void load(const Tiles& at) {
    const TileRows rows = query_rows(sequence_, at.head(), at.row());
    q_.load(params_.attention.q, params_.attention.q_stride, rows, params_.attention.head_dim);
    dout_.load(params_.dout, params_.dout_stride, rows, params_.attention.head_dim_v);
  }
  ANYFLASH_DEVICE void advance(int buffers) {
    q_.advance(buffers * cute::cosize_v<typename TileQ::Layout>);
    dout_.advance(buffers * cute::cosize_v<typename TileDO::Layout>);
  }
  // The thread's own pieces. A row that sees a key still gives its NaN to the results, because its
  // LSE or delta is NaN, too.
  ANYFLASH_DEVICE void clear_nonfinite() {
    q_.clear_nonfinite();
    if (dout_.clear_nonfinite()) atomicMax(&smem_.nonfinite_dout, 1);
  }

 private:
  const BackwardScratch& params_;
  const Sequence& sequence_;
  typename Traits::SharedStorage& smem_;
  TileLoader<TileQ, Order> q_;
  TileLoader<TileDO, Order> dout_;
};

// K and V of the CTA, by all of its threads.
template <class Traits>
class KeyLoader {
  using Order = typename Traits::KeyOrder;

 public:
  ANYFLASH_DEVICE KeyLoader(const BackwardScratch& params, const Sequence& sequence,
                            const BackwardWorkTile& block, typename Traits::SharedStorage& smem)
      : params_(params),
        sequence_(sequence),
        block_(block),
        smem_(smem),
        k_(smem.k.data(), threadIdx.x),
        v_(smem.v.data(), threadIdx.x) {}

  ANYFLASH_DEVICE void load_k() {
    k_.load(params_.attention.k, params_.attention.k_stride, rows(), params_.attention.head_dim);
  }
  ANYFLASH_DEVICE void load_v() {
    v_.load(params_.attention.v, params_.attention.v_stride, rows(), params_.attention.head_dim_v);
  }
  // Once K is there.
  ANYFLASH_DEVICE void note_nonfinite_k() const {
    if (!k_.is_finite()) atomicMax(&smem_.nonfinite_keys, 1);
  }
  ANYFLASH_DEVICE void clear_nonfinite_k() { k_.clear_nonfinite(); }

 private:
  ANYFLASH_DEVICE TileRows rows() const {
    return key_rows(sequence_, block_.head_k, block_.first_key);
  }

  const BackwardScratch& params_;
  const Sequence& sequence_;
  const BackwardWorkTile& block_;
  typename Traits::SharedStorage& smem_;
  TileLoader<typename Traits::TileK, Order> k_;
  TileLoader<typename Traits::TileV, Order> v_;
};

}  // namespace anyflash::sm80
