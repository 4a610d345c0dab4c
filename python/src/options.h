// The options of a call, as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "anyflash/options.h"
#include "convert.h"

namespace anyflash::python {

// Writes what `given` holds into `options`, which then points into `arrays`. Keys: the names of
// ForwardOptions' tensors, each a pair (array, it shows floats as unsigned integers), and
//   window, block_size, max_seqlen: pairs of int;  dropout: (p, seed, offset);
//   part: (query_start, key_start, diagonal, batch_start, head_start, total_heads), of which the
//   first three may be None;  softcap: float;  validate: bool.
void read_options(const nb::dict& given, ForwardOptions& options, std::vector<Array>& arrays);

// Likewise, the names of BackwardOptions' tensors, and deterministic, accumulate_dq and
// accumulate_dkv: bool;  dq_sums_rows: (first, rows, begin, end).
void read_options(const nb::dict& given, BackwardOptions& options, std::vector<Array>& arrays);

// Likewise, the names of KvCacheOptions' tensors, rotary_interleaved: bool, num_splits, split_size
// and head_dim_v: int.
void read_options(const nb::dict& given, KvCacheOptions& options, std::vector<Array>& arrays);

}  // namespace anyflash::python
