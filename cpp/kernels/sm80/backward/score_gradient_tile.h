// Gradients of the scores of one tile at a time, in registers: what the backward's passes over rows
// are made of. Each warp owns 16 rows, so that dS is an operand of dS K as it is.
#pragma once

#include <cute/tensor.hpp>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm80/backward/load.h"
#include "sm80/forward/traits.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/backward_scratch.h"
#include "variant/backward_variants.h"
#include "variant/mask.h"

namespace anyflash::sm80 {

// Signed: offsets that follow from it are, too, where strides are negative.
ANYFLASH_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }

// Above head dim 256 the tiles come by chunks of columns, Q and dO through one buffer and K and V
// through another. Then dQ is made by launches of as many columns.
template <class Element_, int kHeadDim_, int kHeadDimV_>
struct DeterministicDqTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr Tile kTile = generic_forward_tile(kHeadDim, kHeadDimV);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kChunks = kHeadDim > 256 ? kHeadDim / 256 : 1;
  static constexpr bool kChunked = kChunks > 1;
  static constexpr int kDqColumns = kHeadDim / kChunks;  // of a launch
  static_assert(!kChunked || kHeadDim == kHeadDimV);
  using KeyOrder = QuadKeyOrder<kBlockN>;

  using TileQ = SmemTile<Element, kThreads, kBlockM, kHeadDim / kChunks>;
  using TileDO = SmemTile<Element, kThreads, kBlockM, kHeadDimV / kChunks>;
  using TileK = SmemTile<Element, kThreads, kBlockN, kHeadDim / kChunks>;
  using TileV = SmemTile<Element, kThreads, kBlockN, kHeadDimV / kChunks>;

  template <class Tile, int kCount = 1>
  using Buffer = cute::array<Element, kCount * cute::cosize_v<typename Tile::Layout>>;
  struct SharedStorage {
    alignas(128) Buffer<TileQ> q;  // later dQ
    alignas(128) Buffer<TileDO, kChunked ? 0 : 1> own_dout;
    alignas(128) Buffer<TileK> k;
    alignas(128) Buffer<TileV, kChunked ? 0 : 1> own_v;

    ANYFLASH_DEVICE Element* dout() { return kChunked ? q.data() : own_dout.data(); }
    ANYFLASH_DEVICE Element* v() { return kChunked ? k.data() : own_v.data(); }
  };

  using TiledMma =
      cute::TiledMMA<MmaAtom<Element>,
                     cute::Layout<cute::Shape<cute::Int<kTile.warps>, cute::_1, cute::_1>>,
                     cute::Tile<cute::Int<16 * kTile.warps>, cute::_16, cute::_16>>;
};

// One thread's view of the tiles in shared memory.
template <class Traits>
class ScoreGradientTile {
 public:
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  using ShapeS = cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>;

  ANYFLASH_DEVICE ScoreGradientTile(const BackwardScratch& params, const Sequence& sequence,
                                    typename Traits::SharedStorage& smem)
      : params_(params), sequence_(sequence), smem_(smem) {}

  // Places of this thread's scores in a tile, as a (row, col) view.
  ANYFLASH_DEVICE static auto coordinates() {
    using namespace cute;
    auto cS = make_identity_tensor(ShapeS{});
    auto tScS =
        typename Traits::TiledMma{}
            .get_thread_slice(thread_index())
            .partition_C(make_tensor(
                cS.data(), composition(cS.layout(), make_tile(_, typename Traits::KeyOrder{}))));
    return as_matrix(tScS);
  }

  // Both start to load a tile, which the caller waits for. Chunks come when they are multiplied.
  ANYFLASH_DEVICE void load_rows(int head, int row0) {
    rows_ = query_rows(sequence_, head, row0);
    if constexpr (Traits::kChunked) return;
    load_q(0);
    load_dout(0);
    cute::cp_async_fence();
  }
  ANYFLASH_DEVICE void load_keys(int head_k, int col0) {
    keys_ = key_rows(sequence_, head_k, col0);
    if constexpr (Traits::kChunked) return;
    load_k(0);
    load_v(0);
    cute::cp_async_fence();
  }

  // The gradient of the final scores, and calls use(dS as a (row, col) view, coordinates) before it
  // becomes the gradient of softmax_scale q.k, which is returned as an accumulator.
  template <class Variant, class Use>
  ANYFLASH_DEVICE auto compute_ds(const Variant& variant, const Mask& mask,
                                  const LseAndDelta* lse_and_delta, int row0, int col0,
                                  bool sees_all, const Use& use) const {
    using namespace cute;
    typename Traits::TiledMma mma;
    const auto places = coordinates();
    const auto rows = load_lse_and_delta(lse_and_delta, places);
    const ScoreTile tile{mask, row0, col0, sees_all};
    auto acc_s = partition_fragment_C(mma, ShapeS{});  // (MMA, MMA_M, MMA_N)
    auto acc_dp = partition_fragment_C(mma, ShapeS{});
    auto scores = as_matrix(acc_s);
    auto dp = as_matrix(acc_dp);
    ScoreAuxOf<Variant, Element, decltype(scores)> aux;
    variant.template prefetch<true>(aux, places, tile);
    clear(acc_s);
    for_each_chunk([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
      arrive([&] {
        load_q(chunk);
        load_k(chunk);
      });
      multiply<typename Traits::TileQ, typename Traits::TileK>(acc_s, acc_s, smem_.q.data(),
                                                               smem_.k.data());
    });
    variant.template compute_p<true>(scores, aux, rows, places, tile);
    variant.template rounded_p<Element>(acc_s, aux, places, tile);  // for aux: what is dropped
    for_each_chunk([&](auto chunk) ANYFLASH_INLINE_LAMBDA {
      arrive([&] {
        load_dout(chunk);
        load_v(chunk);
      });
      const auto add = [&](const auto& init) ANYFLASH_INLINE_LAMBDA {
        multiply<typename Traits::TileDO, typename Traits::TileV>(acc_dp, init, smem_.dout(),
                                                                  smem_.v());
      };
      if constexpr (chunk() == 0) add(variant.initial_dp(acc_dp, rows));
      else add(acc_dp);
    });
    variant.template compute_ds<true>(dp, scores, aux, rows);
    use(dp, places);
    variant.apply_score_derivative(dp, aux);
    return acc_dp;
  }

  // Takes NaN and infinity out of the K in shared memory, for all threads; of a chunk, once it is
  // there.
  ANYFLASH_DEVICE void clear_nonfinite_keys() {
    clears_keys_ = true;
    if constexpr (Traits::kChunked) return;
    auto keys = loader_k();
    if (__syncthreads_or(!keys.is_finite()) == 0) return;  // every warp has done with K
    keys.clear_nonfinite();
    __syncthreads();  // K without NaN and infinity
  }

  // acc += dS K, of the launch's columns.
  template <class Acc, class AccS>
  ANYFLASH_DEVICE void add_product(Acc& acc, const AccS& acc_ds) {
    using Mma = typename Traits::TiledMma;
    arrive([&] { load_k(params_.dq_first_column / Traits::kDqColumns); });
    if (Traits::kChunked && clears_keys_) {
      loader_k().clear_nonfinite();
      __syncthreads();  // the chunk without NaN and infinity
    }
    clears_keys_ = false;
    const LdmatrixOperand<Mma, Side::kB, typename Traits::TileK, /*kTransposed=*/true> k_t(
        smem_.k.data(), thread_index());
    auto rounded = round_fragment<Element>(acc_ds);
    auto tQrDS = cute::make_tensor(rounded.data(), accumulator_as_operand_a(acc_ds.layout()));
    gemm_register_smem(acc, tQrDS, k_t, Mma{});
  }

 private:
  // Calls function(chunk) for the chunks of a product.
  template <class Function>
  ANYFLASH_DEVICE static void for_each_chunk(const Function& function) {
    cute::for_each(cute::make_int_sequence<Traits::kChunks>{}, function);
  }

  // Waits for chunks of tiles, which come into buffers that all warps have done with.
  template <class Load>
  ANYFLASH_DEVICE static void arrive(const Load& load) {
    if constexpr (Traits::kChunked) {
      __syncthreads();  // every warp has done with what was there
      load();
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();  // the chunks are there
    }
  }

  ANYFLASH_DEVICE void load_q(int chunk) const {
    load_chunk<typename Traits::TileQ, PlainKeyOrder<kBlockM>>(smem_.q.data(), params_.attention.q,
                                                               params_.attention.q_stride, rows_,
                                                               params_.attention.head_dim, chunk);
  }
  ANYFLASH_DEVICE void load_dout(int chunk) const {
    load_chunk<typename Traits::TileDO, PlainKeyOrder<kBlockM>>(
        smem_.dout(), params_.dout, params_.dout_stride, rows_, params_.attention.head_dim_v,
        chunk);
  }
  ANYFLASH_DEVICE void load_k(int chunk) const {
    load_chunk<typename Traits::TileK, typename Traits::KeyOrder>(
        smem_.k.data(), params_.attention.k, params_.attention.k_stride, keys_,
        params_.attention.head_dim, chunk);
  }
  ANYFLASH_DEVICE void load_v(int chunk) const {
    load_chunk<typename Traits::TileV, typename Traits::KeyOrder>(
        smem_.v(), params_.attention.v, params_.attention.v_stride, keys_,
        params_.attention.head_dim_v, chunk);
  }
  template <class Tile, class Order>
  ANYFLASH_DEVICE static void load_chunk(Element* buffer, const void* data, const Strides& stride,
                                         const TileRows& rows, int columns, int chunk) {
    const int first = chunk * Tile::kColumns;
    TileLoader<Tile, Order>(buffer, thread_index())
        .load(static_cast<const Element*>(data) + first, stride, rows, columns - first);
  }

  ANYFLASH_DEVICE auto loader_k() const {
    return TileLoader<typename Traits::TileK, typename Traits::KeyOrder>(smem_.k.data(),
                                                                         thread_index());
  }

  // acc = init + A B^T.
  template <class TileA, class TileB, class Acc, class Init>
  ANYFLASH_DEVICE static void multiply(Acc& acc, const Init& init, const Element* a,
                                       const Element* b) {
    using Mma = typename Traits::TiledMma;
    const LdmatrixOperand<Mma, Side::kA, TileA> operand_a(a, thread_index());
    const LdmatrixOperand<Mma, Side::kB, TileB> operand_b(b, thread_index());
    gemm_smem_smem(acc, init, operand_a, operand_b, Mma{});
  }

  const BackwardScratch& params_;
  const Sequence& sequence_;
  typename Traits::SharedStorage& smem_;
  TileRows rows_{};
  TileRows keys_{};
  bool clears_keys_ = false;
};

}  // namespace anyflash::sm80
