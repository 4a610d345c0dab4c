// What the backward's main loops do with one tile of query rows, stage by stage:
//
//   ScoreStage   P = exp(Q K^T - lse) and dS = P (dO V^T - delta), to shared memory
//   KeyStage     dV += P^T dO and dK += dS^T Q, in registers
//   QueryStage   dq_accum += dS K
//
// Of a tile on the diagonal of a causal mask (kDiagonal) the products leave out what is hidden:
// they are made of two regions (TileRegion).
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "common/convert.h"
#include "common/layout.h"
#include "common/macros.h"
#include "sm80/backward/accumulate.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "variant/backward_variants.h"

namespace anyflash::sm80 {

inline constexpr bool kTransposed = true;

// Whether a thread keeps all addresses of an operand in registers, or one, from which each product
// makes the others.
struct KeptAddresses {
  template <class... Operands>
  ANYFLASH_DEVICE static void shorten(Operands&...) {}
  template <class Operand>
  ANYFLASH_DEVICE static auto ready(const Operand& operand) {
    return operand;
  }
};
struct RematerializedAddresses {
  template <class... Operands>
  ANYFLASH_DEVICE static void shorten(Operands&... operands) {
    ((operands = operands.rematerialized()), ...);
  }
  template <class Operand>
  ANYFLASH_DEVICE static auto ready(const Operand& operand) {
    return operand.rematerialized();
  }
};
template <class Traits>
using AddressesOf = std::conditional_t<Traits::kConfig.keep_operand_addresses, KeptAddresses,
                                       RematerializedAddresses>;

// Calls product(region) with what is seen of a tile.
template <class Traits, bool kDiagonal, class Product>
ANYFLASH_DEVICE void for_each_region(const Product& product) {
  if constexpr (!kDiagonal) {
    product(typename Traits::All{});
  } else {
    if constexpr (Traits::kTopKeys > 0) product(typename Traits::DiagonalTop{});
    if constexpr (Traits::kTopRows < Traits::kBlockM) product(typename Traits::DiagonalBottom{});
  }
}

// Calls step(masked, diagonal) for each tile; it advances `tiles`. Masked and unmasked tiles have a
// loop each.
template <class Traits, class Variant, class Tiles, class Step>
ANYFLASH_DEVICE void for_each_tile(Tiles& tiles, const Step& step) {
  constexpr bool kSkipsMaskedHalf = Variant::kSkipsMaskedHalf && Traits::kSkipsMaskedHalf;
  while (tiles.valid()) {
    while (tiles.valid() && tiles.needs_mask()) {
      if (kSkipsMaskedHalf && tiles.on_diagonal()) {
        step(std::true_type{}, std::bool_constant<kSkipsMaskedHalf>{});
      } else {
        step(std::true_type{}, std::false_type{});
      }
    }
    if constexpr (!Variant::kAlwaysMasked) {
      while (tiles.valid() && !tiles.needs_mask()) step(std::false_type{}, std::false_type{});
    }
  }
}

// Places of a thread's scores in the tile's first part: (MMA, MMA_M, MMA_N).
template <class Traits>
ANYFLASH_DEVICE auto places_of_scores(int thread) {
  using namespace cute;
  auto cS = make_identity_tensor(Shape<Int<Traits::kBlockM>, Int<Traits::kPartKeys>>{});
  // The order of keys is its own inverse.
  const auto ordered = make_tensor(
      cS.data(), composition(cS.layout(), make_tile(_, typename Traits::PartKeyOrder{})));
  return typename Traits::ScoreMma{}.get_thread_slice(thread).partition_C(ordered);
}

// The same in shared memory: (COPY, MMA_M, MMA_N).
template <class Traits, class Element, class Thread>
ANYFLASH_DEVICE auto scores_in_smem(Element* tile, Thread thread) {
  using namespace cute;
  auto copy_c = make_tiled_copy_C(typename Traits::SmemStore{}, typename Traits::ScoreMma{});
  return copy_c.get_thread_slice(thread).partition_D(
      make_tensor(make_smem_ptr(tile), typename Traits::PartOfP::Layout{}));
}

// Where a thread stores P or dS. Where registers are few, addresses that are kept cost more than
// addresses computed again.
template <class Traits, bool kKeepsAddresses>
class ScoreStore {
  using Element = typename Traits::Element;

 public:
  ANYFLASH_DEVICE explicit ScoreStore(Element* tile)
      : tile_(tile), tCsX_(scores_in_smem<Traits>(tile, static_cast<int>(Traits::row_thread()))) {}

  // A rounded accumulator of the rows from kRow on and the part of the keys from kKey on.
  template <int kRow, int kKey, class Rounded>
  ANYFLASH_DEVICE void store(const Rounded& rounded) const {
    using namespace cute;
    auto copy_c = make_tiled_copy_C(typename Traits::SmemStore{}, typename Traits::ScoreMma{});
    const auto source = copy_c.get_thread_slice(Traits::row_thread()).retile_S(rounded);
    const auto rows = Layout<decltype(size<1>(source))>{};
    const auto target = pieces();
    copy(copy_c, source,
         make_tensor(target.data() + Traits::TileP::panel_offset(kRow, kKey),
                     composition(target.layout(), make_tile(_, rows, _))));
  }

 private:
  ANYFLASH_DEVICE auto pieces() const {
    // An unsigned thread index: with a signed one ptxas takes what other addresses have in common
    // with these, and keeps it.
    if constexpr (kKeepsAddresses) return tCsX_;
    else return scores_in_smem<Traits>(tile_, Traits::row_thread());
  }

  Element* tile_;
  decltype(scores_in_smem<Traits>(static_cast<Element*>(nullptr), 0)) tCsX_;
};

template <class Traits, class Variant>
class ScoreStage {
  using Element = typename Traits::Element;
  using Mma = typename Traits::ScoreMma;
  using Addresses = AddressesOf<Traits>;
  using Store =
      ScoreStore<Traits, Traits::kConfig.keep_store_addresses && Variant::kKeepsAddresses>;

 public:
  // P and dS go to the places of `group`, a group of warps.
  ANYFLASH_DEVICE ScoreStage(typename Traits::SharedStorage& smem, int group)
      : q_(smem.q[0].data(), Traits::row_thread()),
        dout_(smem.dout[0].data(), Traits::row_thread()),
        k_(smem.k.data(), Traits::row_thread()),
        v_(smem.v.data(), Traits::row_thread()),
        p_(smem.p(group)),
        ds_(smem.ds(group)),
        tScS_(places_of_scores<Traits>(Traits::row_thread())) {
    Addresses::shorten(q_, dout_, k_, v_);
  }

  // Goes on by `buffers` buffers of Q and dO. at() returns a copy that has gone on.
  ANYFLASH_DEVICE void advance(int buffers) {
    q_.advance(buffers * cute::cosize_v<typename Traits::TileQ::Layout>);
    dout_.advance(buffers * cute::cosize_v<typename Traits::TileDO::Layout>);
  }
  ANYFLASH_DEVICE ScoreStage at(int buffer) const {
    ScoreStage result = *this;
    result.advance(buffer);
    return result;
  }

  // Of this thread's rows; `lse_and_delta` begins at the tile's first.
  ANYFLASH_DEVICE auto load_lse_and_delta(const LseAndDelta* lse_and_delta) const {
    return anyflash::load_lse_and_delta(lse_and_delta, as_matrix(tScS_));
  }

  // P and dS of what is seen of a tile. Calls `waits` before and after dO V^T, and before the first
  // store.
  template <bool kMasked, bool kDiagonal, class LseAndDeltas, class Waits>
  ANYFLASH_DEVICE void compute_p_and_ds(const Variant& variant, const LseAndDeltas& lse_and_delta,
                                        const ScoreTile& tile, const Waits& waits) const {
    using namespace cute;
    for_each(make_int_sequence<Traits::kScoreParts>{}, [&](auto part) ANYFLASH_INLINE_LAMBDA {
      constexpr int kKey = decltype(part)::value * Traits::kPartKeys;
      constexpr int kRow = kDiagonal && kKey >= Traits::kTopKeys ? Traits::kTopRows : 0;
      if constexpr (kRow < Traits::kBlockM) {
        compute_part<kMasked, kRow, kKey>(variant, lse_and_delta, tile, waits);
      }
    });
  }

 private:
  // Of the rows from kRow on, and the part of the keys from kKey on.
  template <bool kMasked, int kRow, int kKey, class LseAndDeltas, class Waits>
  ANYFLASH_DEVICE void compute_part(const Variant& variant, const LseAndDeltas& all_rows,
                                    const ScoreTile& whole, const Waits& waits) const {
    using namespace cute;
    constexpr int kRows = Traits::kBlockM - kRow;
    constexpr int kKeys = Traits::kPartKeys;
    constexpr int kFirst = kRow / (16 * Traits::kConfig.score_warps);
    const Mma mma;
    auto tScS = tScS_;
    auto tCcS = fragment_from<kFirst>(tScS);
    const auto coordinates = as_matrix(tCcS);
    const auto lse_and_delta = rows_from<2 * kFirst>(all_rows);
    auto acc_s = partition_fragment_C(mma, Shape<Int<kRows>, Int<kKeys>>{});
    auto acc_dp = make_fragment_like(acc_s);  // (MMA, MMA_M, MMA_N)
    clear(acc_s);
    auto scores = as_matrix(acc_s);
    auto dp = as_matrix(acc_dp);
    ScoreAuxOf<Variant, Element, decltype(scores)> aux;
    const ScoreTile tile{whole.mask, whole.row0, whole.col0 + kKey, whole.sees_all};

    variant.template prefetch<kMasked>(aux, coordinates, tile);
    gemm_smem_smem(acc_s, acc_s,
                   Addresses::ready(q_).template region<kRow, kRows, 0, Traits::kHeadDim>(),
                   Addresses::ready(k_).template region<kKey, kKeys, 0, Traits::kHeadDim>(), mma);
    variant.template compute_p<kMasked>(scores, aux, lse_and_delta, coordinates, tile);

    waits.before_dp();
    gemm_smem_smem(acc_dp, variant.initial_dp(acc_dp, lse_and_delta),
                   Addresses::ready(dout_).template region<kRow, kRows, 0, Traits::kHeadDimV>(),
                   Addresses::ready(v_).template region<kKey, kKeys, 0, Traits::kHeadDimV>(), mma);
    waits.after_dp();
    if constexpr (kKey == 0) waits.before_p();
    // Not before the product, whose operands would wait for it.
    p_.template store<kRow, kKey>(
        variant.template rounded_p<Element>(acc_s, aux, coordinates, tile));

    variant.template compute_ds<kMasked>(dp, scores, aux, lse_and_delta);
    variant.apply_score_derivative(dp, aux);
    ds_.template store<kRow, kKey>(round_fragment<Element>(acc_dp));
  }

  LdmatrixOperand<Mma, Side::kA, typename Traits::TileQ> q_;
  LdmatrixOperand<Mma, Side::kA, typename Traits::TileDO> dout_;
  LdmatrixOperand<Mma, Side::kB, typename Traits::TileK> k_;
  LdmatrixOperand<Mma, Side::kB, typename Traits::TileV> v_;
  Store p_;
  Store ds_;
  decltype(places_of_scores<Traits>(0)) tScS_;
};

template <class Traits>
class KeyStage {
  using Mma = typename Traits::KeyMma;
  using TileP = typename Traits::TileP;
  using TileQ = typename Traits::TileQ;
  using TileDO = typename Traits::TileDO;
  using Addresses = AddressesOf<Traits>;

 public:
  ANYFLASH_DEVICE explicit KeyStage(typename Traits::SharedStorage& smem)
      : p_t_(smem.p(), threadIdx.x),
        ds_t_(smem.ds(), threadIdx.x),
        q_t_(smem.q[0].data(), threadIdx.x),
        dout_t_(smem.dout[0].data(), threadIdx.x) {
    Addresses::shorten(p_t_, ds_t_, q_t_, dout_t_);
  }

  // Goes on by `buffers` buffers of Q and dO.
  ANYFLASH_DEVICE void advance(int buffers) {
    q_t_.advance(buffers * cute::cosize_v<typename TileQ::Layout>);
    dout_t_.advance(buffers * cute::cosize_v<typename TileDO::Layout>);
  }
  // A copy for a group's P and dS, and for Q and dO in `buffer`.
  ANYFLASH_DEVICE KeyStage at(int group, int buffer) const {
    constexpr int kP = 2 * cute::cosize_v<typename TileP::Layout>;  // and dS
    KeyStage result = *this;
    result.p_t_.advance(group * kP);
    result.ds_t_.advance(group * kP);
    result.advance(buffer);
    return result;
  }

  template <bool kDiagonal, class AccV>
  ANYFLASH_DEVICE void accumulate_dv(AccV& acc_dv) const {
    add<kDiagonal, Traits::kHeadDimV>(acc_dv, p_t_, dout_t_);
  }
  template <bool kDiagonal, class AccK>
  ANYFLASH_DEVICE void accumulate_dk(AccK& acc_dk) const {
    add<kDiagonal, Traits::kHeadDim>(acc_dk, ds_t_, q_t_);
  }

 private:
  template <bool kDiagonal, int kColumns, class Acc, class OperandA, class OperandB>
  ANYFLASH_DEVICE static void add(Acc& all_keys, const OperandA& scores_t, const OperandB& rows) {
    for_each_region<Traits, kDiagonal>([&](auto region) ANYFLASH_INLINE_LAMBDA {
      constexpr int kRow = decltype(region)::kRow;
      constexpr int kRows = decltype(region)::kRows;
      constexpr int kKeys = decltype(region)::kKeys;
      auto acc = fragment_from<0, kKeys / (16 * Traits::kConfig.key_warps)>(all_keys);
      gemm_smem_smem(acc, acc, Addresses::ready(scores_t).template region<kRow, kRows, 0, kKeys>(),
                     Addresses::ready(rows).template region<kRow, kRows, 0, kColumns>(), Mma{});
    });
  }

  LdmatrixOperand<Mma, Side::kA, TileP, kTransposed> p_t_;
  LdmatrixOperand<Mma, Side::kA, TileP, kTransposed> ds_t_;
  LdmatrixOperand<Mma, Side::kB, TileQ, kTransposed> q_t_;
  LdmatrixOperand<Mma, Side::kB, TileDO, kTransposed> dout_t_;
};

template <class Traits>
class QueryStage {
  using Mma = typename Traits::QueryMma;
  using Addresses = AddressesOf<Traits>;
  static constexpr int kMmaRows = 16 * Traits::kConfig.query_warps;

 public:
  // Reads dS of `group`, a group of warps.
  ANYFLASH_DEVICE QueryStage(typename Traits::SharedStorage& smem, int group)
      : ds_(smem.ds(group), Traits::row_thread()), k_t_(smem.k.data(), Traits::row_thread()) {
    Addresses::shorten(ds_, k_t_);
  }

  // To the tile's sums, by parts of its columns.
  template <bool kDiagonal>
  ANYFLASH_DEVICE void accumulate_dq(float* dq_accum) const {
    using namespace cute;
    for_each(make_int_sequence<Traits::kQueryParts>{}, [&](auto part) ANYFLASH_INLINE_LAMBDA {
      add_columns<kDiagonal, decltype(part)::value * Traits::kPartColumns>(dq_accum);
    });
  }

 private:
  template <bool kDiagonal, int kColumn>
  ANYFLASH_DEVICE void add_columns(float* dq_accum) const {
    using namespace cute;
    constexpr int kColumns = Traits::kPartColumns;
    constexpr int kFirst = kDiagonal && Traits::kTopKeys == 0 ? Traits::kTopRows / kMmaRows : 0;
    const Mma mma;
    auto acc_dq = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<kColumns>>{});
    clear(acc_dq);  // (MMA, MMA_M, MMA_D)
    for_each_region<Traits, kDiagonal>([&](auto region) ANYFLASH_INLINE_LAMBDA {
      constexpr int kRow = decltype(region)::kRow;
      constexpr int kRows = decltype(region)::kRows;
      constexpr int kKeys = decltype(region)::kKeys;
      auto acc = fragment_from<kRow / kMmaRows, kRows / kMmaRows>(acc_dq);
      gemm_smem_smem(acc, acc, Addresses::ready(ds_).template region<kRow, kRows, 0, kKeys>(),
                     Addresses::ready(k_t_).template region<0, kKeys, kColumn, kColumns>(), mma);
    });
    add_to_dq_accum<kFirst>(dq_accum + Traits::kBlockM * kColumn, acc_dq, Traits::row_thread(),
                            Traits::kRowThreads);
  }

  LdmatrixOperand<Mma, Side::kA, typename Traits::TileP> ds_;
  LdmatrixOperand<Mma, Side::kB, typename Traits::TileK, kTransposed> k_t_;
};

}  // namespace anyflash::sm80
