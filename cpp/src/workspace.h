// How a call divides the caller's workspace, and checks of the workspace itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "arguments.h"

namespace anyflash {

inline constexpr std::size_t kAlignment = 256;  // of the workspace and of every piece of it

// The offset of a new piece at the end.
inline std::size_t reserve(std::size_t& total, std::size_t bytes) {
  const std::size_t offset = total;
  total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

// `size_function` tells the caller the size: "forward_workspace_size".
inline void check_workspace(const Workspace& workspace, std::size_t needed,
                            const char* size_function) {
  if (workspace.bytes < needed) {
    invalid_value("workspace has " + std::to_string(workspace.bytes) + " bytes; " +
                  std::to_string(needed) + " are needed (" + size_function + ")");
  }
  if (needed > 0 && workspace.data == nullptr) {
    invalid_value("workspace has a null data pointer");
  }
  if (needed > 0 && reinterpret_cast<std::uintptr_t>(workspace.data) % kAlignment != 0) {
    invalid_value("workspace is not aligned to 256 bytes");
  }
}

}  // namespace anyflash
