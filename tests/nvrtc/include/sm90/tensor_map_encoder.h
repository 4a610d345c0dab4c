// No driver is asked, and device code has no thread_local.
#pragma once

#include <cuda.h>

namespace anyflash::sm90 {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() { return nullptr; }

template <class Memory>
Memory& of_this_thread() {
  static Memory memory;
  return memory;
}

}  // namespace anyflash::sm90
