// Memory for results that no framework allocates (the Python binding's anyflash.Array).
#pragma once

#include <cstddef>

#include "anyflash/export.h"
#include "anyflash/tensor_view.h"

namespace anyflash {

// Uninitialised, aligned to 256 bytes; throws Error. `bytes` may be 0.
ANYFLASH_API void* allocate(const Device& device, std::size_t bytes);
ANYFLASH_API void deallocate(const Device& device, void* data) noexcept;

}  // namespace anyflash
