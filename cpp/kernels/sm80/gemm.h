// Warp-level products whose operands come from shared memory by ldmatrix, one k-block ahead.
#pragma once

#include <cute/tensor.hpp>

#include "common/macros.h"

namespace anyflash::sm80 {

// acc = init + A B with both operands in shared memory; init may be acc.
template <class Acc, class Init, class FragA, class FragB, class SmemA, class SmemB, class Mma,
          class CopyA, class CopyB, class ThreadCopyA, class ThreadCopyB>
ANYFLASH_DEVICE void gemm_smem_smem(Acc& acc, const Init& init, FragA& tCrA, FragB& tCrB,
                                    const SmemA& tCsA, const SmemB& tCsB, const Mma& mma,
                                    const CopyA& copy_a, const CopyB& copy_b,
                                    const ThreadCopyA& thread_copy_a,
                                    const ThreadCopyB& thread_copy_b) {
  using namespace cute;
  auto tCrA_copy = thread_copy_a.retile_D(tCrA);  // (COPY, MMA_M, MMA_K)
  auto tCrB_copy = thread_copy_b.retile_D(tCrB);  // (COPY, MMA_N, MMA_K)
  constexpr int kBlocks = decltype(size<2>(tCrA))::value;
  copy(copy_a, tCsA(_, _, _0{}), tCrA_copy(_, _, _0{}));
  copy(copy_b, tCsB(_, _, _0{}), tCrB_copy(_, _, _0{}));
  CUTE_UNROLL
  for (int k = 0; k < kBlocks; ++k) {
    if (k + 1 < kBlocks) {
      copy(copy_a, tCsA(_, _, k + 1), tCrA_copy(_, _, k + 1));
      copy(copy_b, tCsB(_, _, k + 1), tCrB_copy(_, _, k + 1));
    }
    if (k == 0) gemm(mma, acc, tCrA(_, _, k), tCrB(_, _, k), init);
    else gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// acc += A B with A in registers.
template <class Acc, class FragA, class FragB, class SmemB, class Mma, class CopyB,
          class ThreadCopyB>
ANYFLASH_DEVICE void gemm_register_smem(Acc& acc, const FragA& tCrA, FragB& tCrB, const SmemB& tCsB,
                                        const Mma& mma, const CopyB& copy_b,
                                        const ThreadCopyB& thread_copy_b) {
  using namespace cute;
  auto tCrB_copy = thread_copy_b.retile_D(tCrB);  // (COPY, MMA_N, MMA_K)
  constexpr int kBlocks = decltype(size<2>(tCrA))::value;
  copy(copy_b, tCsB(_, _, _0{}), tCrB_copy(_, _, _0{}));
  CUTE_UNROLL
  for (int k = 0; k < kBlocks; ++k) {
    if (k + 1 < kBlocks) copy(copy_b, tCsB(_, _, k + 1), tCrB_copy(_, _, k + 1));
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

}  // namespace anyflash::sm80
