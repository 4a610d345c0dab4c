// The forward main loop of one CTA: all K/V tiles that a block of query rows sees.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "params.h"
#include "sm80/forward/key_tiles.h"
#include "sm80/forward/key_value_pipeline.h"
#include "sm80/forward/query_tile.h"
#include "sm80/forward/row_exchange.h"
#include "variant/apply_mask.h"
#include "variant/score_mod.h"
#include "variant/score_places.h"
#include "variant/work_tile.h"

namespace anyflash::sm80 {

// Online softmax over tiles n of K and V (FlashAttention-2, arXiv 2307.08691, algorithm 1):
//   S = Q K_n^T,  P = exp2(c * S - c * m),  O = exp2(c * (m_old - m)) O + P V_n.
// For m and the rows' sums, see OnlineSoftmax. O is not normalised. Everything else that happens to
// S and P is asked of the variant.
template <class Traits, class Variant, class Keys = TensorKeys>
class ForwardMainloop {
  using Element = typename Traits::Element;
  using Mma = typename Traits::TiledMma;
  using SharedStorage = typename Traits::SharedStorage;
  using AccO = typename Traits::AccO;
  using Softmax = typename Traits::Softmax;
  using RowExchange = std::conditional_t<Traits::kSplitKeysAcrossWarps, PairRowExchange<Traits>,
                                         NoRowExchange<Traits>>;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kBottomRows = Traits::kBottomRows;

 public:
  // Adds to acc_o and to the softmax. q_factor: what Q is multiplied by. Returns whether this
  // thread took NaN or infinity out of a partly hidden tile of V; restore_values() then has to
  // follow.
  ANYFLASH_DEVICE static bool run(const Attention& attention, const ForwardWorkTile& work_tile,
                                  SharedStorage& smem, AccO& acc_o, Softmax& softmax,
                                  float q_factor, const Keys& keys = {}) {
    // Q first: it arrives while the range of keys is found.
    const QueryTile<Traits> queries(attention, work_tile, smem.q.data());
    const KeyTiles<Variant> key_tiles(attention, work_tile, kBlockM, kBlockN);
    if (key_tiles.first.n < 0) {
      cute::cp_async_wait<0>();  // the output goes where Q is
      return false;
    }
    ForwardMainloop loop(attention, keys, work_tile, smem, acc_o, softmax, queries, key_tiles);
    loop.start(q_factor);
    do {
      loop.masked_tiles();
      key_tiles.variant.dispatch_score_ops(
          [&](auto ops) ANYFLASH_INLINE_LAMBDA { loop.unmasked_tiles<decltype(ops)::value>(); });
    } while (Variant::kMasksTiles && loop.n_ >= 0);
    return loop.finish();
  }

 private:
  ANYFLASH_DEVICE ForwardMainloop(const Attention& attention, const Keys& keys,
                                  const ForwardWorkTile& work_tile, SharedStorage& smem,
                                  AccO& acc_o, Softmax& softmax, const QueryTile<Traits>& queries,
                                  const KeyTiles<Variant>& key_tiles)
      : work_tile_(work_tile),
        acc_o_(acc_o),
        softmax_(softmax),
        queries_(queries),
        tiles_(key_tiles),
        n_(key_tiles.first.n),
        sees_all_(key_tiles.first.sees_all),
        pipeline_(attention, keys, work_tile, smem, n_),
        exchange_(smem),
        tScS_(score_coordinates(threadIdx.x)) {}

  ANYFLASH_DEVICE void start(float q_factor) {
    pipeline_.start(keys_from(n_));
    queries_.prepare(q_factor);
  }

  ANYFLASH_DEVICE void masked_tiles() {
    if constexpr (Traits::kSkipsMaskedHalf) {
      const int seen =
          tiles_.mask.end_key(work_tile_.first_row + kBottomRows - 1);  // by the other half
      while (n_ >= 0 && n_ * kBlockN >= seen) masked_step<1>();
    }
    while (n_ >= 0 && (tiles_.range.needs_mask(n_) || masks_tile())) masked_step<0>();
  }

  template <int kFirst>
  ANYFLASH_DEVICE void masked_step() {
    const KeyTile next = tiles_.next(n_);
    step<true, Variant::kOps, kFirst>(next);
    go_to(next);
  }
  ANYFLASH_DEVICE void go_to(const KeyTile& next) {
    n_ = next.n;
    sees_all_ = next.sees_all;
  }

  // Whether the tile that comes next needs the masked step wherever it lies.
  ANYFLASH_DEVICE bool masks_tile() const { return Variant::kMasksTiles && !sees_all_; }

  template <ScoreOps kOps>
  ANYFLASH_DEVICE void unmasked_tiles() {
    if constexpr (Variant::kSkipsTiles) {
      while (n_ >= 0 && !masks_tile()) {
        const KeyTile next = tiles_.template next_unmasked<kOps>(n_);
        step<false, kOps, 0>(next);
        go_to(next);
      }
    } else {
      // Tiles count from the first unmasked one from here on, which saves a register, unless the
      // variant asks where they lie.
      const int last = Variant::kAsksPlaces ? tiles_.range.unmasked_begin : 0;
      if (!Variant::kAsksPlaces && n_ >= 0) n_ -= tiles_.range.unmasked_begin;
      for (; n_ >= last; --n_) step<false, kOps, 0>(n_ > last ? -1 : 0);
    }
  }

  ANYFLASH_DEVICE bool finish() {
    exchange_.sums(softmax_, as_matrix(tScS_));
    return pipeline_.found_nonfinite();
  }

  template <bool kMasked, ScoreOps kOps, int kFirst>
  ANYFLASH_DEVICE void step(const KeyTile& next) {
    step<kMasked, kOps, kFirst>(next.n < 0 ? 0 : next.n - n_);
  }
  // S = Q K_n^T;  P = exp2(S - max);  O += P V_n, for accumulators from kFirst on along MMA_M: 1
  // for the later half of the rows. `distance` leads to the next tile, 0 after the last.
  template <bool kMasked, ScoreOps kOps, int kFirst>
  ANYFLASH_DEVICE void step(int distance) {
    const bool clears = kMasked || tiles_.variant.template may_hide<kOps>();
    pipeline_.template acquire_keys<kMasked>(keys_from(n_), distance, clears);
    const auto places = score_places<kFirst>();
    const auto prefetched = tiles_.variant.template prefetch<kMasked, kOps>(places);
    auto acc_s = scores<kFirst>();
    pipeline_.acquire_values(distance, clears);
    softmax<kMasked, kOps, kFirst>(acc_s, prefetched, places);
    values<kFirst>(acc_s, places);
    pipeline_.advance();
  }

  // S = Q K_n^T
  template <int kFirst>
  ANYFLASH_DEVICE auto scores() {
    using namespace cute;
    using Rows = Int<kFirst == 0 ? kBlockM : kBottomRows>;
    auto acc_s = partition_fragment_C(Mma{}, Shape<Rows, Int<kBlockN>>{});
    clear(acc_s);  // (MMA, MMA_M, MMA_N)
    queries_.template multiply<kFirst>(acc_s, pipeline_.keys());
    return acc_s;
  }

  // S becomes P, and O and the rows' sums count in units of the new maximum.
  template <bool kMasked, ScoreOps kOps, int kFirst, class AccS, class Prefetched, class Places>
  ANYFLASH_DEVICE void softmax(AccS& acc_s, const Prefetched& prefetched, const Places& places) {
    auto scores = as_matrix(acc_s);
    tiles_.variant.template modify_scores<kOps>(scores, prefetched, places);
    if constexpr (kMasked) apply_mask(scores, tiles_.mask, places);
    auto out = as_matrix(fragment_from<kFirst>(acc_o_));
    softmax_.template update<has_wide_range(kOps), 2 * kFirst>(
        scores, out, exchange_.maxima(places.coordinates));
    tiles_.variant.template drop<kOps>(scores, places);
  }

  // O += P V_n
  template <int kFirst, class AccS, class Places>
  ANYFLASH_DEVICE void values(const AccS& acc_s, const Places& places) {
    auto probabilities = round_fragment<Element>(acc_s);
    auto out = fragment_from<kFirst>(acc_o_);
    exchange_.multiply_values(out, probabilities, pipeline_.values(),
                              [&](int k) ANYFLASH_INLINE_LAMBDA {
                                tiles_.variant.before_value_block(k, probabilities, places);
                              });
  }

  // How many keys there are from the beginning of a tile on.
  ANYFLASH_DEVICE int keys_from(int tile) const {
    return work_tile_.sequence.seqlen_k - tile * kBlockN;
  }

  // (MMA, MMA_M, MMA_N) of a tile of scores: KeyOrder is its own inverse.
  ANYFLASH_HOST_DEVICE static auto score_coordinates(int thread) {
    using namespace cute;
    auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
    return Mma{}.get_thread_slice(thread).partition_C(make_tensor(
        cS.data(), composition(cS.layout(), make_tile(_, typename Traits::KeyOrder{}))));
  }

  template <int kFirst>
  ANYFLASH_DEVICE auto score_places() {
    auto coordinates = as_matrix(fragment_from<kFirst>(tScS_));
    return ScorePlaces<decltype(coordinates)>{coordinates, work_tile_.first_row, n_ * kBlockN,
                                              sees_all_};
  }

  const ForwardWorkTile& work_tile_;
  AccO& acc_o_;
  Softmax& softmax_;
  QueryTile<Traits> queries_;
  const KeyTiles<Variant> tiles_;
  int n_;          // the tile that comes next, -1 after the last
  bool sees_all_;  // KeyTile's
  typename Keys::template Pipeline<Traits> pipeline_;
  const RowExchange exchange_;
  decltype(score_coordinates(0)) tScS_;
};

}  // namespace anyflash::sm80
