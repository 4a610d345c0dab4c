// The backward's main loop of one CTA for head dims above 256, for one gradient: Q, dO and V come by
// chunks of columns (column_chunks.h).
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

// What a tile of rows takes, in this order: chunks of Q for S; of dO for dP or for dV; and again of
// Q for dK. With two buffers the next chunk arrives while one is multiplied, with one buffer after.
template <class Traits, class Scores, KeyGradient kWhich>
class ChunkedMainloop {
  using Element = typename Traits::Element;
  using ScoreMma = typename Traits::ScoreMma;
  using KeyMma = typename Traits::KeyMma;
  using SharedStorage = typename Traits::SharedStorage;
  using RowChunk = typename Traits::RowChunk;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kColumns = Traits::kChunkColumns;
  static constexpr int kChunks = Traits::kChunks;
  static constexpr bool kDk = kWhich == KeyGradient::kDk;
  static constexpr int kSteps = (kDk ? 3 : 2) * kChunks;
  static constexpr int kStages = Traits::kStages;
  static_assert(kSteps % kStages == 0, "a tile's first chunk comes to the first buffer");

 public:
  ANYFLASH_DEVICE ChunkedMainloop(const BackwardScratch& params, const BackwardWorkTile& block,
                                  SharedStorage& smem)
      : params_(params),
        block_(block),
        smem_(smem),
        mask_(Mask(block.sequence, params.attention.window).up_to_last_row()),
        tiles_(params, block, mask_),
        loader_(params, block, smem),
        tScS_(places_of_scores<Traits>(threadIdx.x)),
        seed_(params.attention) {}

  // sums[c] += the gradient's columns of chunk c, without the scales of dS and of P.
  template <class Sums>
  ANYFLASH_DEVICE void run(Sums& sums) {
    if (!tiles_.valid()) return;
    loader_.load_k();
    load<0>(tiles_.head(), tiles_.row());
    cute::cp_async_wait<0>();
    loader_.note_nonfinite_k();
    for_each_tile<Traits, Scores>(tiles_, [&](auto masked, auto) ANYFLASH_INLINE_LAMBDA {
      tile<decltype(masked)::value>(sums);
    });
  }

 private:
  template <bool kMasked, class Sums>
  ANYFLASH_DEVICE void tile(Sums& sums) {
    using namespace cute;
    head_ = tiles_.head();
    row0_ = tiles_.row();
    tiles_.advance();
    const int64_t stats_row =
        params_.first_row(block_.sequence, block_.batch, 0) + head_ * params_.padded_rows + row0_;
    const Scores variant(params_, block_.sequence, block_.batch, head_, seed_);
    const ScoreTile tile{mask_, row0_, block_.first_key};
    const auto coordinates = as_matrix(tScS_);
    const auto stats = load_lse_delta(params_.lse_delta + stats_row, coordinates);
    auto acc_s = partition_fragment_C(ScoreMma{}, Shape<Int<kBlockM>, Int<kBlockN>>{});
    auto acc_dp = make_fragment_like(acc_s);  // (MMA, MMA_M, MMA_N)
    auto scores = as_matrix(acc_s);
    auto dp = as_matrix(acc_dp);
    typename Scores::template ScoreAux<Element, decltype(size<0>(scores))::value,
                                       decltype(size<1>(scores))::value>
        aux;
    clear(acc_s);
    variant.template prefetch<kMasked>(aux, coordinates, tile);
    steps<kMasked, 0>([&](auto chunk) ANYFLASH_INLINE_LAMBDA { add_scores<chunk()>(acc_s); });
    variant.template compute_p<kMasked>(scores, aux, stats, coordinates, tile);
    const auto rounded_p = variant.template rounded_p<Element>(acc_s, aux, coordinates, tile);
    if constexpr (!kDk) {
      store(rounded_p);
      steps<kMasked, 1>([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
        add_key_gradient<chunk()>(get<chunk()>(sums));
      });
    } else {
      steps<kMasked, 1>([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
        if constexpr (chunk() == 0) add_dp<0>(acc_dp, variant.initial_dp(acc_dp, stats));
        else add_dp<chunk()>(acc_dp, acc_dp);
      });
      variant.template compute_ds<kMasked>(dp, scores, aux, stats);
      variant.apply_score_derivative(dp, aux);
      store(round_fragment<Element>(acc_dp));
      steps<kMasked, 2>([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
        add_key_gradient<chunk()>(get<chunk()>(sums));
      });
      if (params_.dq_accum != nullptr) add_dq<kMasked>(stats_row);
    }
  }

  // Calls multiply(chunk) for the chunks of one kind of product: 0 is S, 1 dP or dV, 2 dK.
  template <bool kMasked, int kKind, class Multiply>
  ANYFLASH_DEVICE void steps(const Multiply& multiply) {
    cute::for_each(cute::make_int_sequence<kChunks>{}, [&](auto chunk) ANYFLASH_INLINE_LAMBDA {
      step<kMasked, kKind * kChunks + chunk()>([&]() ANYFLASH_INLINE_LAMBDA { multiply(chunk); });
    });
  }

  // Waits for a chunk, the kStep-th of the tile, multiplies it, and asks for the next.
  template <bool kMasked, int kStep, class Multiply>
  ANYFLASH_DEVICE void step(const Multiply& multiply) {
    cute::cp_async_wait<0>();
    if constexpr (kMasked) {
      const bool found = loader_.clear_nonfinite_rows(kStep % kStages);
      if (found && kind<kStep>() == 1) atomicMax(&smem_.nonfinite_dout, 1);
    }
    __syncthreads();  // the chunk is there, P or dS too; every warp has done with the one before
    if constexpr (kStages > 1) load_next<kStep>();
    multiply();
    if constexpr (kStages == 1) {
      __syncthreads();  // every warp has done with the chunk
      load_next<kStep>();
    }
  }

  template <int kStep>
  static constexpr int kind() {
    return kStep % kSteps / kChunks;
  }
  template <int kStep>
  ANYFLASH_DEVICE void load_next() {
    if constexpr (kStep + 1 < kSteps) load<kStep + 1>(head_, row0_);
    else if (tiles_.valid()) load<0>(tiles_.head(), tiles_.row());
  }
  template <int kStep>
  ANYFLASH_DEVICE void load(int head, int row) {
    constexpr int kChunk = kStep % kChunks;
    constexpr int kBuffer = kStep % kStages;
    if constexpr (kind<kStep>() != 1) {
      loader_.load_q(kChunk, kBuffer, head, row);
    } else {
      loader_.load_dout(kChunk, kBuffer, head, row);
      if constexpr (kDk) loader_.load_v(kChunk, kBuffer);
    }
    cute::cp_async_fence();
  }

  // S += Q K^T, of a chunk of the columns.
  template <int kChunk, class Acc>
  ANYFLASH_DEVICE void add_scores(Acc& acc) const {
    const LdmatrixOperand<ScoreMma, Side::kA, RowChunk> q(smem_.rows[kChunk % kStages].data(),
                                                          threadIdx.x);
    const LdmatrixOperand<ScoreMma, Side::kB, typename Traits::TileK> k(smem_.k.data(),
                                                                        threadIdx.x);
    gemm_smem_smem(acc, acc, q, k.template region<0, kBlockN, kChunk * kColumns, kColumns>(),
                   ScoreMma{});
  }

  // dP = init + dO V^T, likewise.
  template <int kChunk, class Acc, class Init>
  ANYFLASH_DEVICE void add_dp(Acc& acc, const Init& init) const {
    constexpr int kBuffer = (kChunks + kChunk) % kStages;
    const LdmatrixOperand<ScoreMma, Side::kA, RowChunk> dout(smem_.rows[kBuffer].data(),
                                                             threadIdx.x);
    const LdmatrixOperand<ScoreMma, Side::kB, typename Traits::KeyChunk> v(smem_.v[kBuffer].data(),
                                                                           threadIdx.x);
    gemm_smem_smem(acc, init, dout, v, ScoreMma{});
  }

  // A chunk of dK += dS^T Q, or of dV += P^T dO.
  template <int kChunk, class Acc>
  ANYFLASH_DEVICE void add_key_gradient(Acc& acc) const {
    constexpr int kBuffer = (kSteps - kChunks + kChunk) % kStages;
    const LdmatrixOperand<KeyMma, Side::kA, typename Traits::TileP, kTransposed> scores_t(
        smem_.p_or_ds.data(), threadIdx.x);
    const LdmatrixOperand<KeyMma, Side::kB, RowChunk, kTransposed> rows_t(
        smem_.rows[kBuffer].data(), threadIdx.x);
    gemm_smem_smem(acc, acc, scores_t, rows_t, KeyMma{});
  }

  // dq_accum += dS K, with K without NaN and infinity where keys may be hidden.
  template <bool kMasked>
  ANYFLASH_DEVICE void add_dq(int64_t stats_row) const {
    const bool clear_keys = kMasked && smem_.nonfinite_keys != 0;
    if (clear_keys) {
      loader_.clear_nonfinite_k();
      __syncthreads();  // K without NaN and infinity
    }
    QueryStage<Traits>(smem_, 0).template accumulate_dq<false>(params_.dq_accum +
                                                               stats_row * Traits::kHeadDim);
    if (clear_keys) {
      __syncthreads();  // every warp has done with that K
      loader_.load_k();
      cute::cp_async_fence();
    }
  }

  template <class Rounded>
  ANYFLASH_DEVICE void store(const Rounded& rounded) const {
    ScoreStore<Traits, false>(smem_.p_or_ds.data()).template store<0, 0>(rounded);
  }

  const BackwardScratch& params_;
  const BackwardWorkTile& block_;
  SharedStorage& smem_;
  const Mask mask_;
  QueryTileIterator<Traits, Scores> tiles_;  // the tile after this one
  const ChunkLoader<Traits> loader_;
  const decltype(places_of_scores<Traits>(0)) tScS_;
  const typename Scores::Seed seed_;
  int head_;  // of this tile
  int row0_;
};

}  // namespace anyflash::sm80
