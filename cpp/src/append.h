// What KvCachePlan does before attention: new keys and values are written to the cache,
// rotated and quantised where that is asked for, and q is rotated into the workspace.
#pragma once

#include "params.h"

namespace anyflash {

void append_to_cache(const AppendParams& params, void* stream);  // CUDA, asynchronous
void append_to_cache_on_cpu(const AppendParams& params, int num_threads);

}  // namespace anyflash
