#pragma once

#include "anyflash/options.h"

namespace anyflash {

const char* name(CpuIsa isa);  // "avx2"
bool cpu_has(CpuIsa isa);      // this machine's processor and operating system

}  // namespace anyflash
