"""What test_mutations.py breaks."""

from __future__ import annotations

from typing import NamedTuple

# Sources that are compiled with their mutations. Of the backward's kernels, the generic one of head
# dim 128 has one buffer; the others have two. In that of 128 for 228 KB of shared memory, groups of
# warps ping-pong. That of 256 for 99 KB has V loaded with each tile. Those of 512 go by chunks of
# columns, with one buffer and with two. Of the forward's, the plain one of head dim 64 has two
# buffers. For 228 KB, that of 128 rescales lazily, and in that of 256 two warps split the keys of
# their rows.
FORWARD = "sm80_forward_f16_d64"
LAZY = "sm80_forward_f16_d128"
SPLIT_KEYS = "sm80_forward_f16_d256"
BACKWARD = "sm80_backward_f16_d64"
ONE_BUFFER = "sm80_backward_f16_d128"
RELOADED_V = "sm80_backward_f16_d256"
CHUNKS = "sm80_backward_f16_d512"
ROWS = "backward_preprocess"


class Mutation(NamedTuple):
    """`old` occurs once in `header` (below cpp/kernels), whatever the white space: an expression,
    or whole statements if it holds a semicolon; a comment at its end may be shortened."""

    name: str
    header: str
    old: str
    new: str = ""
    sanitizer: str = ""  # asan, tsan: which must report it
    alone: bool = False  # the types change: a kernel of its own is compiled
    unit: str = FORWARD
    after: str = ""  # `old` is looked for after this, which occurs once


MAINLOOP = "sm80/forward/mainloop.h"
KEY_TILES = "sm80/forward/key_tiles.h"
PIPELINE = "sm80/forward/key_value_pipeline.h"
QUERY_TILE = "sm80/forward/query_tile.h"
ROW_EXCHANGE = "sm80/forward/row_exchange.h"
RESTORE_NONFINITE = "cuda/restore_nonfinite.h"
VARIANTS = "variant/forward_variants.h"
EPILOGUE = "sm80/forward/epilogue.h"
CUDA_EPILOGUE = "cuda/epilogue.h"
KERNEL = "sm80/forward/kernel.h"
OPERAND = "sm80/ldmatrix_operand.h"
PIECES = "sm80/tile_pieces.h"
SOFTMAX = "common/softmax.h"
MASK = "variant/mask.h"
SEQUENCE = "variant/sequence.h"
SCORE_MOD = "variant/score_mod.h"
BLOCK_MASK = "variant/block_mask.h"
DROPOUT = "variant/dropout.h"
APPLY_DROPOUT = "variant/apply_dropout.h"
DROPOUT_KERNEL = "variant/forward_dropout.h"

WAIT_K = (
    "cute::cp_async_wait<0>(); if constexpr (kTwoBuffers) clear_values(clears);"
    " __syncthreads(); // K_n is there"
)
WAIT_V = "cute::cp_async_wait<0>(); clear_values(clears); __syncthreads(); // V_n is there"
LOAD_Q = (
    "load_tile<true>(load_q, thread_q.partition_S(gQ), thread_q.partition_D(sQ), tQcQ, columns,"
    " work_tile.sequence.seqlen_q - work_tile.first_row);"
)
LOAD_K = "k_loader_.template load<true>(keys);"
FIRST_V = "if constexpr (kTwoBuffers) v_loader_.template load<true>(keys);"
LOAD_V = "v_loader_.template load<kGuardKeys>(keys);"
NO_MAXIMUM = "max_(row) == -INFINITY ? 0.0f : max_(row)"
LAZY_OUTPUT = "out(i, col) *= rescale(i);"
RESTORE = "__syncthreads_or(found_nonfinite)"
END_KEY = "clamp(row + last_ + 1)"
FIRST_KEY = "clamp(row + first_)"
FIRST_Q = "s.first_q = clamp_length(p.cu_seqlens_q[index], p.total_q);"
FIRST_K = "s.first_k = clamp_length(p.cu_seqlens_k[index], p.total_k);"
SEQUSED = "if (p.seqused_k != nullptr) s.seqlen_k = clamp_length(p.seqused_k[index], s.seqlen_k);"

SYNCHRONISATION = (
    Mutation("no-barrier-for-k", PIPELINE, WAIT_K, WAIT_K.replace("__syncthreads();", "")),
    Mutation("no-wait-for-k", PIPELINE, WAIT_K, WAIT_K.replace("cute::cp_async_wait<0>();", "")),
    Mutation("short-wait-for-k", PIPELINE, WAIT_K, WAIT_K.replace("<0>", "<1>")),
    Mutation("no-wait-for-v", PIPELINE, WAIT_V, WAIT_V.replace("cute::cp_async_wait<0>();", "")),
    Mutation("short-wait-for-v", PIPELINE, WAIT_V, WAIT_V.replace("<0>", "<1>")),
    Mutation("no-barrier-for-v", PIPELINE, WAIT_V, WAIT_V.replace("__syncthreads();", "")),
    Mutation("no-flip-of-loads", PIPELINE, "v_loader_.advance(to_other_);", ""),
    Mutation(
        "no-flip-of-v", PIPELINE, "v_t_.advance(to_other_ * (TileV::kRows * TileV::kColumns));", ""
    ),
    Mutation("no-flip-back", PIPELINE, "to_other_ = -to_other_;", ""),
    Mutation("no-barrier-for-q", QUERY_TILE, "__syncthreads(); // Q has landed", "", "tsan"),
    Mutation(
        "no-barrier-for-row-exchange",
        ROW_EXCHANGE,
        "sync_pair(); // both warps'",
        "",
        unit=SPLIT_KEYS,
    ),
    Mutation(
        "no-barrier-for-p-of-pair", ROW_EXCHANGE, "sync_pair(); // P is there", "", unit=SPLIT_KEYS
    ),
    Mutation(
        "no-wait-for-q-of-no-keys", MAINLOOP, "cute::cp_async_wait<0>(); // the output goes", ""
    ),
    Mutation("no-barrier-for-block", KERNEL, "__syncthreads(); // the work tile is in", "", "tsan"),
    Mutation("no-barrier-in-output", EPILOGUE, "__syncthreads(); // the whole tile is in", ""),
    Mutation("no-barrier-before-restoring", EPILOGUE, RESTORE, "true"),
    Mutation("race-of-restoring", EPILOGUE, RESTORE, "true", "tsan"),
)

POSITIONS = (
    Mutation("end-key-too-large", MASK, END_KEY, "clamp(row + last_ + 2)"),
    Mutation("end-key-too-small", MASK, END_KEY, "clamp(row + last_)"),
    Mutation("first-key-too-large", MASK, FIRST_KEY, "clamp(row + first_ + 1)"),
    Mutation("first-key-too-small", MASK, FIRST_KEY, "clamp(row + first_ - 1)"),
    Mutation("one-tile-too-few", MASK, "ceil_div(end, block_n)", "end / block_n"),
    Mutation(
        "right-zone-forgotten",
        MASK,
        "end_key(first_row) / block_n",
        "end_key(end_row - 1) / block_n",
    ),
    Mutation(
        "left-zone-forgotten", MASK, "ceil_div(first_key(end_row - 1), block_n)", "range.begin"
    ),
    Mutation(
        "left-zone-not-visited",
        MASK,
        "if (tile == unmasked_end && unmasked_begin > begin) return unmasked_begin - 1;",
        "",
    ),
    Mutation("left-zone-visited-twice", KEY_TILES, "n > range.unmasked_begin", "n > range.begin"),
    Mutation(
        "left-zone-visited-twice-plain",
        MAINLOOP,
        "n_ -= tiles_.range.unmasked_begin;",
        "n_ -= tiles_.range.begin;",
    ),
    Mutation(
        "keys-of-half-the-rows",
        MAINLOOP,
        "work_tile_.first_row + kBottomRows - 1",
        "work_tile_.first_row",
    ),
    Mutation("early-half", QUERY_TILE, "kTopRows * Tile::kPanelColumns", "0", unit=LAZY),
    Mutation("sequence-begins-at-0", SEQUENCE, FIRST_Q, "s.first_q = 0;"),
    Mutation("keys-begin-as-queries", SEQUENCE, FIRST_K, FIRST_K.replace("_k[", "_q[")),
    Mutation("keys-not-used-are-seen", SEQUENCE, SEQUSED, ""),
    Mutation(
        "last-row-left-out",
        KERNEL,
        "work_tile.first_row >= work_tile.sequence.seqlen_q",
        "work_tile.first_row + 1 >= work_tile.sequence.seqlen_q",
    ),
    Mutation("block-map-of-other-row", BLOCK_MASK, "row / blocks.rows_", "row / blocks.cols_"),
    Mutation("block-map-of-other-key", BLOCK_MASK, "if ((block + 1) * tiles_ <= n) ++block;", ""),
    Mutation(
        "first-hidden-tile-visited",
        KEY_TILES,
        "if (seen.any) return {n, seen.all};",
        "return {n, seen.all};",
    ),
    Mutation(
        "order-of-v",
        PIPELINE,
        "KeyTileLoader<TileV, typename Traits::KeyOrder> v_loader_;",
        "KeyTileLoader<TileV, cute::Layout<cute::Int<Traits::kBlockN>>> v_loader_;",
        alone=True,
    ),
    Mutation(
        "order-of-coordinates",
        MAINLOOP,
        "make_tile(_, typename Traits::KeyOrder{})",
        "make_tile(_, Int<kBlockN>{})",
        alone=True,
    ),
    Mutation(
        "operand-read-with-another-swizzle",
        OPERAND,
        "Tile::offset(row, column ^ 16 * i)",
        "Tile::offset(row, column) + 16 * i",
    ),
)

BOUNDS = (
    Mutation("q-read-past-end", QUERY_TILE, LOAD_Q, LOAD_Q.replace("true", "false"), "asan"),
    Mutation("k-read-past-end", PIPELINE, LOAD_K, LOAD_K.replace("true", "false"), "asan"),
    Mutation("first-v-read-past-end", PIPELINE, FIRST_V, FIRST_V.replace("true", "false"), "asan"),
    Mutation("v-read-past-end", PIPELINE, LOAD_V, LOAD_V.replace("kGuardKeys", "false"), "asan"),
    Mutation("columns-not-guarded", "sm80/copy.h", "row_ok && columns.ok[panel]", "row_ok"),
    Mutation(
        "float-output-not-guarded",
        CUDA_EPILOGUE,
        "i < rows && x < params.attention.head_dim_v",
        "i < rows",
        "asan",
    ),
    Mutation(
        "bias-row-past-end",
        SCORE_MOD,
        "min(row0 + get<0>(coordinates(i, 0)), seqlen_q_ - 1)",
        "row0 + get<0>(coordinates(i, 0))",
        "asan",
    ),
    Mutation(
        "bias-column-past-end",
        SCORE_MOD,
        "min(col + word * kPerWord + j, seqlen_k_ - 1)",
        "col + word * kPerWord + j",
        "asan",
    ),
    Mutation(
        "bias-vector-past-end", SCORE_MOD, "kEdge || !bias_vectors_", "!bias_vectors_", "asan"
    ),
)

ARITHMETIC = (
    Mutation("quad-not-reduced", SOFTMAX, "x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));", ""),
    Mutation("output-not-rescaled", SOFTMAX, "out(i, col) *= rescale;", ""),
    Mutation("sum-not-rescaled", SOFTMAX, "sum *= rescale;", ""),
    Mutation("output-not-rescaled-lazily", SOFTMAX, LAZY_OUTPUT, "", unit=LAZY),
    Mutation("sum-not-rescaled-lazily", SOFTMAX, "sum_(kFirst + i) *= rescale(i);", "", unit=LAZY),
    Mutation("maxima-not-exchanged", SOFTMAX, "all_reduce_pair(maxima);", "", unit=SPLIT_KEYS),
    Mutation("sums-not-exchanged", SOFTMAX, "all_reduce_pair(sum_);", "", unit=SPLIT_KEYS),
    Mutation("nan-of-hidden-rows", SOFTMAX, NO_MAXIMUM, "max_(row)"),
    Mutation("sink-not-counted", SOFTMAX, "sink_term(sink, larger)", "0.0f"),
    Mutation("output-not-rescaled-for-sink", SOFTMAX, "return rescale;", "return 1.0f;"),
    Mutation("sign-of-scale-lost", QUERY_TILE, "(factor != 1.0f)", "false"),
    Mutation("tile-in-part-taken-whole", MAINLOOP, "Variant::kMasksTiles && !sees_all_", "false"),
    Mutation(
        "cleared-v-of-ranges-forgotten",
        VARIANTS,
        "return !see<kOps>(tile).all;",
        "return false;",
        after="struct RangesForward : PlainForward {",
    ),
    Mutation(
        "hidden-v-not-cleared",
        VARIANTS,
        "kScoreOps != ScoreOps::kAlibi && (score_mod.may_hide_anywhere() || ranges.active())",
        "false",
    ),
    Mutation(
        "restored-where-bias-hides",
        CUDA_EPILOGUE,
        "!mask.keep(row, key) || !variant.keep(row, key)",
        "!mask.keep(row, key)",
    ),
    Mutation("dropped-infinity-restored", CUDA_EPILOGUE, "variant.is_dropped(row, key)", "false"),
    Mutation("hidden-restored", RESTORE_NONFINITE, "of == TermWeight::kHidden", "false"),
    Mutation(
        "restored-of-another-sequence",
        CUDA_EPILOGUE,
        "work_tile.sequence.first_k * stride.row",
        "0",
    ),
    Mutation(
        "max-logits-of-rows-beyond",
        CUDA_EPILOGUE,
        "cute::get<0>(coordinates(row, 0)) < rows",
        "true",
    ),
    Mutation("order-of-negative-maxima", CUDA_EPILOGUE, "maximum >= 0.0f", "true"),
    Mutation(
        "softcap-of-half",
        SCORE_MOD,
        "2.0f * kLog2E * scale_ / softcap_",
        "kLog2E * scale_ / softcap_",
    ),
    Mutation("series-of-softcap", SCORE_MOD, "-1.0f / 3", "1.0f / 3"),
    Mutation("sign-of-alibi", SCORE_MOD, "s - fabsf(t)", "s + fabsf(t)"),
    Mutation("alibi-from-top-left", SCORE_MOD, "shift_ - col0", "0 - col0"),
    Mutation(
        "bias-leaks-nan",
        SCORE_MOD,
        "bias == -INFINITY ? -INFINITY : scores(i, col) + bias",
        "scores(i, col) + bias",
    ),
    Mutation("dropout-threshold", DROPOUT, "draw >= threshold_", "draw > threshold_"),
    Mutation(
        "dropout-of-heads",
        DROPOUT,
        "(p.part.batch_start + batch) * heads_of_whole(p)",
        "p.part.batch_start + batch",
    ),
    Mutation(
        "dropout-of-wrong-keys",
        APPLY_DROPOUT,
        "(places.col0 + get<1>(coordinates(row, run))) / 8",
        "(places.col0 + get<1>(coordinates(row, run))) / 16",
    ),
    Mutation("dropout-backwards", APPLY_DROPOUT, "draws[i]", "draws[7 - i]"),
    Mutation("dropout-of-upper-halves", DROPOUT, "word < threshold", "false"),
    Mutation("dropout-of-lower-halves", DROPOUT, "word << 16 < threshold", "word < threshold"),
    Mutation(
        "dropout-kernel-of-wrong-keys",
        DROPOUT_KERNEL,
        "places.col0 + get<1>(coordinates(0, run))",
        "places.col0",
    ),
    Mutation("dropout-of-other-keys-twice", VARIANTS, "4 * k", "0"),
    Mutation(
        "dropout-behind-a-window",
        MAINLOOP,
        "!Variant::kAsksPlaces && n_ >= 0",
        "n_ >= 0",
    ),
    Mutation("dropout-not-scaled", EPILOGUE, "variant.dropout_scale()", "1.0f"),
)

# Of results: the forward's and the backward's.
STORES = (
    Mutation("rows-written-past-end", PIECES, "if (row >= rows) continue;", ";", "asan"),
    Mutation("columns-written-past-end", PIECES, "if (column >= columns) continue;", ";", "asan"),
)
# The result over other keys.
PRIOR = (
    Mutation("prior-lse-not-joined", CUDA_EPILOGUE, "lse(row) = merge.lse();", ""),
    Mutation("prior-rows-past-end", CUDA_EPILOGUE, "if (i >= rows) continue;", ";", "asan"),
    Mutation("prior-columns-past-end", CUDA_EPILOGUE, "x < prior.columns", "true", "asan"),
    Mutation(
        "no-barrier-after-prior",
        EPILOGUE,
        "__syncthreads(); // warps that share",
        "",
        unit=SPLIT_KEYS,
    ),
)

FORWARD_MUTATIONS = SYNCHRONISATION + POSITIONS + BOUNDS + ARITHMETIC + STORES + PRIOR
