"""What test_mutations.py breaks in the backward by chunks of columns."""

from __future__ import annotations

from mutations import Mutation

MAINLOOP = "sm80/backward/mainloop_by_chunks.h"
CHUNKS_KERNEL = "sm80/backward/kernel_by_chunks.h"
KERNEL = "sm80/backward/kernel.h"
ROW_PASS = "sm80/backward/deterministic_dq.h"
SCORE_GRADIENT_TILE = "sm80/backward/score_gradient_tile.h"

CHUNK_LOOP = "constexpr int kStep = kFirst + decltype(chunk)::value;"
CHUNK_MUTATIONS = (
    Mutation("no-barrier-for-chunk", MAINLOOP, "__syncthreads(); // the chunk is there"),
    Mutation("no-wait-for-chunk", MAINLOOP, "cp_async_wait<0>();", after=CHUNK_LOOP),
    Mutation(
        "no-barrier-after-chunk", MAINLOOP, "__syncthreads(); // every warp has done with the chunk"
    ),
    Mutation(
        "rows-keep-nan", MAINLOOP, "loader_.clear_nonfinite_rows(kStep % Traits::kStages)", "false"
    ),
    Mutation("dout-not-noted", MAINLOOP, "kStep / Products::kChunks == 1", "false"),
    Mutation("keys-keep-nan", MAINLOOP, "loader.clear_nonfinite_k();"),
    Mutation(
        "no-barrier-for-finite-keys", MAINLOOP, "__syncthreads(); // all of K has been looked"
    ),
    Mutation("no-barrier-for-cleared-keys", MAINLOOP, "__syncthreads(); // K without NaN"),
    Mutation("dv-of-dk-columns", CHUNKS_KERNEL, "chunk * Traits::kChunkColumns", "0"),
    Mutation(
        "no-barrier-between-chunks", CHUNKS_KERNEL, "__syncthreads(); // every thread has read"
    ),
    Mutation("dq-of-first-chunk", KERNEL, "column * Traits::kBlockM", "0"),
    Mutation(
        "no-barrier-between-dq-chunks",
        KERNEL,
        "if (column > 0) __syncthreads(); // every thread has read its pieces",
    ),
    Mutation(
        "no-barrier-before-streamed",
        SCORE_GRADIENT_TILE,
        "__syncthreads(); // every warp has done with what",
    ),
    Mutation(
        "no-barrier-for-streamed", SCORE_GRADIENT_TILE, "__syncthreads(); // the chunks are there"
    ),
    Mutation(
        "streamed-keys-keep-nan", SCORE_GRADIENT_TILE, "Traits::kChunked && clears_keys_", "false"
    ),
    Mutation(
        "deterministic-dq-of-first-chunk",
        ROW_PASS,
        "params.dq_first_column",
        "0",
        after=".from_column(",
    ),
)
