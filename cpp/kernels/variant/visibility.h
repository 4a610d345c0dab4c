// What a block of rows sees of a tile of keys, masks by position apart.
#pragma once

#include "common/macros.h"

namespace ANYFLASH_SHARED_NAMESPACE {

struct Visibility {
  bool any;  // some row sees some key, or perhaps none
  bool all;  // each row sees each key
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
