// No driver is asked.
#pragma once

#include <cuda.h>

namespace anyflash::sm90 {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() { return nullptr; }

}  // namespace anyflash::sm90
