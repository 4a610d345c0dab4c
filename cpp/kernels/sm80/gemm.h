// Warp-level products whose operands come from shared memory by ldmatrix, one k-block ahead.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash::sm80 {

// acc = init + A B^T with both operands in shared memory; init may be acc.
template <class Acc, class Init, class OperandA, class OperandB, class Mma>
ANYFLASH_DEVICE void gemm_smem_smem(Acc& acc, const Init& init, const OperandA& a,
                                    const OperandB& b, const Mma& mma) {
  using namespace cute;
  auto tCrA = a.fragment();  // (MMA, MMA_M, MMA_K)
  auto tCrB = b.fragment();  // (MMA, MMA_N, MMA_K)
  a.load(tCrA, 0);
  b.load(tCrB, 0);
  CUTE_UNROLL
  for (int k = 0; k < OperandA::kBlocks; ++k) {
    if (k + 1 < OperandA::kBlocks) {
      a.load(tCrA, k + 1);
      b.load(tCrB, k + 1);
    }
    if (k == 0) gemm(mma, acc, tCrA(_, _, k), tCrB(_, _, k), init);
    else gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// acc += A B^T with A in registers. before(k) may still change block k of A when the product gets
// there.
template <class Acc, class FragA, class OperandB, class Mma, class Before>
ANYFLASH_DEVICE void gemm_register_smem(Acc& acc, const FragA& tCrA, const OperandB& b,
                                        const Mma& mma, const Before& before) {
  using namespace cute;
  auto tCrB = b.fragment();  // (MMA, MMA_N, MMA_K)
  b.load(tCrB, 0);
  CUTE_UNROLL
  for (int k = 0; k < OperandB::kBlocks; ++k) {
    if (k + 1 < OperandB::kBlocks) b.load(tCrB, k + 1);
    before(k);
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

template <class Acc, class FragA, class OperandB, class Mma>
ANYFLASH_DEVICE void gemm_register_smem(Acc& acc, const FragA& tCrA, const OperandB& b,
                                        const Mma& mma) {
  gemm_register_smem(acc, tCrA, b, mma, [](int) ANYFLASH_INLINE_LAMBDA {});
}

}  // namespace anyflash::sm80
