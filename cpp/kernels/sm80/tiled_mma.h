// Tiled MMAs of mma.m16n8k16, and the orders of keys that suit them.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/atom/mma_atom.hpp>
#include <type_traits>

namespace anyflash::sm80 {

template <class Element>
using MmaAtom = cute::MMA_Atom<
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                       cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

// kWarpsM x kWarpsN warps; each owns kColumns neighbouring columns of every kColumns * kWarpsN.
template <class Element, int kWarpsM, int kWarpsN, int kColumns,
          class WarpStride = cute::Stride<cute::_1, cute::Int<kWarpsM>, cute::_1>>
using WarpGrid = cute::TiledMMA<
    MmaAtom<Element>,
    cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>, WarpStride>,
    cute::Tile<cute::Int<16 * kWarpsM>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::Int<kColumns / 8>>,
                            cute::Stride<cute::_1, cute::Int<kColumns>, cute::_8>>,
               cute::_16>>;

// Two groups of kWarpsN warps: the first owns the first half of kRows rows, the other the rest.
template <class Element, int kWarpsN, int kRows, int kColumns>
using HalvesGrid = cute::TiledMMA<
    MmaAtom<Element>,
    cute::Layout<cute::Shape<cute::_2, cute::Int<kWarpsN>, cute::_1>,
                 cute::Stride<cute::Int<kWarpsN>, cute::_1, cute::_1>>,
    cute::Tile<cute::Layout<cute::Shape<cute::_16, cute::_2, cute::Int<kRows / 32>>,
                            cute::Stride<cute::_1, cute::Int<kRows / 2>, cute::_16>>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::Int<kColumns / 8>>,
                            cute::Stride<cute::_1, cute::Int<kColumns>, cute::_8>>,
               cute::_16>>;

// Key j of a tile lies in row KeyOrder(j) of shared memory and is column KeyOrder(j) of the scores.
//
// A lane holds the columns 2 q and 2 q + 1 of each group of eight (q: its place in the quad). With
// keys 8 q to 8 q + 7 there, of every 32, it holds neighbouring keys: one draw of dropout, and
// neighbouring biases. The softmax and P V do not mind the order.
template <int kBlockN>
using QuadKeyOrder =
    cute::Layout<cute::Shape<cute::_2, cute::_4, cute::_4, cute::Int<kBlockN / 32>>,
                 cute::Stride<cute::_1, cute::_8, cute::_2, cute::_32>>;
template <int kBlockN>
using PlainKeyOrder = cute::Layout<cute::Int<kBlockN>>;

}  // namespace anyflash::sm80
