// The backward's main loop of one CTA for head dims above 256, for one gradient: Q, dO and V come
// by chunks of columns (column_chunks.h).
//
// What a tile of rows takes, in this order: chunks of Q for S; of dO for dP or for dV; and again of
// Q for dK. With two buffers the next chunk arrives while one is multiplied, with one buffer after.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "cuda/query_tile_iterator.h"
#include "sm80/backward/column_chunks.h"
#include "sm80/backward/stages.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/backward_scratch.h"
#include "variant/mask.h"

namespace anyflash::sm80 {

// The products of a chunk, and which one is due.
template <class Traits, KeyGradient kWhich>
struct ChunkProducts {
  using ScoreMma = typename Traits::ScoreMma;
  using KeyMma = typename Traits::KeyMma;
  using RowChunk = typename Traits::RowChunk;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kColumns = Traits::kChunkColumns;
  static constexpr int kChunks = Traits::kChunks;
  static constexpr bool kDk = kWhich == KeyGradient::kDk;
  // Steps of a tile: kChunks for S, as many for dP or dV, and for dK as many again.
  static constexpr int kSteps = (kDk ? 3 : 2) * kChunks;
  static constexpr int kKeyGradientStep = kSteps - kChunks;
  static_assert(kSteps % Traits::kStages == 0, "a tile's first chunk comes to the first buffer");

  // S += Q K^T
  template <int kChunk, class Acc>
  ANYFLASH_DEVICE static void add_scores(SharedStorage& smem, Acc& acc) {
    const LdmatrixOperand<ScoreMma, Side::kA, RowChunk> q(buffer<kChunk>(smem.rows), threadIdx.x);
    const LdmatrixOperand<ScoreMma, Side::kB, typename Traits::TileK> k(smem.k.data(), threadIdx.x);
    gemm_smem_smem(acc, acc, q,
                   k.template region<0, Traits::kBlockN, kChunk * kColumns, kColumns>(),
                   ScoreMma{});
  }

  // dP = init + dO V^T
  template <int kChunk, class Acc, class Init>
  ANYFLASH_DEVICE static void add_dp(SharedStorage& smem, Acc& acc, const Init& init) {
    constexpr int kStep = kChunks + kChunk;
    const LdmatrixOperand<ScoreMma, Side::kA, RowChunk> dout(buffer<kStep>(smem.rows), threadIdx.x);
    const LdmatrixOperand<ScoreMma, Side::kB, typename Traits::KeyChunk> v(buffer<kStep>(smem.v),
                                                                           threadIdx.x);
    gemm_smem_smem(acc, init, dout, v, ScoreMma{});
  }

  // dK += dS^T Q, or dV += P^T dO
  template <int kChunk, class Acc>
  ANYFLASH_DEVICE static void add_key_gradient(SharedStorage& smem, Acc& acc) {
    const LdmatrixOperand<KeyMma, Side::kA, typename Traits::TileP, kTransposed> scores_t(
        smem.p_or_ds.data(), threadIdx.x);
    const LdmatrixOperand<KeyMma, Side::kB, RowChunk, kTransposed> rows_t(
        buffer<kKeyGradientStep + kChunk>(smem.rows), threadIdx.x);
    gemm_smem_smem(acc, acc, scores_t, rows_t, KeyMma{});
  }

 private:
  template <int kStep, class Buffers>
  ANYFLASH_DEVICE static auto* buffer(Buffers& buffers) {
    return buffers[kStep % Traits::kStages].data();
  }
};

// A tile of rows.
struct QueryTileCoord {
  int head;
  int row;
};

// Starts to load what the kStep-th step of a tile multiplies.
template <class Traits, KeyGradient kWhich, int kStep>
ANYFLASH_DEVICE void load_step(const ChunkLoader<Traits>& loader, const QueryTileCoord& at) {
  using Products = ChunkProducts<Traits, kWhich>;
  constexpr int kChunk = kStep % Products::kChunks;
  constexpr int kBuffer = kStep % Traits::kStages;
  if constexpr (kStep / Products::kChunks != 1) {
    loader.load_q(kChunk, kBuffer, at.head, at.row);
  } else {
    loader.load_dout(kChunk, kBuffer, at.head, at.row);
    if constexpr (Products::kDk) loader.load_v(kChunk, kBuffer);
  }
  cute::cp_async_fence();
}

// The steps of one tile, which waits for chunks and asks for those to come. `next`: the tile after
// it.
template <class Traits, KeyGradient kWhich, class Tiles>
class ChunkSteps {
  using Products = ChunkProducts<Traits, kWhich>;
  using SharedStorage = typename Traits::SharedStorage;

 public:
  ANYFLASH_DEVICE ChunkSteps(const ChunkLoader<Traits>& loader, SharedStorage& smem,
                             const QueryTileCoord& at, const Tiles& next)
      : loader_(loader), smem_(smem), at_(at), next_(next) {}

  // Calls multiply(chunk) for the chunks of the steps from kFirst on, as they arrive.
  template <bool kMasked, int kFirst, class Multiply>
  ANYFLASH_DEVICE void multiply_chunks(const Multiply& multiply) const {
    using namespace cute;
    for_each(make_int_sequence<Products::kChunks>{}, [&](auto chunk) ANYFLASH_INLINE_LAMBDA {
      constexpr int kStep = kFirst + decltype(chunk)::value;
      cp_async_wait<0>();
      if constexpr (kMasked) {
        const bool found = loader_.clear_nonfinite_rows(kStep % Traits::kStages);
        if (found && kStep / Products::kChunks == 1) atomicMax(&smem_.nonfinite_dout, 1);
      }
      __syncthreads();  // the chunk is there, P or dS too; every warp has done with the last one
      if constexpr (Traits::kStages > 1) load_next<kStep>();
      multiply(chunk);
      if constexpr (Traits::kStages == 1) {
        __syncthreads();  // every warp has done with the chunk
        load_next<kStep>();
      }
    });
  }

 private:
  template <int kStep>
  ANYFLASH_DEVICE void load_next() const {
    if constexpr (kStep + 1 < Products::kSteps) load_step<Traits, kWhich, kStep + 1>(loader_, at_);
    else if (next_.valid()) load_step<Traits, kWhich, 0>(loader_, {next_.head(), next_.row()});
  }

  const ChunkLoader<Traits>& loader_;
  SharedStorage& smem_;
  const QueryTileCoord& at_;
  const Tiles& next_;
};

// dq_accum += dS K, with K without NaN and infinity where keys may be hidden.
template <bool kMasked, class Traits>
ANYFLASH_DEVICE void add_dq(const ChunkLoader<Traits>& loader, const QueryStage<Traits>& dq,
                            int nonfinite_keys, float* dq_accum) {
  const bool clear_keys = kMasked && nonfinite_keys != 0;
  if (clear_keys) {
    loader.clear_nonfinite_k();
    __syncthreads();  // K without NaN and infinity
  }
  dq.template accumulate_dq<false>(dq_accum);
  if (clear_keys) {
    __syncthreads();  // every warp has done with that K
    loader.load_k();
    cute::cp_async_fence();
  }
}

// sums[c] += the gradient's columns of chunk c, without the scales of dS and of P; for dK also
// dS K to dq_accum, where there is one.
template <class Traits, class Variant, KeyGradient kWhich, class Sums>
ANYFLASH_DEVICE void mainloop_by_chunks(const BackwardScratch& params,
                                        const BackwardWorkTile& block,
                                        typename Traits::SharedStorage& smem, Sums& sums) {
  using namespace cute;
  using Element = typename Traits::Element;
  using Products = ChunkProducts<Traits, kWhich>;
  const Sequence& sequence = block.sequence;
  const Mask mask = Mask(sequence, params.attention.window).up_to_last_row();
  QueryTileIterator<Traits, Variant> tiles(params, block, mask);
  if (!tiles.valid()) return;
  const ChunkLoader<Traits> loader(params, block, smem);
  const ScoreStore<Traits, false> p_or_ds(smem.p_or_ds.data());
  const QueryStage<Traits> query_gradients(smem, 0);
  const auto places = places_of_scores<Traits>(threadIdx.x);

  loader.load_k();
  load_step<Traits, kWhich, 0>(loader, {tiles.head(), tiles.row()});
  cp_async_wait<0>();
  loader.note_nonfinite_k();
  __syncthreads();  // all of K has been looked at
  if (smem.nonfinite_keys != 0) tiles.mask_rows_beyond(sequence.seqlen_q);

  const int64_t first_row = params.first_row(sequence, block.batch, 0);
  const typename Variant::Seed seed(params.attention);
  const auto tile_step = [&](auto masked, auto) ANYFLASH_INLINE_LAMBDA {
    constexpr bool kMasked = decltype(masked)::value;
    const QueryTileCoord at{tiles.head(), tiles.row()};
    const bool sees_all = tiles.see().all;
    tiles.advance();
    const ChunkSteps<Traits, kWhich, decltype(tiles)> steps(loader, smem, at, tiles);

    const int64_t scratch_row = first_row + at.head * params.padded_rows + at.row;
    const Variant variant(params, sequence, block.batch, at.head, seed);
    const ScoreTile tile{mask, at.row, block.first_key, sees_all};
    const auto coordinates = as_matrix(places);
    const auto lse_and_delta = load_lse_and_delta(params.lse_and_delta + scratch_row, coordinates);
    auto acc_s = partition_fragment_C(typename Traits::ScoreMma{},
                                      Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>{});
    auto acc_dp = make_fragment_like(acc_s);  // (MMA, MMA_M, MMA_N)
    auto scores = as_matrix(acc_s);
    auto dp = as_matrix(acc_dp);
    ScoreAuxOf<Variant, Element, decltype(scores)> aux;

    variant.template prefetch<kMasked>(aux, coordinates, tile);
    clear(acc_s);
    steps.template multiply_chunks<kMasked, 0>([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
      Products::template add_scores<chunk()>(smem, acc_s);
    });
    variant.template compute_p<kMasked>(scores, aux, lse_and_delta, coordinates, tile);
    const auto rounded_p = variant.template rounded_p<Element>(acc_s, aux, coordinates, tile);
    if constexpr (!Products::kDk) {
      p_or_ds.template store<0, 0>(rounded_p);
    } else {
      steps.template multiply_chunks<kMasked, Products::kChunks>(
          [&](auto chunk) ANYFLASH_INLINE_LAMBDA {
            if constexpr (chunk() == 0) {
              Products::template add_dp<0>(smem, acc_dp, variant.initial_dp(acc_dp, lse_and_delta));
            } else {
              Products::template add_dp<chunk()>(smem, acc_dp, acc_dp);
            }
          });
      variant.template compute_ds<kMasked>(dp, scores, aux, lse_and_delta);
      variant.apply_score_derivative(dp, aux);
      p_or_ds.template store<0, 0>(round_fragment<Element>(acc_dp));
    }
    steps.template multiply_chunks<kMasked, Products::kKeyGradientStep>(
        [&](auto chunk) ANYFLASH_INLINE_LAMBDA {
          Products::template add_key_gradient<chunk()>(smem, get<chunk()>(sums));
        });

    if (!Products::kDk || params.dq_accum == nullptr) return;
    add_dq<kMasked>(loader, query_gradients, smem.nonfinite_keys,
                    params.dq_accum + scratch_row * Traits::kHeadDim);
  };
  for_each_tile<Traits, Variant>(tiles, tile_step);
}

}  // namespace anyflash::sm80
