// Loads tiles of K and V from a cache, each key from wherever it lies.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/finite.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/decode/work_tile.h"
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

  ANYFLASH_DEVICE const Unit* row(int64_t slot, int64_t row) const {
    return data + slot * stride.batch + row * stride.row;
  }
};

template <class Traits>
class CacheLoader {
  using Element = typename Traits::Element;
  using Unit = std::conditional_t<Traits::k8Bit, uint8_t, uint16_t>;
  using Load = typename Traits::TileKv::Load;
  static ANYFLASH_HOST_DEVICE auto coordinates(int thread) {  // (VECTOR, ROWS, PANELS)
    return Load{}.get_thread_slice(thread).partition_S(
        cute::make_identity_tensor(typename Traits::TileKv::Shape{}));
  }
  using Coordinates = decltype(coordinates(0));
  static constexpr int kRows = decltype(cute::size<1>(Coordinates{}))::value;
  static constexpr int kPanels = decltype(cute::size<2>(Coordinates{}))::value;
  static constexpr int kUnits = sizeof(Element) / sizeof(Unit);

 public:
  ANYFLASH_DEVICE CacheLoader(const KvCacheParams& params, const DecodeWorkTile& block)
      : params_(params),
        sequence_(block.sequence),
        keys_(block.keys),
        row_mask_(params.block_table == nullptr ? -1 : (1 << params.page_shift) - 1),
        k_(params.attention.k, params.attention.k_stride, block.head_k, params.attention.head_dim),
        v_(params.attention.v, params.attention.v_stride, block.head_k,
           params.attention.head_dim_v),
        coordinates_(coordinates(static_cast<int>(threadIdx.x))) {
    if constexpr (Traits::k8Bit) {
      k_scale_ = static_cast<const float*>(params.k_scale.data);
      v_scale_ = static_cast<const float*>(params.v_scale.data);
      if (k_scale_ != nullptr) k_scale_ += block.head_k * params.k_scale.stride.head;
      if (v_scale_ != nullptr) v_scale_ += block.head_k * params.v_scale.stride.head;
    }
  }

  // Asks where this thread's keys of a tile lie; tiles count from the split's first key. The
  // table's answer takes as long as memory does, so this runs a tile ahead of load(), and does not
  // look at it.
  ANYFLASH_DEVICE void prefetch_table(int tile) {
    first_key_ = keys_.begin + tile * Traits::kBlockN;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int key = first_key_ + cute::get<0>(coordinates_(0, i, 0));
      entry_[i] = -1;
      if (key < keys_.end) entry_[i] = table_entry(params_, sequence_, key);
    }
  }

  // Starts to load the tile that prefetch_table() was called for.
  ANYFLASH_DEVICE void load(typename Traits::Buffers& buffers, int stage) const {
    load_tile(k_, buffers.k[stage]);
    if constexpr (!Traits::kLatent) load_tile(v_, buffers.v(stage));
    if constexpr (Traits::k8Bit) {
      if (is_per_key(params_.k_scale)) {
        load_scales(k_scale_, params_.k_scale.stride, buffers.k_scale[stage]);
      }
      if (is_per_key(params_.v_scale)) {
        load_scales(v_scale_, params_.v_scale.stride, buffers.v_scale[stage]);
      }
    }
  }

  // Scales that are the same for all keys: load() leaves them as they are.
  ANYFLASH_DEVICE void fill_scales(typename Traits::Buffers& buffers) const {
    if constexpr (Traits::k8Bit) {
      const float k_scale = k_scale_ == nullptr ? 1.0f : *k_scale_;
      const float v_scale = v_scale_ == nullptr ? 1.0f : *v_scale_;
      for (int stage = 0; stage < Traits::kStages; ++stage) {
        for (int key = threadIdx.x; key < Traits::kBlockN; key += Traits::kThreads) {
          if (!is_per_key(params_.k_scale)) buffers.k_scale[stage][key] = k_scale;
          if (!is_per_key(params_.v_scale)) buffers.v_scale[stage][key] = v_scale;
        }
      }
    }
  }

  // Writes 0 over NaN and infinity in what this thread has loaded of V; returns whether there were
  // any.
  ANYFLASH_DEVICE bool clear_values(typename Traits::Buffers& buffers, int stage) const {
    auto tXsX = pieces(buffers.v(stage));
    if constexpr (!Traits::k8Bit) {
      return clear_nonfinite(tXsX);
    } else {
      if (params_.cache_dtype == DType::kInt8) return false;
      const Float8Format<Element> format(params_.cache_dtype);
      bool found = false;
      auto words = cute::recast<uint32_t>(tXsX);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(words); ++i) {
        const uint32_t nonfinite = format.nonfinite(words(i));
        if (nonfinite == 0) continue;
        words(i) = words(i) & ~((nonfinite >> 7) * 0xffu);
        found = true;
      }
      return found;
    }
  }

 private:
  static ANYFLASH_DEVICE auto pieces(Element* tile) {  // (VECTOR, ROWS, PANELS)
    return Load{}
        .get_thread_slice(threadIdx.x)
        .partition_D(
            cute::make_tensor(cute::make_smem_ptr(tile), typename Traits::TileKv::Layout{}));
  }

  ANYFLASH_DEVICE void load_tile(const CacheHead<Unit>& source, Element* tile) const {
    using namespace cute;
    auto tXsX = pieces(tile);
    if (source.vectors) {
      const Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element> atom;
      for_each_piece(source, [&](const Unit* row, int i, int panel, int first, int columns) {
        auto gmem = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(row + first)),
                                Layout<Int<Traits::TileKv::kVector>>{});
        copy(atom.with(first < columns), gmem, tXsX(_, i, panel));
      });
    } else {
      for_each_piece(source, [&](const Unit* row, int i, int panel, int first, int columns) {
        load_elements<Unit>(row, source.stride.col, first, columns, &tXsX(0, i, panel));
      });
    }
  }

  // Calls function(row, i, panel, its first column, columns that exist) for this thread's pieces.
  template <class Function>
  ANYFLASH_DEVICE void for_each_piece(const CacheHead<Unit>& source,
                                      const Function& function) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const bool exists = is_slot(params_, entry_[i]);
      const int key = first_key_ + cute::get<0>(coordinates_(0, i, 0));
      const Unit* const row = source.row(exists ? entry_[i] : 0, row_in_slot(key));
      const int columns = exists ? source.columns : 0;
      CUTE_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        function(row, i, panel, cute::get<1>(coordinates_(0, i, panel)) * kUnits, columns);
      }
    }
  }

  ANYFLASH_DEVICE int row_in_slot(int key) const { return (sequence_.first_row + key) & row_mask_; }

  // Whether keys of a tile may have different scales.
  static ANYFLASH_DEVICE bool is_per_key(const BroadcastTensor& scale) {
    return scale.data != nullptr && (scale.stride.batch != 0 || scale.stride.row != 0);
  }

  // One number a key: of the threads that share a row, each takes one of their rows.
  ANYFLASH_DEVICE void load_scales(const float* scale, const Strides& stride, float* target) const {
    constexpr int kLanes = Traits::TileKv::kThreadsPerRow;
    const int lane = cute::get<1>(coordinates_(0, 0, 0)) / Traits::TileKv::kVector;
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kLanes) {
      int entry = -1;
      int at = -1;
      CUTE_UNROLL
      for (int i = first; i < kRows && i < first + kLanes; ++i) {
        if (i - first != lane) continue;
        entry = entry_[i];
        at = cute::get<0>(coordinates_(0, i, 0));
      }
      if (at < 0) continue;  // fewer rows than threads
      const bool exists = is_slot(params_, entry);
      const int64_t offset = entry * stride.batch + row_in_slot(first_key_ + at) * stride.row;
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(scale[exists ? offset : 0], target[at],
                                                         exists);
    }
  }

  const KvCacheParams& params_;
  const CachedSequence sequence_;
  const SplitKeys keys_;
  const int row_mask_;  // of a row in its page
  CacheHead<Unit> k_;
  CacheHead<Unit> v_;
  const float* k_scale_ = nullptr;  // of this head
  const float* v_scale_ = nullptr;
  Coordinates coordinates_;
  int first_key_ = 0;  // of the tile that has been asked for
  int entry_[kRows];   // what the table says of this thread's keys; -1: not a key
};

}  // namespace anyflash::sm80
