// How a call divides the caller's workspace, and checks of the workspace itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "arguments.h"

namespace anyflash {

inline constexpr std::size_t kAlignment = 256;  // of every piece of the workspace

// The offset of a new piece at the end.
inline std::size_t reserve(std::size_t& total, std::size_t bytes) {
  const std::size_t offset = total;
  total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

// What the caller is asked for: memory of this size has room for the pieces wherever it begins.
inline std::size_t size_with_slack(std::size_t pieces) {
  return pieces == 0 ? 0 : pieces + kAlignment - 1;
}

// Where the pieces begin, which take `pieces` bytes together.
inline char* first_piece(const Workspace& workspace, std::size_t pieces) {
  const std::size_t needed = size_with_slack(pieces);
  if (workspace.bytes < needed) {
    invalid_value("workspace has " + std::to_string(workspace.bytes) + " bytes; " +
                  std::to_string(needed) + " are needed");
  }
  if (needed > 0 && workspace.data == nullptr) {
    invalid_value("workspace has a null data pointer");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  return static_cast<char*>(workspace.data) + (0 - address) % kAlignment;
}

}  // namespace anyflash
