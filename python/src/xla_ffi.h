// Handlers for XLA's foreign function interface, which JAX calls.
#pragma once

#include <nanobind/nanobind.h>

namespace anyflash::python {

// A list of (target's name, platform, capsule), as jax.ffi.register_ffi_target takes them; empty
// where XLA's headers were not found at build time. A call's operands and results are dense; its
// attributes are `operation`, for errors; `operands` and `results`, their names, separated by
// spaces; and the numbers of NamedCall. rng_state is uint32 (4,): the words of seed and offset, low
// ones first. With forward_with_kvcache, a result k_cache or v_cache must be an alias of the
// operand of that name, which is written.
nanobind::list xla_handlers();

}  // namespace anyflash::python
