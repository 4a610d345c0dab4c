// Dropout's seed in uniform registers.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/dropout.h"

namespace anyflash {

// All lanes have the same seed: what a reduction makes of it lies in uniform registers, and so do
// the keys of Philox's rounds, which would take 20 others.
struct UniformSeed : DropoutSeed {
  ANYFLASH_DEVICE explicit UniformSeed(const Attention& attention) : DropoutSeed(attention) {
    for (uint32_t* const word : {&key0, &key1, &offset}) {
      *word = __reduce_or_sync(0xffffffffu, *word);
    }
  }
};

}  // namespace anyflash
