// Where the bounds of key ranges lie in a workspace, and the launch that makes them.
#pragma once

#include <cstddef>

#include "params.h"

namespace anyflash {

// Of Attention::key_range_bounds; 0 without key ranges.
std::size_t key_range_bounds_bytes(const Attention& attention);

// Fills attention.key_range_bounds, which lies in the workspace, and clears a counter unless it is
// null: that saves a launch. Asynchronous on the stream. Nothing without key ranges.
void make_key_range_bounds(const Attention& attention, void* stream, unsigned* counter = nullptr);

}  // namespace anyflash
