#pragma once

#define cast_smem_ptr_to_uint cast_smem_ptr_to_uint_device
#include_next <cute/arch/util.hpp>
#undef cast_smem_ptr_to_uint

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(const void* pointer) { return emu::shared_address(pointer); }

}  // namespace cute
