// The backward for head dims above 256, by chunks of columns: types, shared memory, loads.
//
// Two things do not fit. The tiles of Q, dO, K and V do not fit the shared memory: so K alone is
// held whole. The others come by chunks of columns, through buffers for a chunk of rows and one of
// V. The sums of dK and dV do not fit the registers: so each has a launch of its own, and S is
// computed twice.
//
//   dK:  S = Q K^T, dP = dO V^T;    dK += dS^T Q, dQ += dS K
//   dV:  S = Q K^T;                 dV += P^T dO
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"
#include "cuda/backward_epilogue.h"
#include "cuda/gqa_partials.h"
#include "sm80/backward/load.h"
#include "sm80/backward/traits.h"
#include "variant/backward_scratch.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Which gradient a launch makes; that of K also adds to dQ.
enum class KeyGradient { kDk, kDv };

// BackwardTraits of a config with chunks.
template <class Base>
struct ChunkedTraits : Base {
  static constexpr int kChunkColumns = Base::kConfig.chunk_columns;
  static constexpr bool kSkipsMaskedHalf = false;
  static_assert(Base::kHeadDim == Base::kHeadDimV && Base::kHeadDim % kChunkColumns == 0);
  static_assert(!Base::kPingPong && !Base::kReloadV && Base::kScoreParts == 1);

  using RowChunk = SmemTile<typename Base::Element, Base::kThreads, Base::kBlockM, kChunkColumns>;
  using KeyChunk = SmemTile<typename Base::Element, Base::kThreads, Base::kBlockN, kChunkColumns>;
  template <class Tile>
  using Buffer = typename Base::template Buffer<Tile>;
  struct SharedStorage {
    alignas(128) Buffer<typename Base::TileK> k;                     // later dK or dV
    alignas(128) cute::array<Buffer<RowChunk>, Base::kStages> rows;  // of Q or of dO
    alignas(128) cute::array<Buffer<KeyChunk>, Base::kStages> v;
    alignas(128) Buffer<typename Base::TileP> p_or_ds;
    BackwardWorkTile block;
    int nonfinite_keys;  // NaN or infinity is in K
    int nonfinite_dout;  // or was in a chunk of dO

    ANYFLASH_DEVICE typename Base::Element* ds(int = 0) { return p_or_ds.data(); }
  };
};

// A thread's share of the loads.
template <class Traits>
class ChunkLoader {
  using RowOrder = PlainKeyOrder<Traits::kBlockM>;
  using KeyOrder = typename Traits::KeyOrder;
  using RowChunk = typename Traits::RowChunk;
  using KeyChunk = typename Traits::KeyChunk;
  static constexpr int kColumns = Traits::kChunkColumns;

 public:
  ANYFLASH_DEVICE ChunkLoader(const BackwardScratch& params, const BackwardWorkTile& block,
                              typename Traits::SharedStorage& smem)
      : params_(params), block_(block), smem_(smem) {}

  ANYFLASH_DEVICE void load_k() const {
    k().load(params_.attention.k, params_.attention.k_stride, keys(), params_.attention.head_dim);
  }
  ANYFLASH_DEVICE void load_q(int chunk, int buffer, int head, int row) const {
    load_rows(params_.attention.q, params_.attention.q_stride, params_.attention.head_dim, chunk,
              buffer, head, row);
  }
  ANYFLASH_DEVICE void load_dout(int chunk, int buffer, int head, int row) const {
    load_rows(params_.dout, params_.dout_stride, params_.attention.head_dim_v, chunk, buffer, head,
              row);
  }
  ANYFLASH_DEVICE void load_v(int chunk, int buffer) const {
    TileLoader<KeyChunk, KeyOrder>(smem_.v[buffer].data(), thread())
        .load(columns_from(params_.attention.v, chunk), params_.attention.v_stride, keys(),
              params_.attention.head_dim_v - chunk * kColumns);
  }

  // Of what the thread itself has loaded. A row that sees a key still gives its NaN to the results,
  // because its LSE or delta is NaN, too.
  ANYFLASH_DEVICE bool clear_nonfinite_rows(int buffer) const {
    return TileLoader<RowChunk, RowOrder>(smem_.rows[buffer].data(), thread()).clear_nonfinite();
  }
  ANYFLASH_DEVICE void note_nonfinite_k() const {
    if (!k().is_finite()) atomicMax(&smem_.nonfinite_keys, 1);
  }
  ANYFLASH_DEVICE void clear_nonfinite_k() const { k().clear_nonfinite(); }

 private:
  ANYFLASH_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }
  ANYFLASH_DEVICE static const void* columns_from(const void* data, int chunk) {
    return static_cast<const typename Traits::Element*>(data) + chunk * kColumns;
  }
  // From shared memory: the loop needs the registers.
  ANYFLASH_DEVICE TileRows keys() const {
    return key_rows(block_.sequence, block_.head_k, block_.first_key);
  }
  ANYFLASH_DEVICE auto k() const {
    return TileLoader<typename Traits::TileK, KeyOrder>(smem_.k.data(), thread());
  }
  ANYFLASH_DEVICE void load_rows(const void* data, const Strides& stride, int columns, int chunk,
                                 int buffer, int head, int row) const {
    TileLoader<RowChunk, RowOrder>(smem_.rows[buffer].data(), thread())
        .load(columns_from(data, chunk), stride, query_rows(block_.sequence, head, row),
              columns - chunk * kColumns);
  }

  const BackwardScratch& params_;
  const BackwardWorkTile& block_;
  typename Traits::SharedStorage& smem_;
};

}  // namespace anyflash::sm80

namespace anyflash {

// Parts of dK, and after these have been added up, parts of dV.
template <class Base>
inline constexpr int kGqaPartialElements<sm80::ChunkedTraits<Base>> = kPartElementsK<Base>;

}  // namespace anyflash
