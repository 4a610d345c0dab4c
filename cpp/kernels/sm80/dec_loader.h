// Loads tiles of K and V from a cache, each key from wherever it lies.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/finite.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/dec_block.h"
#include "variant/cache.h"

namespace anyflash::sm80 {

// Whether rows of a tensor, columns of `bytes` each, can be copied in pieces of 16 bytes.
ANYFLASH_DEVICE bool has_vectors(const void* data, const Strides& stride, int columns, int bytes) {
  const int64_t places = reinterpret_cast<int64_t>(data) | stride.batch * bytes |
                         stride.row * bytes | stride.head * bytes | columns * bytes;
  return places % 16 == 0 && stride.col == 1;
}

// One row's 16 bytes element by element; columns that do not exist become 0.
template <class Unit>
ANYFLASH_DEVICE void load_elements(const void* row, int64_t stride, int first, int columns,
                                   void* piece) {
  const auto* const source = static_cast<const Unit*>(row);
  auto* const target = static_cast<Unit*>(piece);
#if defined(__CUDACC__)
#pragma unroll 1  // rare: not worth the code
#endif
  for (int i = 0; i < 16 / static_cast<int>(sizeof(Unit)); ++i) {
    target[i] = first + i < columns ? source[(first + i) * stride] : Unit{0};
  }
}

// A head's rows of K or of V.
template <class Unit>
struct CacheHead {
  const Unit* data;
  Strides stride;
  int columns;
  bool vectors;

  ANYFLASH_DEVICE CacheHead(const void* data_, const Strides& stride_, int head, int columns_)
      : data(static_cast<const Unit*>(data_) + head * stride_.head),
        stride(stride_),
        columns(columns_),
        vectors(has_vectors(data_, stride_, columns_, sizeof(Unit))) {}

  ANYFLASH_DEVICE const Unit* row(int64_t slab, int64_t row) const {
    return data + slab * stride.batch + row * stride.row;
  }
};

template <class Traits>
class CacheLoader {
  using Element = typename Traits::Element;
  using Unit = std::conditional_t<Traits::k8Bit, uint8_t, uint16_t>;
  using Load = typename Traits::TileKv::Load;
  static ANYFLASH_HOST_DEVICE auto coordinates(int thread) {  // (VECTOR, ROWS, PAGES)
    return Load{}.get_thread_slice(thread).partition_S(
        cute::make_identity_tensor(typename Traits::TileKv::Shape{}));
  }
  using Coordinates = decltype(coordinates(0));
  static constexpr int kRows = decltype(cute::size<1>(Coordinates{}))::value;
  static constexpr int kPages = decltype(cute::size<2>(Coordinates{}))::value;
  static constexpr int kUnits = sizeof(Element) / sizeof(Unit);

 public:
  ANYFLASH_DEVICE CacheLoader(const KvCacheParams& params, const DecodeBlock& block)
      : params_(params),
        sequence_(block.sequence),
        keys_(block.keys),
        head_(block.head_k),
        k_(params.k, params.k_stride, block.head_k, params.head_dim),
        v_(params.v, params.v_stride, block.head_k, params.head_dim_v),
        coordinates_(coordinates(static_cast<int>(threadIdx.x))) {}

  // Looks up where this thread's keys of a tile lie; tiles count from the split's first key. The table's answer takes as long as memory
  // does, so this runs a tile ahead of load().
  ANYFLASH_DEVICE void find(int tile) {
    if (params_.block_table == nullptr)
      find_rows(tile,
                [&](int key) { return CachePlace{sequence_.slab, sequence_.first_row + key}; });
    else find_rows(tile, [&](int key) { return place_of(params_, sequence_, key); });
  }

  // Starts to load the tile that find() was called for.
  ANYFLASH_DEVICE void load(typename Traits::Buffers& buffers, int stage) const {
    load_tile(k_, buffers.k[stage]);
    load_tile(v_, buffers.v[stage]);
    if constexpr (Traits::k8Bit) {
      load_scales(params_.k_scale, buffers.k_scale[stage]);
      load_scales(params_.v_scale, buffers.v_scale[stage]);
    }
  }

  // Writes 0 over NaN and infinity in what this thread has loaded of V; returns whether there were
  // any.
  ANYFLASH_DEVICE bool clear_values(typename Traits::Buffers& buffers, int stage) const {
    auto tXsX = pieces(buffers.v[stage]);
    if constexpr (!Traits::k8Bit) {
      return clear_nonfinite(tXsX);
    } else {
      if (params_.cache_dtype == DType::kInt8) return false;
      bool found = false;
      auto words = cute::recast<uint32_t>(tXsX);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(words); ++i) {
        const uint32_t nans = e4m3_nans(words(i));
        if (nans == 0) continue;
        words(i) = words(i) & ~((nans >> 7) * 0xffu);
        found = true;
      }
      return found;
    }
  }

 private:
  static ANYFLASH_DEVICE auto pieces(Element* tile) {  // (VECTOR, ROWS, PAGES)
    return Load{}
        .get_thread_slice(threadIdx.x)
        .partition_D(
            cute::make_tensor(cute::make_smem_ptr(tile), typename Traits::TileKv::Layout{}));
  }

  // No branches, so that all lookups are on their way at once.
  template <class PlaceOf>
  ANYFLASH_DEVICE void find_rows(int tile, const PlaceOf& place) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int key = keys_.begin + tile * Traits::kBlockN + cute::get<0>(coordinates_(0, i, 0));
      const bool counts = key < keys_.end;
      const CachePlace found = place(counts ? key : keys_.begin);
      slab_[i] = counts ? static_cast<int>(found.slab) : -1;
      row_[i] = found.row;
    }
  }

  ANYFLASH_DEVICE void load_tile(const CacheHead<Unit>& source, Element* tile) const {
    using namespace cute;
    auto tXsX = pieces(tile);
    if (source.vectors) {
      const Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element> atom;
      for_each_piece(source, [&](const Unit* row, int i, int page, int first, int columns) {
        auto gmem = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(row + first)),
                                Layout<Int<Traits::TileKv::kVector>>{});
        copy(atom.with(first < columns), gmem, tXsX(_, i, page));
      });
    } else {
      for_each_piece(source, [&](const Unit* row, int i, int page, int first, int columns) {
        load_elements<Unit>(row, source.stride.col, first, columns, &tXsX(0, i, page));
      });
    }
  }

  // Calls function(row, i, page, its first column, columns that exist) for this thread's pieces.
  template <class Function>
  ANYFLASH_DEVICE void for_each_piece(const CacheHead<Unit>& source,
                                      const Function& function) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const bool exists = slab_[i] >= 0;
      const Unit* const row = source.row(exists ? slab_[i] : 0, row_[i]);
      const int columns = exists ? source.columns : 0;
      CUTE_UNROLL
      for (int page = 0; page < kPages; ++page) {
        function(row, i, page, cute::get<1>(coordinates_(0, i, page)) * kUnits, columns);
      }
    }
  }

  // One number a key, by the threads that load the keys' first columns.
  ANYFLASH_DEVICE void load_scales(const Auxiliary& scale, float* target) const {
    if (cute::get<1>(coordinates_(0, 0, 0)) != 0) return;
    const auto* const data = static_cast<const float*>(scale.data);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float& at = target[cute::get<0>(coordinates_(0, i, 0))];
      if (data == nullptr) {
        at = 1.0f;
        continue;
      }
      const bool exists = slab_[i] >= 0;
      const int64_t slab = exists ? slab_[i] : 0;
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(
          data[slab * scale.stride.batch + head_ * scale.stride.head], at, exists);
    }
  }

  const KvCacheParams& params_;
  const CachedSequence sequence_;
  const SplitKeys keys_;
  const int head_;
  CacheHead<Unit> k_;
  CacheHead<Unit> v_;
  Coordinates coordinates_;
  int slab_[kRows];  // -1: not a key, or a place that does not exist
  int row_[kRows];
};

}  // namespace anyflash::sm80
