// What warps that share rows exchange: two policies, for warps with rows of their own and for pairs
// (ForwardConfig::split_keys_across_warps).
#pragma once

#include <cute/tensor.hpp>

#include "common/layout.h"
#include "common/macros.h"
#include "common/softmax.h"
#include "sm80/gemm.h"
#include "sm80/ldmatrix_operand.h"
#include "sm80/named_barrier.h"

namespace anyflash::sm80 {

// Each warp has its rows' scores, and P in the registers that the next product wants.
template <class Traits>
class NoRowExchange {
 public:
  ANYFLASH_DEVICE explicit NoRowExchange(typename Traits::SharedStorage&) {}

  // What OnlineSoftmax::update() does with the rows' maxima.
  template <class Coordinates>
  ANYFLASH_DEVICE NoExchange maxima(const Coordinates&) const {
    return {};
  }

  // acc += P V. before(k): see gemm_register_smem().
  template <class Acc, class Probabilities, class Values, class Before>
  ANYFLASH_DEVICE void multiply_values(Acc& acc, const Probabilities& p, const Values& v_t,
                                       const Before& before) const {
    auto tOrP = cute::make_tensor(p.data(), accumulator_as_operand_a(p.layout()));
    gemm_register_smem(acc, tOrP, v_t, typename Traits::TiledMma{}, before);
  }

  // Makes the rows' sums those of all their keys.
  template <class Softmax, class Coordinates>
  ANYFLASH_DEVICE void sums(Softmax&, const Coordinates&) const {}
};

// Two neighbouring warps have the same rows: each has the scores of half of a tile's keys, and
// makes half of the output's columns. So P goes through shared memory.
template <class Traits>
class PairRowExchange {
  using Element = typename Traits::Element;
  using Mma = typename Traits::TiledMma;
  using TileP = typename Traits::TileP;
  static constexpr int kBlockM = Traits::kBlockM;

 public:
  ANYFLASH_DEVICE explicit PairRowExchange(typename Traits::SharedStorage& smem)
      : smem_(smem), p_(smem.p.data(), threadIdx.x) {}

  template <class Coordinates>
  ANYFLASH_DEVICE auto maxima(const Coordinates& coordinates) const {
    return [this, &coordinates](auto& maxima) ANYFLASH_INLINE_LAMBDA {
      all_reduce(maxima, coordinates, [](float a, float b) { return fmaxf(a, b); });
    };
  }

  // Variants with a feature of P have no tiles that pairs of warps share: `before` does nothing.
  template <class Acc, class Probabilities, class Values, class Before>
  ANYFLASH_DEVICE void multiply_values(Acc& acc, const Probabilities& p, const Values& v_t,
                                       const Before&) const {
    const Mma mma;
    auto sP = cute::make_tensor(cute::make_smem_ptr(smem_.p.data()), typename TileP::Layout{});
    const auto copy_p = cute::make_tiled_copy_C(typename Traits::SmemStore{}, mma);
    const auto thread_copy_p = copy_p.get_thread_slice(threadIdx.x);
    cute::copy(copy_p, thread_copy_p.retile_S(p), thread_copy_p.partition_D(sP));
    sync_pair();  // P is there
    gemm_smem_smem(acc, acc, p_, v_t, mma);
  }

  template <class Softmax, class Coordinates>
  ANYFLASH_DEVICE void sums(Softmax& softmax, const Coordinates& coordinates) const {
    softmax.exchange_sums([&](auto& sums) ANYFLASH_INLINE_LAMBDA {
      all_reduce(sums, coordinates, [](float a, float b) { return a + b; });
    });
  }

 private:
  ANYFLASH_DEVICE static void sync_pair() { named_barrier_sync(threadIdx.x / 64, 64); }

  // Combines a value of each of this thread's rows with the other warp's.
  template <class Rows, class Coordinates, class Combine>
  ANYFLASH_DEVICE void all_reduce(Rows& rows, const Coordinates& coordinates,
                                  const Combine& combine) const {
    const int own = threadIdx.x / 32 % 2 * kBlockM;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(rows); ++i) {
      const int row = cute::get<0>(coordinates(i, 0));
      if (threadIdx.x % 4 == 0) smem_.row_exchange[own + row] = rows(i);
    }
    sync_pair();  // both warps' values are there
    CUTE_UNROLL
    for (int i = 0; i < cute::size(rows); ++i) {
      const int row = cute::get<0>(coordinates(i, 0));
      rows(i) = combine(rows(i), smem_.row_exchange[kBlockM - own + row]);
    }
  }

  typename Traits::SharedStorage& smem_;
  LdmatrixOperand<Mma, Side::kA, TileP> p_;
};

}  // namespace anyflash::sm80
