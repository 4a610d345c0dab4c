"""What test_mutations.py breaks in the backward."""

from __future__ import annotations

from column_chunk_mutations import CHUNK_MUTATIONS
from feature_mutations import ONE_FEATURE
from mutations import (
    BACKWARD,
    CHUNKS,
    MASK,
    ONE_BUFFER,
    PIECES,
    RELOADED_V,
    ROWS,
    SCORE_MOD,
    STORES,
    Mutation,
)
from pingpong_mutations import PINGPONG_MUTATIONS
from range_mutations import RANGES

MAINLOOP = "sm80/backward/mainloop.h"
STAGES = "sm80/backward/stages.h"
LOADS = "sm80/backward/load.h"
CUDA_EPILOGUE = "cuda/backward_epilogue.h"
CUDA_PARTS = "cuda/gqa_partials.h"
VISITS = "cuda/query_tile_iterator.h"
KERNEL = "sm80/backward/kernel.h"
PARTS = "sm80/backward/gqa_partials.h"
EPILOGUE = "sm80/backward/epilogue.h"
SCORES = "variant/backward_variants.h"
ROW_PASS = "sm80/backward/deterministic_dq.h"
DBIAS = "sm80/backward/dbias.h"
SCORE_GRADIENT_TILE = "sm80/backward/score_gradient_tile.h"
ROWS_SOURCE = "cuda/backward_preprocess.cu"

ADDED = "atomicAdd(target, value);"
HIDDEN = "!mask.keep(row, key) || !variant.keep(row, key)"
DLSE = "p.dlse == nullptr ? 0.0f : *row_of<float>(p.dlse, p.dlse_stride, tile, row)"
OWN_PART = "first_part<Traits>(params, block) + block.gqa_split"
CLEAR_DO = "if (dout_.clear_nonfinite()) atomicMax(&smem_.nonfinite_dout, 1);"
LOAD_TILE = (
    "load_tile<true>(load_, load_.get_thread_slice(thread_).partition_S(gX), tXsX_, tXcX_, guard,"
    " rows.count);"
)
BEGIN_STEP = (
    "const auto lse_and_delta = scores.load_lse_and_delta(params.lse_and_delta + scratch_row);"
)
TILE_THERE = "__syncthreads(); // the tile is there"
END_PASS = "__syncthreads(); // every warp has done with K and V"
NEEDS_MASK = "tile < unmasked_begin || tile >= unmasked_end"
HIDE = "kMasked && seen.hides(j) ? kHiddenP : p"
END_MAINLOOP = "backward_mainloop<Traits, Variant>(params, block, smem, acc_dk, acc_dv);"

SYNCHRONISATION = (
    Mutation("no-barrier-for-tile", MAINLOOP, TILE_THERE),
    Mutation("no-barrier-for-p", MAINLOOP, "__syncthreads(); // P and dS are there"),
    Mutation("no-barrier-for-finite-k", MAINLOOP, "__syncthreads(); // all of K has been looked"),
    Mutation("no-barrier-for-cleared-k", MAINLOOP, "__syncthreads(); // K without NaN"),
    Mutation(
        "no-barrier-for-restored-k", MAINLOOP, "__syncthreads(); // every warp has done with that K"
    ),
    Mutation("no-wait-for-tile", MAINLOOP, "cp_async_wait<0>();", after=BEGIN_STEP),
    Mutation(
        "short-wait-for-tile",
        MAINLOOP,
        "cp_async_wait<0>();",
        "cp_async_wait<1>();",
        after=BEGIN_STEP,
    ),
    Mutation("no-flip-of-loads", MAINLOOP, "rows.advance(next_buffer);"),
    Mutation("no-flip-of-scores", MAINLOOP, "scores.advance(next_buffer);"),
    Mutation("no-flip-of-products", MAINLOOP, "key_gradients.advance(next_buffer);"),
    Mutation("flip-in-one-direction", MAINLOOP, "next_buffer = -next_buffer;"),
    Mutation(
        "no-barrier-for-block", KERNEL, "__syncthreads(); // read from there", sanitizer="tsan"
    ),
    Mutation("no-wait-at-end", KERNEL, "cp_async_wait<0>();", after=END_MAINLOOP),
    Mutation("no-barrier-at-end", KERNEL, "__syncthreads(); // every warp has done with K and V"),
    Mutation("no-barrier-in-gradient", EPILOGUE, "__syncthreads(); // the tile is complete"),
    Mutation("no-barrier-before-restoring", EPILOGUE, "__syncthreads(); // dV is there"),
    Mutation(
        "no-wait-for-keys", ROW_PASS, "cp_async_wait<0>();", after="tiles.load_keys(head_k, col0);"
    ),
    Mutation("no-barrier-for-keys", ROW_PASS, "__syncthreads(); // the tile is there"),
    Mutation("no-barrier-after-keys", ROW_PASS, END_PASS),
    Mutation("no-barrier-before-dq", ROW_PASS, "__syncthreads(); // every warp has done with Q"),
    Mutation(
        "no-barrier-before-dbias-tiles",
        DBIAS,
        "__syncthreads(); // every warp has done with the tiles before",
    ),
    Mutation("no-barrier-for-dbias-tiles", DBIAS, "__syncthreads(); // the tiles are there"),
    Mutation(
        "no-barrier-before-dbias-sums",
        DBIAS,
        "__syncthreads(); // every warp has done with the tiles",
        after="// Through shared memory",
    ),
    Mutation("no-barrier-for-dbias-sums", DBIAS, "__syncthreads(); // all sums are there"),
    Mutation(
        "no-barrier-before-clearing-keys",
        SCORE_GRADIENT_TILE,
        "__syncthreads_or(!keys.is_finite()) == 0",
        "false",
        "tsan",
    ),
    Mutation(
        "no-barrier-for-cleared-keys", SCORE_GRADIENT_TILE, "__syncthreads(); // K without NaN"
    ),
)

POSITIONS = (
    Mutation("mask-forgotten", SCORES, HIDE, "p"),
    Mutation(
        "generic-mask-forgotten",
        SCORES,
        "s == -INFINITY || (kMasked && seen.hides(j))",
        "s == -INFINITY",
    ),
    Mutation(
        "bias-hides-nothing",
        SCORES,
        "s == -INFINITY || (kMasked && seen.hides(j))",
        "kMasked && seen.hides(j)",
    ),
    Mutation(
        "first-row-too-large",
        MASK,
        "row_clamp(first_key - last_)",
        "row_clamp(first_key - last_ + 1)",
    ),
    Mutation("end-row-too-small", MASK, "row_clamp(last - first_)", "row_clamp(last - first_ - 1)"),
    Mutation(
        "first-full-row-too-small",
        MASK,
        "row_clamp(end_key - 1 - last_)",
        "row_clamp(first_key - last_)",
    ),
    Mutation(
        "end-full-row-too-large",
        MASK,
        "row_clamp(first_key - first_ + 1)",
        "row_clamp(last - first_)",
    ),
    Mutation(
        "keys-beyond-not-masked", MASK, "end_key > seqlen_k_ || full_end < full", "full_end < full"
    ),
    Mutation("left-mask-forgotten", MASK, NEEDS_MASK, "tile >= unmasked_end", after="MRange {"),
    Mutation("right-mask-forgotten", MASK, NEEDS_MASK, "tile < unmasked_begin", after="MRange {"),
    Mutation(
        "one-row-tile-too-few",
        MASK,
        "ceil_div(static_cast<int>(end), block_m)",
        "static_cast<int>(end) / block_m",
    ),
    Mutation("head-of-larger-part-forgotten", VISITS, "block.gqa_split < larger ? 1 : 0", "0"),
    Mutation("first-heads-in-all-parts", VISITS, "block.gqa_split * params.split_heads", "0"),
    Mutation(
        "hidden-block-visited",
        VISITS,
        "!keeps_block()",
        "false",
    ),
    Mutation(
        "keys-not-used-not-written",
        KERNEL,
        "here.first_key >= here.sequence.all_keys",
        "here.first_key >= here.sequence.seqlen_k",
    ),
    Mutation(
        "rows-not-used-not-written",
        CUDA_EPILOGUE,
        "block.sequence.all_keys - block.first_key",
        "block.sequence.seqlen_k - block.first_key",
    ),
    Mutation(
        "gradient-of-another-sequence",
        CUDA_EPILOGUE,
        "block.sequence.first_k + block.first_key",
        "block.first_key",
    ),
    Mutation("rows-of-another-sequence", CUDA_EPILOGUE, "sequence.first_q + row0", "row0"),
    Mutation("keys-of-another-sequence", CUDA_EPILOGUE, "sequence.first_k + col0", "col0"),
    Mutation("order-of-keys", LOADS, "make_tile(Order{}, _)", "make_tile(_, _)", alone=True),
    Mutation(
        "order-of-gradient", PIECES, "Order{}(first_row + i * kPass)", "first_row + i * kPass"
    ),
    Mutation(
        "order-of-float32-gradient", EPILOGUE, "Order{}(get<0>(places(i)))", "get<0>(places(i))"
    ),
)

BOUNDS = (
    Mutation("tile-read-past-end", LOADS, LOAD_TILE, LOAD_TILE.replace("true", "false"), "asan"),
    Mutation(
        "rows-read-past-end", CUDA_EPILOGUE, "sequence.seqlen_q - row0", "sequence.seqlen_q", "asan"
    ),
    Mutation(
        "keys-read-past-end", CUDA_EPILOGUE, "sequence.seqlen_k - col0", "sequence.seqlen_k", "asan"
    ),
    Mutation(
        "float-gradient-past-end",
        CUDA_EPILOGUE,
        "row >= rows || col >= columns",
        "col >= columns",
        "asan",
    ),
    Mutation(
        "float-gradient-columns",
        CUDA_EPILOGUE,
        "row >= rows || col >= columns",
        "row >= rows",
        "asan",
    ),
    Mutation(
        "dbias-past-end", DBIAS, "(!where.one_row && row >= params.dbias_rows)", "false", "asan"
    ),
)

ARITHMETIC = (
    Mutation("hidden-q-not-cleared", LOADS, "q_.clear_nonfinite();"),
    Mutation("hidden-dout-not-cleared", LOADS, CLEAR_DO),
    Mutation("cleared-dout-forgotten", LOADS, CLEAR_DO, "dout_.clear_nonfinite();"),
    Mutation("nan-in-k-not-seen", LOADS, "!k_.is_finite()", "false"),
    Mutation("hidden-k-not-cleared", MAINLOOP, "kMasked && smem.nonfinite_keys != 0", "false"),
    Mutation(
        "hidden-k-not-cleared-in-pass",
        ROW_PASS,
        "range.needs_mask(n) || !seen.all || variant.may_hide_anywhere()",
        "false",
    ),
    Mutation("restored-where-mask-hides", CUDA_EPILOGUE, HIDDEN, "!variant.keep(row, key)"),
    Mutation("restored-where-bias-hides", CUDA_EPILOGUE, HIDDEN, "!mask.keep(row, key)"),
    Mutation("gradient-not-added-to", CUDA_EPILOGUE, ADDED, "*target = value;"),
    Mutation("dropped-infinity-restored", CUDA_EPILOGUE, "variant.is_dropped(row, key)", "false"),
    Mutation("nan-of-hidden-dp", SCORES, "kMasked && is_hidden(p(i))", "false"),
    Mutation("hidden-p-like-others", SCORES, "__float_as_uint(p) == 0x80000000u", "false"),
    Mutation("mask-of-first-part", STAGES, "whole.col0 + kKey", "whole.col0"),
    Mutation("rows-that-round-up-see-infinity", SCORES, "of_row.lse >= kFarLse", "false"),
    Mutation(
        "last-rows-not-masked",
        VISITS,
        "min(range_.unmasked_end, range_.end - 1)",
        "range_.unmasked_end",
    ),
    Mutation(
        "edge-everywhere", VISITS, "begins_on_diagonal_ && m_ == range_.begin", "m_ == range_.begin"
    ),
    Mutation(
        "edge-in-all-tiles",
        VISITS,
        "begins_on_diagonal_ && m_ == range_.begin",
        "begins_on_diagonal_",
    ),
    Mutation("edge-a-row-early", VISITS, "Traits::kTopRows - 1", "Traits::kTopRows - 2"),
    Mutation("nan-of-hidden-generic-dp", SCORES, "p(row, col) == 0.0f ? 0.0f : ds", "ds"),
    Mutation(
        "nan-of-hidden-slope",
        SCORES,
        "ds(i) == 0.0f ? 0.0f : ds(i) * aux.slopes(i)",
        "ds(i) * aux.slopes(i)",
    ),
    Mutation(
        "no-slope-of-softcap", SCORES, "ds(i) == 0.0f ? 0.0f : ds(i) * aux.slopes(i)", "ds(i)"
    ),
    Mutation("slope-of-softcap", SCORE_MOD, "1.0f - x * x", "1.0f - x"),
    Mutation(
        "slope-of-alibi", SCORE_MOD, "-fabsf(static_cast<float>(row + shift_ - col))", "row - col"
    ),
    Mutation("delta-forgotten", SCORES, "dp(row, col) - lse_and_delta(row).delta", "dp(row, col)"),
    Mutation(
        "delta-of-another-row",
        SCORES,
        "-lse_and_delta(2 * m + i / 2).delta",
        "-lse_and_delta(2 * m).delta",
    ),
    Mutation("dropped-p-kept", SCORES, "if (!keep) p(row, run + i) = 0.0f;"),
    Mutation(
        "dropped-dp-kept", SCORES, "keep ? dp(row, col) * factor : 0.0f", "dp(row, col) * factor"
    ),
    Mutation(
        "dropout-not-scaled-in-dp",
        SCORES,
        "keep ? dp(row, col) * factor : 0.0f",
        "keep ? dp(row, col) : 0.0f",
    ),
    Mutation(
        "dropout-not-scaled-in-dv",
        SCORES,
        "return dropout_scale(params.attention.dropout_threshold);",
        "return 1.0f;",
    ),
    Mutation("parts-overwritten", CUDA_PARTS, OWN_PART, "0"),
    Mutation(
        "last-part-forgotten",
        CUDA_PARTS,
        "part < first + params.gqa_splits",
        "part < first + params.gqa_splits - 1",
    ),
    Mutation("nan-of-parts", CUDA_PARTS, "nonfinite_dout |= params.gqa_nonfinite_dout[part];"),
    Mutation(
        "part-of-keys-not-used-not-written",
        PARTS,
        "block.first_key >= block.sequence.all_keys",
        "block.first_key >= block.sequence.seqlen_k",
    ),
    Mutation("dk-not-scaled", EPILOGUE, "acc_dk(i) *= params.ds_scale;"),
    Mutation("dq-not-scaled-in-pass", ROW_PASS, "acc_dq(i) *= params.ds_scale;"),
    Mutation(
        "dbias-of-one-head",
        DBIAS,
        "broadcast ? Span{0, count} : Span{index, index + 1}",
        "Span{index, index + 1}",
    ),
)

OF_ROWS = (
    Mutation(
        "rows-beyond-not-prepared",
        ROWS_SOURCE,
        "lane != 0 || row >= p.block_m",
        "lane != 0 || row >= rows",
    ),
    Mutation(
        "keyless-rows-with-lse", ROWS_SOURCE, "return {INFINITY, 0.0f};", "return {0.0f, 0.0f};"
    ),
    Mutation("keyless-lse-kept", ROWS_SOURCE, "fabsf(lse) == INFINITY", "false"),
    Mutation("nan-of-rows-without-keys", ROWS_SOURCE, "delta != delta", "false"),
    Mutation("dlse-forgotten", ROWS_SOURCE, DLSE, "0.0f"),
    Mutation("delta-of-unrounded-dout", ROWS_SOURCE, "dout[i] = to_float(rounded.x[i]);"),
    Mutation(
        "slope-of-the-first-head",
        ROWS_SOURCE,
        "tile.batch * stride.batch + tile.head * stride.head",
        "tile.batch * stride.batch",
    ),
    Mutation("dq-sum-not-zero", ROWS_SOURCE, "sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};"),
    Mutation(
        "slopes-of-one-batch",
        ROWS_SOURCE,
        "p.dalibi_slopes.stride.batch == 0 ? p.attention.batch : 1",
        "1",
    ),
)


def _of_unit(unit: str, mutations: tuple[Mutation, ...]) -> tuple[Mutation, ...]:
    return tuple(m._replace(name=f"backward-{m.name}", unit=unit) for m in mutations)


ONE_BUFFER_MUTATIONS = (
    Mutation(
        "no-barrier-for-next-tile",
        MAINLOOP,
        "__syncthreads(); // every warp has done with Q and dO",
    ),
    Mutation("no-barrier-for-only-tile", MAINLOOP, TILE_THERE),
    Mutation("no-wait-for-only-tile", MAINLOOP, "cp_async_wait<0>();", after=BEGIN_STEP),
)

V_THERE = "cute::cp_async_wait<0>(); __syncthreads(); // V is there"
RELOADED_V_MUTATIONS = (
    Mutation("no-barrier-for-v", MAINLOOP, V_THERE, "cute::cp_async_wait<0>();"),
    Mutation("no-wait-for-v", MAINLOOP, V_THERE, "__syncthreads();"),
    Mutation("no-barrier-before-p", MAINLOOP, "__syncthreads(); // every warp has done with V"),
)

BACKWARD_MUTATIONS = (
    *_of_unit(BACKWARD, SYNCHRONISATION + POSITIONS + BOUNDS + ARITHMETIC + STORES + ONE_FEATURE),
    *_of_unit(BACKWARD, RANGES),
    *_of_unit(ONE_BUFFER, ONE_BUFFER_MUTATIONS),
    *_of_unit(ONE_BUFFER, PINGPONG_MUTATIONS),
    *_of_unit(RELOADED_V, RELOADED_V_MUTATIONS),
    *_of_unit(CHUNKS, CHUNK_MUTATIONS),
    *_of_unit(ROWS, OF_ROWS),
)
