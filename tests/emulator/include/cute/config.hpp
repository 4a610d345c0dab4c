#pragma once

#include_next <cute/config.hpp>

#include "emu.hpp"

// What CuTe calls where an instruction does not exist in this build. An instruction that has no
// shadow is reported instead of doing nothing.
#undef CUTE_INVALID_CONTROL_PATH
#define CUTE_INVALID_CONTROL_PATH(x) ::emu::fail(x)
