// What the Hopper backward's kernels have to know of a variant (variant/backward_single_feature.h).
#pragma once

#include <type_traits>

#include "kernel_descriptor.h"
#include "sm90/roles.h"
#include "variant/backward_single_feature.h"
#include "variant/backward_variants.h"
#include "variant/forward_variants.h"

namespace anyflash::sm90 {

template <class Variant>
inline constexpr bool kHasRanges = (Variant::kFeatures & kKeyRanges) != 0;
template <class Variant>
inline constexpr bool kHasAlibi = (Variant::kFeatures & kAlibi) != 0;
template <class Variant>
inline constexpr bool kHasSoftcap = (Variant::kFeatures & kSoftcap) != 0;
template <class Variant>
inline constexpr bool kHasDropout = (Variant::kFeatures & kDropout) != 0;

template <class Variant>
inline constexpr bool kHasBlocks = (Variant::kFeatures & kBlockMask) != 0;

template <class Variant>  // tiles of which nothing is seen, and hides elements of others
inline constexpr bool kSkipsTiles = kHasRanges<Variant> || kHasBlocks<Variant>;
template <class Variant>  // P comes with a factor
inline constexpr bool kScalesP = kHasSoftcap<Variant> || kHasDropout<Variant>;

// A loader that asks about tiles of rows needs more.
template <class Variant>
inline constexpr RegisterSplit register_split =
    kSkipsTiles<Variant> ? RegisterSplit{40, 232} : RegisterSplit{24, 240};

// The producer's threads that load: one, or a warp where the variant leaves tiles out. Its lanes
// all find the tiles, and one of them loads and tells.
template <class Traits>
ANYFLASH_DEVICE bool loads() {
  return kSkipsTiles<typename Traits::Variant> ? threadIdx.x / 32 == Traits::kConsumerWarps
                                               : is_loading_thread<Traits>();
}
template <class Traits>
ANYFLASH_DEVICE bool leads() {
  return !kSkipsTiles<typename Traits::Variant> || threadIdx.x % 32 == 0;
}

// The variants that say which tiles of rows, or of keys, are visited. ALiBi's diagonal needs no
// other loop here.
template <class Variant>
using QueryTileVariant = std::conditional_t<kHasAlibi<Variant>, PlainBackward, Variant>;
template <class Variant>
using KeyTileVariant =
    std::conditional_t<kHasRanges<Variant>, RangesForward,
                       std::conditional_t<kHasBlocks<Variant>, BlocksForward, PlainForward>>;

}  // namespace anyflash::sm90
