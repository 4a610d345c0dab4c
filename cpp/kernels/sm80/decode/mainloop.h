// The main loop of a decoding CTA: the tiles of keys of one split.
//
// K and V arrive through a ring of buffers by cp.async, kStages - 1 tiles ahead. Each group of
// warps that shares rows takes its own keys of a tile and has its own softmax; the epilogue joins
// them.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/dequantize.h"
#include "common/layout.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "params.h"
#include "sm80/copy.h"
#include "sm80/decode/loader.h"
#include "sm80/decode/work_tile.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/broadcast_tensor.h"
#include "variant/mask.h"
#include "variant/score_mod.h"
#include "variant/tree_mask.h"

namespace anyflash::sm80 {

// Q's rows of this tile to shared memory; rows and columns that do not exist become 0.
template <class Traits>
ANYFLASH_DEVICE void load_queries(const KvCacheParams& params, const DecodeWorkTile& block,
                                  typename Traits::SharedStorage& smem) {
  using namespace cute;
  using Element = typename Traits::Element;
  using TileQ = typename Traits::TileQ;
  auto thread_copy = typename TileQ::Load{}.get_thread_slice(threadIdx.x);
  auto tQsQ = thread_copy.partition_D(  // (VECTOR, ROWS, PANELS)
      make_tensor(make_smem_ptr(smem.q), typename TileQ::Layout{}));
  auto tQcQ = thread_copy.partition_S(make_identity_tensor(typename TileQ::Shape{}));
  const bool vectors = has_vectors(params.q, params.q_stride, params.head_dim, sizeof(Element));
  CUTE_UNROLL
  for (int i = 0; i < size<1>(tQsQ); ++i) {
    const int row = get<0>(tQcQ(0, i, 0));
    const bool exists = row < block.rows;
    const int existing = exists ? row : 0;
    const auto* const source =
        static_cast<const uint16_t*>(params.q) + block.batch * params.q_stride.batch +
        block.query(existing) * params.q_stride.row + block.head(existing) * params.q_stride.head;
    CUTE_UNROLL
    for (int page = 0; page < size<2>(tQsQ); ++page) {
      const int first = get<1>(tQcQ(0, i, page));
      const int columns = exists ? params.head_dim : 0;
      if (vectors) {
        auto gmem = make_tensor(make_gmem_ptr(reinterpret_cast<const Element*>(source + first)),
                                Layout<Int<TileQ::kVector>>{});
        copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{}.with(first < columns),
             gmem, tQsQ(_, i, page));
      } else {
        load_elements<uint16_t>(source, params.q_stride.col, first, columns, &tQsQ(0, i, page));
      }
    }
  }
}

// What a thread knows of its two rows.
struct DecodeRows {
  static constexpr int kRows = 2;
  SplitKeys seen[kRows];
  int query[kRows];
  float slope[kRows];  // ALiBi's; 0: none

  template <class Coordinates>
  ANYFLASH_DEVICE DecodeRows(const KvCacheParams& params, const DecodeWorkTile& block,
                             const Coordinates& coordinates) {
    const Mask mask = block.mask(params);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = cute::get<0>(coordinates(i, 0));
      seen[i] = block.seen(mask, row);
      query[i] = block.query(row);
      slope[i] = 0.0f;
      if (params.alibi_slopes.data != nullptr && row < block.rows) {
        const Strides& stride = params.alibi_slopes.stride;
        slope[i] = load_float(params.alibi_slopes,
                              block.batch * stride.batch + block.head(row) * stride.head);
      }
    }
  }
};

// scores -= slope * |query + seqlen_k - seqlen_q - key|
template <class Scores, class Coordinates>
ANYFLASH_DEVICE void add_slopes(Scores& scores, const Coordinates& coordinates,
                                const DecodeRows& rows, int shift, int col0) {
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      const int key = col0 + cute::get<1>(coordinates(row, col));
      scores(row, col) -= rows.slope[row] * static_cast<float>(abs(rows.query[row] + shift - key));
    }
  }
}

template <class Scores, class Coordinates>
ANYFLASH_DEVICE void hide_keys(Scores& scores, const Coordinates& coordinates,
                               const DecodeRows& rows, const TreeMask& tree, int col0) {
  CUTE_UNROLL
  for (int row = 0; row < cute::size<0>(scores); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < cute::size<1>(scores); ++col) {
      const int key = col0 + cute::get<1>(coordinates(row, col));
      if (key < rows.seen[row].begin || key >= rows.seen[row].end ||
          !tree.keep(rows.query[row], key)) {
        scores(row, col) = -INFINITY;
      }
    }
  }
}

// P becomes P * v_scale / unit, where unit is the largest scale so far of keys that weigh anything
// in this thread's rows, so that small scales do not take P to where float16 is coarse; O counts in
// units of it. A hidden key's scale may be anything, also NaN.
template <class Scores, class Coordinates, class Out>
ANYFLASH_DEVICE void scale_values(Scores& probabilities, const Coordinates& coordinates, Out& out,
                                  const float* scales, float& unit) {
  float largest = unit;
  CUTE_UNROLL
  for (int col = 0; col < cute::size<1>(probabilities); ++col) {
    bool weighs = false;
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(probabilities); ++row) {
      weighs |= probabilities(row, col) != 0.0f;
    }
    const float scale = fabsf(scales[cute::get<1>(coordinates(0, col))]);
    largest = fmaxf(largest, weighs ? scale : 0.0f);
  }
  largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
  if (largest != unit) {
    const float rescale = unit / largest;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(out); ++i) out(i) *= rescale;
    unit = largest;
  }
  const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
  CUTE_UNROLL
  for (int col = 0; col < cute::size<1>(probabilities); ++col) {
    const float factor = scales[cute::get<1>(coordinates(0, col))] * inverse;
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(probabilities); ++row) {
      float& p = probabilities(row, col);
      p = p == 0.0f ? 0.0f : p * factor;
    }
  }
}

// Words of an 8-bit fragment as two words each of a 16-bit one: bytes kA0 and kA1, kB0 and kB1.
// target(half, n, second) is the word that byte pair `second` of stored(half, n) becomes.
template <class Element, bool kInt8, int kA0, int kA1, int kB0, int kB1, class Words, class Target>
ANYFLASH_DEVICE void dequantize(const Words& stored, const Target& target) {
  uint32_t nans = 0;
  CUTE_UNROLL
  for (int n = 0; n < cute::size<1>(stored); ++n) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t x = stored(half, n);
      target(half, n, 0) = dequantize_pair<Element, kInt8, kA0, kA1>(x);
      target(half, n, 1) = dequantize_pair<Element, kInt8, kB0, kB1>(x);
      if constexpr (!kInt8) nans |= e4m3_nans(x);
    }
  }
  if (nans == 0) return;
  CUTE_UNROLL
  for (int n = 0; n < cute::size<1>(stored); ++n) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      restore_nans<kA0, kA1>(stored(half, n), target(half, n, 0));
      restore_nans<kB0, kB1>(stored(half, n), target(half, n, 1));
    }
  }
}

// What one warp does with its keys of a tile.
template <class Traits>
class DecodeWarp {
  using Element = typename Traits::Element;
  using Mma = typename Traits::TiledMma;
  using TileKv = typename Traits::TileKv;
  using Queries = LdmatrixOperand<Mma, Side::kA, typename Traits::TileQ>;

 public:
  ANYFLASH_DEVICE DecodeWarp(const KvCacheParams& params, typename Traits::SharedStorage& smem)
      : smem_(smem),
        is_int8_(params.cache_dtype == DType::kInt8),
        thread_(threadIdx.x % Traits::kGroupThreads),
        group_(threadIdx.x / Traits::kGroupThreads) {}

  ANYFLASH_DEVICE int first_key() const { return group_ * Traits::kWarpKeys; }

  // Scores of this warp's rows and keys: acc += Q K^T.
  template <class Acc, class FragQ>
  ANYFLASH_DEVICE void scores(Acc& acc, FragQ& tSrQ, int stage) const {
    if (Traits::k8Bit && is_int8_) scores_of<true>(acc, tSrQ, stage);
    else scores_of<false>(acc, tSrQ, stage);
  }

  // acc += P V
  template <class Acc, class FragP>
  ANYFLASH_DEVICE void output(Acc& acc, const FragP& tOrP, int stage) const {
    if (Traits::k8Bit && is_int8_) output_of<true>(acc, tOrP, stage);
    else output_of<false>(acc, tOrP, stage);
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
  template <bool kInt8, class Acc, class FragQ>
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
        auto wide = make_tensor<Element>(make_shape(Shape<_2, _2>{}, size<1>(tSrK), _2{}));
        auto words = recast<uint32_t>(wide);  // ((1, 2), MMA_N, 2)
        dequantize<Element, kInt8, 0, 1, 2, 3>(
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

  template <bool kInt8, class Acc, class FragP>
  ANYFLASH_DEVICE void output_of(Acc& acc, const FragP& tOrP, int stage) const {
    using namespace cute;
    const Mma mma;
    const LdmatrixOperand<Mma, Side::kB, TileKv, /*kTransposed=*/true, Traits::kWarpKeys> values(
        smem_.buffers.v[stage] + group_ * Traits::kWarpOffset, thread_);
    auto tOrV = values.fragment();  // (MMA, MMA_N, MMA_K)
    CUTE_UNROLL
    for (int k = 0; k < values.kBlocks; ++k) {
      values.load(tOrV, k);
      if constexpr (!Traits::k8Bit) {
        gemm(mma, tOrP(_, _, k), tOrV(_, _, k), acc);
      } else {  // even columns, odd columns
        auto wide = make_tensor<Element>(make_shape(Shape<_2, _2>{}, Int<2 * size<1>(tOrV)>{}));
        auto words = recast<uint32_t>(wide);  // ((1, 2), 2 MMA_N)
        dequantize<Element, kInt8, 0, 2, 1, 3>(
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
      Queries(smem_.q, thread_).load(tSrQ, k);
    } else {
      auto sQ = make_tensor(make_smem_ptr(smem_.q), typename Traits::TileQ::Layout{});
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
  int thread_;  // of the group
  int group_;
};

// Returns whether this thread took NaN or infinity out of a partly hidden tile of V. `unit` is what
// acc_o has to be multiplied by.
template <class Traits, class AccO, class Softmax>
ANYFLASH_DEVICE bool decode_mainloop(const KvCacheParams& params, const DecodeWorkTile& block,
                                     typename Traits::SharedStorage& smem, AccO& acc_o,
                                     Softmax& softmax, float& unit) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kStages = Traits::kStages;
  const int tiles = (block.keys.end - block.keys.begin + kBlockN - 1) / kBlockN;

  CacheLoader<Traits> loader(params, block);
  loader.find(0);
  loader.fill_scales(smem.buffers);
  load_queries<Traits>(params, block, smem);
  CUTE_UNROLL
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < tiles) {
      loader.load(smem.buffers, stage);
      loader.find(stage + 1);
    }
    cp_async_fence();  // one group a tile, empty or not; Q comes with the first
  }

  DecodeWarp<Traits> warp(params, smem);
  typename Traits::TiledMma mma;
  auto cS = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kWarpKeys>>{});
  auto tScS = mma.get_thread_slice(threadIdx.x % Traits::kGroupThreads).partition_C(cS);
  auto coordinates = make_tensor(tScS.data(), accumulator_as_matrix(tScS.layout()));
  auto out_matrix = make_tensor(acc_o.data(), accumulator_as_matrix(acc_o.layout()));
  const DecodeRows rows(params, block, coordinates);
  const ScoreMod score_mod(params, static_cast<float>(params.softmax_scale));
  const TreeMask tree(params, block.batch, block.sequence.seqlen_k);
  const int shift = block.sequence.seqlen_k - params.seqlen_q;

  cp_async_wait<kStages - 2>();
  __syncthreads();  // Q is there
  auto tSrQ = warp.queries();

  bool found_nonfinite = false;
  int stage = 0;
  for (int n = 0; n < tiles; ++n) {
    const int first_key = block.keys.begin + n * kBlockN;
    const bool partial = block.hides(first_key, first_key + kBlockN);
    cp_async_wait<kStages - 2>();
    if (partial) found_nonfinite |= loader.clear_values(smem.buffers, stage);
    __syncthreads();  // tile n is there; every warp has done with the tile before
    if (n + kStages - 1 < tiles) {
      loader.load(smem.buffers, stage == 0 ? kStages - 1 : stage - 1);
      loader.find(n + kStages);
    }
    cp_async_fence();

    const int col0 = first_key + warp.first_key();
    auto acc_s = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kWarpKeys>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    warp.scores(acc_s, tSrQ, stage);
    auto scores = make_tensor(acc_s.data(), accumulator_as_matrix(acc_s.layout()));
    if constexpr (Traits::k8Bit) {
      const float* const scales = smem.buffers.k_scale[stage] + warp.first_key();
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const float scale = scales[get<1>(coordinates(0, col))];
        CUTE_UNROLL
        for (int row = 0; row < size<0>(scores); ++row) scores(row, col) *= scale;
      }
    }
    score_mod.scale_and_cap(scores);
    if (params.alibi_slopes.data != nullptr) add_slopes(scores, coordinates, rows, shift, col0);
    if (partial) hide_keys(scores, coordinates, rows, tree, col0);
    softmax.template update<true>(scores, out_matrix);
    if constexpr (Traits::k8Bit) {
      scale_values(scores, coordinates, out_matrix, smem.buffers.v_scale[stage] + warp.first_key(),
                   unit);
    }
    auto probabilities = round_fragment<Element>(acc_s);
    auto tOrP = make_tensor(probabilities.data(), accumulator_as_operand_a(acc_s.layout()));
    warp.output(acc_o, tOrP, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  return found_nonfinite;
}

}  // namespace anyflash::sm80
