// Loads tiles of K and V from a cache, each key from wherever it lies.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "common/dequantize.h"
#include "common/finite.h"
#include "common/load.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/decode/scores.h"
#include "sm80/decode/work_tile.h"
#include "variant/cache.h"

namespace anyflash::sm80 {

template <class Traits>
class CacheLoader {
  using Operand = typename Traits::Operand;
  using Unit = std::conditional_t<Traits::k8Bit, uint8_t, uint16_t>;
  using Load = typename Traits::TileKv::Load;
  using Scales = CacheScales<Traits>;
  static ANYFLASH_HOST_DEVICE auto coordinates(int thread) {  // (VECTOR, ROWS, PANELS)
    return Load{}.get_thread_slice(thread).partition_S(
        cute::make_identity_tensor(typename Traits::TileKv::Shape{}));
  }
  using Coordinates = decltype(coordinates(0));
  static constexpr int kRows = decltype(cute::size<1>(Coordinates{}))::value;
  static constexpr int kPanels = decltype(cute::size<2>(Coordinates{}))::value;
  static constexpr int kRowStep = Traits::TileKv::kThreads / Traits::TileKv::kThreadsPerRow;
  static constexpr int kUnits = sizeof(Operand) / sizeof(Unit);

 public:
  ANYFLASH_DEVICE CacheLoader(const DecodeLaunch& params, const CachedWorkTile& block)
      : params_(params),
        block_(block),
        sequence_(block.sequence),
        paged_(params.block_table != nullptr),
        end_(paged_ || block.sequence.slot >= 0 ? block.keys.end : 0),
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
    first_key_ = block_.keys.begin + tile * Traits::kBlockN;
    if (!paged_) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      entry_[i] = key(i) < end_ ? table_entry(params_, sequence_, key(i)) : -1;
    }
  }

  // Starts to load the tile that prefetch_table() was called for.
  ANYFLASH_DEVICE void load(typename Traits::Buffers& buffers, int stage) const {
    const Attention& a = params_.attention;
    load_tile(block_.k, a.k_stride, a.head_dim, buffers.k[stage]);
    if constexpr (!Traits::kLatent) {
      load_tile(block_.v, a.v_stride, a.head_dim_v, buffers.v(stage));
    }
    if constexpr (Traits::k8Bit) {
      if (Scales::is_per_key(params_.k_scale)) {
        load_scales(k_scale_, params_.k_scale.stride, buffers.k_scale[stage]);
      }
      if (Scales::is_per_key(params_.v_scale)) {
        load_scales(v_scale_, params_.v_scale.stride, buffers.v_scale[stage]);
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
      bool found = false;
      auto words = cute::recast<uint32_t>(tXsX);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(words); ++i) {
        found |= clear_nonfinite_bytes(words(i), params_.cache_dtype);
      }
      return found;
    }
  }

 private:
  static ANYFLASH_DEVICE auto pieces(Operand* tile) {  // (VECTOR, ROWS, PANELS)
    return Load{}
        .get_thread_slice(threadIdx.x)
        .partition_D(
            cute::make_tensor(cute::make_smem_ptr(tile), typename Traits::TileKv::Layout{}));
  }

  // This thread's i-th key of the tile.
  ANYFLASH_DEVICE int key(int i) const {
    return first_key_ + cute::get<0>(coordinates_(0, 0, 0)) + i * kRowStep;
  }
  // Of this key in the sequence's place.
  ANYFLASH_DEVICE int row_of(int i) const { return sequence_.first_row + key(i); }
  // Whether the table says where it lies.
  ANYFLASH_DEVICE bool is_page(int i) const {
    return static_cast<unsigned>(entry_[i]) < params_.page_count;
  }
  ANYFLASH_DEVICE int64_t offset_in_pages(const Strides& stride, int i) const {
    const auto row = static_cast<unsigned>(row_of(i)) & params_.page_mask;
    const unsigned page = is_page(i) ? static_cast<unsigned>(entry_[i]) : 0;
    return page * stride.batch + row * stride.row;
  }

  ANYFLASH_DEVICE int first_column() const { return cute::get<1>(coordinates_(0, 0, 0)) * kUnits; }

  // `head`: DecodeWorkTile's. Rows that do not exist have no columns: they become 0, and nothing
  // is read.
  ANYFLASH_DEVICE void load_tile(const void* head, const Strides& stride, int columns,
                                 Operand* tile) const {
    const int first = first_column();
    const Unit* const data = static_cast<const Unit*>(head) + first * stride.col;
    columns -= first;
    auto tXsX = pieces(tile);
    if (!params_.cache_has_vectors) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const bool exists = paged_ ? is_page(i) : key(i) < end_;
        const int64_t offset = paged_ ? offset_in_pages(stride, i) : row_of(i) * stride.row;
        load_row<false>(data + offset, exists ? columns : 0, stride.col, tXsX, i);
      }
    } else if (paged_) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Unit* const row = data + offset_in_pages(stride, i);
        load_row<true>(row, is_page(i) ? columns : 0, 1, tXsX, i);
      }
    } else {  // a row's address takes one sum, and the loop few registers
      const Unit* row = data + row_of(0) * stride.row;
      const int64_t step = kRowStep * stride.row;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
      for (int i = 0; i < kRows; ++i, row += step) {
        load_row<true>(row, key(i) < end_ ? columns : 0, 1, tXsX, i);
      }
    }
  }

  // This thread's pieces of its i-th row, from its first one on.
  template <bool kVectors, class Pieces>
  static ANYFLASH_DEVICE void load_row(const Unit* row, int columns, int64_t col_stride,
                                       Pieces& tXsX, int i) {
    using namespace cute;
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const int first = panel * Traits::TileKv::kPanelColumns * kUnits;
      if constexpr (kVectors) {
        auto gmem = make_tensor(make_gmem_ptr(reinterpret_cast<const Operand*>(row + first)),
                                Layout<Int<Traits::TileKv::kVector>>{});
        const Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Operand> atom;
        copy(atom.with(first < columns), gmem, tXsX(_, i, panel));
      } else {
        load_elements<Unit>(row, col_stride, first, columns, &tXsX(0, i, panel));
      }
    }
  }

  // One number a key: of the threads that share a row, each takes one of their rows.
  ANYFLASH_DEVICE void load_scales(const float* scale, const Strides& stride, float* target) const {
    constexpr int kLanes = Traits::TileKv::kThreadsPerRow;
    const int lane = cute::get<1>(coordinates_(0, 0, 0)) / Traits::TileKv::kVector;
    CUTE_UNROLL
    for (int first = 0; first < kRows; first += kLanes) {
      bool exists = false;
      int64_t offset = 0;
      int row = -1;  // of the tile
      CUTE_UNROLL
      for (int i = first; i < kRows && i < first + kLanes; ++i) {
        if (i - first != lane) continue;
        row = cute::get<0>(coordinates_(0, i, 0));
        exists = paged_ ? is_page(i) : key(i) < end_;
        offset = paged_
                     ? offset_in_pages(stride, i)
                     : sequence_.slot * stride.batch + (sequence_.first_row + key(i)) * stride.row;
      }
      if (row < 0) continue;  // fewer rows than threads
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(scale[exists ? offset : 0], target[row],
                                                         exists);
    }
  }

  const DecodeLaunch& params_;
  const CachedWorkTile& block_;
  const CachedSequence& sequence_;
  const bool paged_;
  const int end_;                   // of the keys that lie anywhere
  const float* k_scale_ = nullptr;  // of this head
  const float* v_scale_ = nullptr;
  Coordinates coordinates_;
  int first_key_ = 0;  // of the tile that has been asked for
  int entry_[kRows];   // what the table says of this thread's keys; -1: not a key
};

}  // namespace anyflash::sm80
