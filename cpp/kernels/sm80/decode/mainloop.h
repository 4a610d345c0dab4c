// The main loop of a decoding CTA: the tiles of keys of one split.
//
// K and V arrive through a ring of buffers by cp.async, kStages - 1 tiles ahead. Each group of
// warps that shares rows takes its own keys of a tile and has its own softmax; the epilogue joins
// them.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/dequantize.h"
#include "common/half_queries.h"
#include "common/layout.h"
#include "common/load.h"
#include "common/macros.h"
#include "common/math.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/decode/loader.h"
#include "sm80/decode/scores.h"
#include "sm80/decode/work_tile.h"
#include "sm80/ldmatrix_operand.h"

namespace anyflash::sm80 {

// Pieces of 16 bytes of Q's tile that this thread loads, and their coordinates: (VECTOR, ROWS,
// PANELS).
template <class Traits>
ANYFLASH_DEVICE auto query_pieces(typename Traits::SharedStorage& smem) {
  return typename Traits::TileQ::Load{}
      .get_thread_slice(threadIdx.x)
      .partition_D(
          cute::make_tensor(cute::make_smem_ptr(smem.buffers.q), typename Traits::TileQ::Layout{}));
}
template <class Traits>
ANYFLASH_DEVICE auto query_coordinates() {
  return typename Traits::TileQ::Load{}
      .get_thread_slice(threadIdx.x)
      .partition_S(cute::make_identity_tensor(typename Traits::TileQ::Shape{}));
}

// Q's rows of this tile to shared memory; rows and columns that do not exist become 0.
template <class Traits>
ANYFLASH_DEVICE void load_queries(const DecodeLaunch& params, const DecodeWorkTile& block,
                                  typename Traits::SharedStorage& smem) {
  const Attention& a = params.attention;
  using namespace cute;
  using Element = typename Traits::Operand;  // its bits
  using TileQ = typename Traits::TileQ;
  auto tQsQ = query_pieces<Traits>(smem);
  const auto tQcQ = query_coordinates<Traits>();
  CUTE_UNROLL
  for (int i = 0; i < size<1>(tQsQ); ++i) {
    const int row = get<0>(tQcQ(0, i, 0));
    const bool exists = row < block.rows;
    const int existing = exists ? row : 0;
    const auto* const source =
        static_cast<const uint16_t*>(a.q) + block.offset(a.q_stride, existing);
    CUTE_UNROLL
    for (int panel = 0; panel < size<2>(tQsQ); ++panel) {
      const int first = get<1>(tQcQ(0, i, panel));
      const int columns = exists ? a.head_dim : 0;
      if (params.q_has_vectors) {
        auto gmem = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(source + first)),
                                Layout<Int<TileQ::kVector>>{});
        copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{}.with(first < columns),
             gmem, tQsQ(_, i, panel));
      } else {
        load_elements<uint16_t>(source, a.q_stride.col, first, columns, &tQsQ(0, i, panel));
      }
    }
  }
}

// Where Q is bfloat16 and the cache has 8 bits: Q becomes float16. q_factor gets what its rows'
// scores have to be multiplied by. A thread converts what it has loaded itself.
template <class Traits>
ANYFLASH_DEVICE void convert_queries(typename Traits::SharedStorage& smem) {
  using namespace cute;
  using TileQ = typename Traits::TileQ;
  auto tQsQ = query_pieces<Traits>(smem);
  const auto tQcQ = query_coordinates<Traits>();
  CUTE_UNROLL
  for (int i = 0; i < size<1>(tQsQ); ++i) {
    auto row = tQsQ(_, i, _);
    auto bits = recast<uint16_t>(row);
    int largest = 0;
    CUTE_UNROLL
    for (int x = 0; x < size(bits); ++x) largest = max(largest, finite_exponent(bits(x)));
    CUTE_UNROLL
    for (int distance = 1; distance < TileQ::kThreadsPerRow; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    const HalfScale scale(largest);
    CUTE_UNROLL
    for (int x = 0; x < size(bits); ++x) row(x) = cutlass::half_t(scaled(bits(x), scale.power));
    if (get<1>(tQcQ(0, i, 0)) == 0) {
      smem.buffers.q_factor[get<0>(tQcQ(0, i, 0))] = scale.inverse;
    }
  }
}

// Words of an 8-bit fragment as two words each of a 16-bit one: target(half, n, 0) and (.., 1).
// kFirst and kSecond say of which two bytes they are, the first one in the lower digit.
template <DType kStored, int kFirst, int kSecond, class Words, class Target>
ANYFLASH_DEVICE void dequantize(const Words& stored, const Target& target) {
  constexpr int kA0 = kFirst % 16, kA1 = kFirst / 16;
  constexpr int kB0 = kSecond % 16, kB1 = kSecond / 16;
  CUTE_UNROLL
  for (int n = 0; n < cute::size<1>(stored); ++n) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      target(half, n, 0) = dequantize_pair<kStored, kA0, kA1>(stored(half, n));
      target(half, n, 1) = dequantize_pair<kStored, kB0, kB1>(stored(half, n));
    }
  }
  if (kStored != DType::kFloat8E4M3 || converts_e4m3()) return;
  uint32_t found = 0;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(stored); ++i) found |= nonfinite_bytes(stored(i), kStored);
  if (found == 0) return;
  CUTE_UNROLL
  for (int n = 0; n < cute::size<1>(stored); ++n) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t nonfinite = nonfinite_bytes(stored(half, n), kStored);
      target(half, n, 0) = mark_nan<kA0, kA1>(target(half, n, 0), nonfinite);
      target(half, n, 1) = mark_nan<kB0, kB1>(target(half, n, 1), nonfinite);
    }
  }
}

// What one warp does with its keys of a tile.
template <class Traits>
class DecodeWarp {
  using Operand = typename Traits::Operand;
  using Mma = typename Traits::TiledMma;
  using TileKv = typename Traits::TileKv;
  using Queries = LdmatrixOperand<Mma, Side::kA, typename Traits::TileQ>;

 public:
  ANYFLASH_DEVICE DecodeWarp(const KvCacheParams& params, typename Traits::SharedStorage& smem)
      : smem_(smem),
        is_int8_(params.cache_dtype == DType::kInt8),
        is_e5m2_(params.cache_is_e5m2),
        thread_(Traits::mma_thread()),
        group_(Traits::group()) {}

  ANYFLASH_DEVICE int first_key() const { return group_ * Traits::kWarpKeys; }

  // Those of its keys in an 8-bit cache, where keys have scales of their own.
  ANYFLASH_DEVICE const float* k_scales(int stage) const {
    return smem_.buffers.k_scale[stage] + first_key();
  }
  ANYFLASH_DEVICE const float* v_scales(int stage) const {
    return smem_.buffers.v_scale[stage] + first_key();
  }

  // Scores of this warp's rows and keys: acc += Q K^T.
  template <class Acc, class FragQ>
  ANYFLASH_DEVICE void scores(Acc& acc, FragQ& tSrQ, int stage) const {
    with_cache_dtype([&](auto stored) { scores_of<stored>(acc, tSrQ, stage); });
  }

  // acc += P V
  template <class Acc, class FragP>
  ANYFLASH_DEVICE void output(Acc& acc, const FragP& tOrP, int stage) const {
    with_cache_dtype([&](auto stored) { output_of<stored>(acc, tOrP, stage); });
  }

  // The fragment of Q, loaded if it is held.
  ANYFLASH_DEVICE auto queries() const {
    auto tSrQ = Queries::fragment();  // (MMA, MMA_M, MMA_K)
    if constexpr (Traits::kHoldsQ) {
      CUTE_UNROLL
      for (int k = 0; k < Queries::kBlocks; ++k) copy_q_block(tSrQ, k);
    }
    return tSrQ;
  }

 private:
  // A loop for each type, whose constants then take no registers. A cache of Elements has one loop,
  // whatever it is told.
  template <class Function>
  ANYFLASH_DEVICE void with_cache_dtype(const Function& function) const {
    if constexpr (!Traits::k8Bit) {
      function(cute::constant<DType, DType::kFloat16>{});
    } else {
      if (is_int8_) function(cute::constant<DType, DType::kInt8>{});
      else if (is_e5m2_) function(cute::constant<DType, DType::kFloat8E5M2>{});
      else function(cute::constant<DType, DType::kFloat8E4M3>{});
    }
  }

  template <DType kStored, class Acc, class FragQ>
  ANYFLASH_DEVICE void scores_of(Acc& acc, FragQ& tSrQ, int stage) const {
    using namespace cute;
    const Mma mma;
    const LdmatrixOperand<Mma, Side::kB, TileKv, /*kTransposed=*/false, Traits::kWarpKeys> keys(
        smem_.buffers.k[stage] + group_ * Traits::kWarpOffset, thread_);
    auto tSrK = keys.fragment();  // (MMA, MMA_N, MMA_K)
    CUTE_UNROLL
    for (int k = 0; k < keys.kBlocks; ++k) {
      keys.load(tSrK, k);
      if constexpr (!Traits::k8Bit) {
        load_q_block(tSrQ, k);
        gemm(mma, tSrQ(_, _, k), tSrK(_, _, k), acc);
      } else {  // two blocks of columns at once
        auto wide = make_tensor<Operand>(make_shape(Shape<_2, _2>{}, size<1>(tSrK), _2{}));
        auto words = recast<uint32_t>(wide);  // ((1, 2), MMA_N, 2)
        dequantize<kStored, 0x10, 0x32>(
            recast<uint32_t>(tSrK(_, _, k)),
            [&](int half, int n, int second) -> uint32_t& { return words(second, n, half); });
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          load_q_block(tSrQ, 2 * k + half);
          gemm(mma, tSrQ(_, _, 2 * k + half), wide(_, _, half), acc);
        }
      }
    }
  }

  template <DType kStored, class Acc, class FragP>
  ANYFLASH_DEVICE void output_of(Acc& acc, const FragP& tOrP, int stage) const {
    using namespace cute;
    const Mma mma;
    constexpr int kColumns = Traits::kStoredWarpColumns;
    const Operand* const tile = smem_.buffers.v(stage) + group_ * Traits::kWarpOffset +
                                TileKv::panel_offset(0, Traits::column_warp() * kColumns);
    const LdmatrixOperand<Mma, Side::kB, TileKv, /*kTransposed=*/true, Traits::kWarpKeys, kColumns>
        values(tile, thread_);
    auto tOrV = values.fragment();  // (MMA, MMA_N, MMA_K)
    CUTE_UNROLL
    for (int k = 0; k < values.kBlocks; ++k) {
      values.load(tOrV, k);
      if constexpr (!Traits::k8Bit) {
        gemm(mma, tOrP(_, _, k), tOrV(_, _, k), acc);
      } else {  // even columns, odd columns
        auto wide = make_tensor<Operand>(make_shape(Shape<_2, _2>{}, Int<2 * size<1>(tOrV)>{}));
        auto words = recast<uint32_t>(wide);  // ((1, 2), 2 MMA_N)
        dequantize<kStored, 0x20, 0x31>(
            recast<uint32_t>(tOrV(_, _, k)),
            [&](int half, int n, int second) -> uint32_t& { return words(half, 2 * n + second); });
        gemm(mma, tOrP(_, _, k), wide, acc);
      }
    }
  }

  template <class FragQ>
  ANYFLASH_DEVICE void load_q_block(FragQ& tSrQ, int k) const {
    if constexpr (!Traits::kHoldsQ) copy_q_block(tSrQ, k);
  }
  template <class FragQ>
  ANYFLASH_DEVICE void copy_q_block(FragQ& tSrQ, int k) const {
    using namespace cute;
    if constexpr (!Traits::k8Bit) {
      Queries(smem_.buffers.q, thread_).load(tSrQ, k);
    } else {
      auto sQ = make_tensor(make_smem_ptr(smem_.buffers.q), typename Traits::TileQ::Layout{});
      auto ordered = make_tensor(
          sQ.data(), composition(sQ.layout(), make_tile(_, typename Traits::QColumns{})));
      auto copy_q = make_tiled_copy_A(typename Traits::LoadPair{}, Mma{});
      auto thread_copy = copy_q.get_thread_slice(thread_);
      auto tSsQ = thread_copy.partition_S(ordered);  // (COPY, MMA_M, MMA_K)
      auto tSrQ_copy = thread_copy.retile_D(tSrQ);   // (COPY, MMA_M, MMA_K)
      copy(copy_q, tSsQ(_, _, k), tSrQ_copy(_, _, k));
    }
  }

  typename Traits::SharedStorage& smem_;
  bool is_int8_;
  bool is_e5m2_;
  int thread_;  // of those that share keys and columns
  int group_;
};

// Starts to load Q, and the tiles that there are buffers for: a group of cp.async a tile, empty or
// not. Q comes with the first. In a loop, and for all buffers: a short split then never runs the
// main loop's copy of this code, and code that runs once takes as long as it takes to fetch.
template <class Traits>
ANYFLASH_DEVICE void start_loads(const DecodeLaunch& params, const DecodeWorkTile& block,
                                 typename Traits::SharedStorage& smem, CacheLoader<Traits>& loader,
                                 int tiles) {
  loader.prefetch_table(0);
  load_queries<Traits>(params, block, smem);
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    if (stage < tiles) {
      loader.load(smem.buffers, stage);
      loader.prefetch_table(stage + 1);
    }
    cute::cp_async_fence();
  }
}

// Returns whether this thread took NaN or infinity out of a partly hidden tile of V. `factors`
// become what the rows of acc_o have to be multiplied by.
template <class Traits, class AccO, class Softmax>
ANYFLASH_DEVICE bool decode_mainloop(const DecodeLaunch& params, const DecodeWorkTile& block,
                                     typename Traits::SharedStorage& smem, AccO& acc_o,
                                     Softmax& softmax, float (&factors)[DecodeRows::kRows]) {
  using namespace cute;
  using Operand = typename Traits::Operand;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kStages = Traits::kStages;
  const int tiles = ceil_div(block.keys.end - block.keys.begin, kBlockN);
  CacheLoader<Traits> loader(params, smem.block);
  start_loads<Traits>(params, block, smem, loader, tiles);

  DecodeWarp<Traits> warp(params, smem);
  typename Traits::TiledMma mma;
  auto cS = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kWarpKeys>>{});
  auto tScS = mma.get_thread_slice(Traits::mma_thread()).partition_C(cS);
  const auto coordinates = as_matrix(tScS);
  auto out_matrix = as_matrix(acc_o);
  const CacheScales<Traits> scales(params, block.head_k);
  DecodeScores<Traits, decltype(as_matrix(tScS))> modifier(params, block, coordinates);
  RowUnits units(scales.unit());

  cp_async_wait<kStages - 1>();
  if constexpr (Traits::kConvertsQ) convert_queries<Traits>(smem);
  __syncthreads();  // Q is there
  auto tSrQ = warp.queries();
  if constexpr (Traits::k8Bit) modifier.set_factors(smem.buffers.q_factor, scales.k);

  bool found_nonfinite = false;
  int stage = 0;
  for (int n = 0; n < tiles; ++n) {
    const int first_key = block.keys.begin + n * kBlockN;
    const bool partial = block.hides(first_key, first_key + kBlockN);
    if (n > 0) cp_async_wait<kStages - 2>();
    if (partial && !Traits::kLatent) found_nonfinite |= loader.clear_values(smem.buffers, stage);
    __syncthreads();  // tile n is there; every warp has done with the tile before
    if (n > 0) {
      if (n + kStages - 1 < tiles) {
        loader.load(smem.buffers, stage == 0 ? kStages - 1 : stage - 1);
        loader.prefetch_table(n + kStages);
      }
      cp_async_fence();
    }

    auto acc_s = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kWarpKeys>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    warp.scores(acc_s, tSrQ, stage);
    if (partial && Traits::kLatent) {
      __syncthreads();  // every warp has done with the tile as keys
      found_nonfinite |= loader.clear_values(smem.buffers, stage);
      __syncthreads();  // its values are without NaN and infinity
    }
    auto scores = as_matrix(acc_s);
    if constexpr (Traits::k8Bit) {
      modifier.scale(scores, scales.k_by_key ? warp.k_scales(stage) : nullptr);
    }
    modifier.modify(scores, first_key + warp.first_key(), partial);
    softmax.template update<true>(scores, out_matrix);
    if constexpr (Traits::k8Bit) {
      if (scales.v_by_key) {
        scale_values(scores, coordinates, out_matrix, warp.v_scales(stage), units);
      } else if (scales.v_is_late) {
        scales.scale_visible(scores);
      }
    }
    auto probabilities = round_fragment<Operand>(acc_s);
    auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
    warp.output(acc_o, tOrP, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  CUTE_UNROLL
  for (int row = 0; row < DecodeRows::kRows; ++row) {
    factors[row] = scales.v_by_key ? units.of_row(row) : units.of_both();
  }
  return found_nonfinite;
}

}  // namespace anyflash::sm80
