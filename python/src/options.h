// The options of a call, as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "anyflash/options.h"
#include "convert.h"

namespace anyflash::python {

// Writes what `given` holds into `options`, which then points into `arrays`. Keys: the names of
// ForwardOptions' tensors, each a pair (array, its bfloat16 is shown as uint16), and
//   window, block_size, max_seqlen: pairs of int;  dropout: (p, seed, offset);
//   softcap: float;  validate: bool.
void read_options(const nb::dict& given, ForwardOptions& options, std::vector<Array>& arrays);

// Likewise, the names of BackwardOptions' tensors and deterministic: bool.
void read_options(const nb::dict& given, BackwardOptions& options, std::vector<Array>& arrays);

}  // namespace anyflash::python
