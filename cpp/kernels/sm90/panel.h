// A panel: rows of 128 bytes in shared memory, with the 128-byte swizzle. TMA writes it, and wgmma
// reads it.
#pragma once

namespace anyflash::sm90 {

inline constexpr int kPanelBytes = 128;   // of a row
inline constexpr int kPanelColumns = 64;  // of 16 bits

}  // namespace anyflash::sm90
