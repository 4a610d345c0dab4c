"""What test_mutations.py breaks in attention with a KV cache."""

from __future__ import annotations

from mutations import MASK, SOFTMAX, Mutation

# Units.
DECODE = "sm80_decode_f16_d64"
COMBINE = "combine"
APPEND = "append"
LATENT = "sm80_decode_f16_d576_512"
PREFILL = "sm80_prefill_f16_d128"  # with one buffer
PREFILL_2 = "sm80_prefill_f16_d64"  # with two

MAINLOOP = "sm80/decode/mainloop.h"
SCORES = "sm80/decode/scores.h"
EPILOGUE = "sm80/decode/epilogue.h"
KERNEL = "sm80/decode/kernel.h"
RESULTS = "cuda/decode_epilogue.h"
BLOCK = "cuda/decode_work_tile.h"
LOADER = "sm80/decode/loader.h"
DEQUANTIZE = "common/dequantize.h"
COMBINE_SOURCE = "cuda/combine.cu"
APPEND_SOURCE = "cuda/append.cu"
CACHE = "variant/cache.h"
CACHED_KEYS = "sm80/prefill/cached_keys.h"
PREFILL_KERNEL = "sm80/prefill/kernel.h"
PREFILL_BLOCK = "cuda/prefill_block.h"

WAIT = "cp_async_wait<kStages - 2>();"
SHORT_WAIT = "cp_async_wait<kStages - 1>();"
NO_WAIT = "cp_async_wait<kStages>();"
BEFORE_Q = "auto out_matrix = as_matrix(acc_o);"
BEFORE_TILE = "const bool partial = block.hides(first_key, first_key + kBlockN);"
CLEAR = (
    "if (partial && !Traits::kLatent) found_nonfinite |= loader.clear_values(smem.buffers, stage);"
)
RESTORE = "__syncthreads_or(found_nonfinite)"
WEIGHTS = "__syncthreads(); // their weights too"
SCALE = "scales[cute::get<1>(coordinates(0, col))]"
STORE_ROWS = "store_four(sums, result_row"
SCALES = "void load_scales("
ENTRY_EXISTS = "key(i) < end_"
ASKS_TABLE = "void prefetch_table(int tile) {"
ROW_BY_ROW = "const int64_t step = kRowStep * stride.row;"
KEEP_ROWS = "*reinterpret_cast<float4*>(&result.out[0][row][x]) ="
STORED_PARTS = "smem.result.lse[group][i] = lse(row);"


def of(unit: str, *mutations: Mutation) -> tuple[Mutation, ...]:
    return tuple(mutation._replace(unit=unit) for mutation in mutations)


IN_KERNEL = of(
    DECODE,
    Mutation("no-barrier-for-decode-block", KERNEL, "__syncthreads(); // the block is known"),
    Mutation("no-barrier-for-queries", MAINLOOP, "__syncthreads(); // Q is there"),
    Mutation("no-barrier-for-cached-tile", MAINLOOP, "__syncthreads(); // tile n is there"),
    Mutation("short-wait-for-queries", MAINLOOP, SHORT_WAIT, NO_WAIT, after=BEFORE_Q),
    Mutation("short-wait-for-cached-tile", MAINLOOP, WAIT, SHORT_WAIT, after=BEFORE_TILE),
    Mutation("buffer-in-use", MAINLOOP, "stage == 0 ? kStages - 1 : stage - 1", "stage"),
    Mutation(
        "places-of-tile-before",
        MAINLOOP,
        "loader.prefetch_table(n + kStages);",
        "loader.prefetch_table(n + kStages - 1);",
    ),
    Mutation(
        "no-barrier-before-parts", EPILOGUE, "__syncthreads(); // every warp has done with the buf"
    ),
    Mutation("no-barrier-for-parts", EPILOGUE, "__syncthreads(); // all parts are there"),
    Mutation("no-barrier-for-weights-of-parts", EPILOGUE, WEIGHTS, after=STORED_PARTS),
    Mutation("no-barrier-before-restoring-cached", EPILOGUE, RESTORE, "true", after=STORE_ROWS),
    Mutation(
        "restored-by-some-threads",
        EPILOGUE,
        RESTORE,
        "(__syncthreads(), found_nonfinite)",
        after=STORE_ROWS,
    ),
    Mutation(
        "values-not-restored",
        EPILOGUE,
        RESTORE,
        "(__syncthreads_or(found_nonfinite), 0)",
        after=STORE_ROWS,
    ),
    Mutation(
        "values-restored-to-tree",
        EPILOGUE,
        "tree.keep(block.query(row), key)",
        "true",
    ),
    Mutation("values-not-cleared", MAINLOOP, CLEAR),
    Mutation("key-before-window", SCORES, "key < rows.seen[row].begin", "false"),
    Mutation("key-after-window", SCORES, "key >= rows.seen[row].end", "key > rows.seen[row].end"),
    Mutation("key-not-in-tree", SCORES, "!tree.keep(rows.query[row], key)", "false"),
    Mutation(
        "tree-in-whole-tile", BLOCK, "min(block.shown.end, tree.first_key())", "block.shown.end"
    ),
    Mutation("window-in-whole-tile", BLOCK, "mask.first_key(last)", "mask.first_key(first)"),
    Mutation("head-of-tile-row", BLOCK, "by_group.rem(first_row + row)", "by_group.rem(row)"),
    Mutation("row-beyond-last", BLOCK, "if (row >= rows) return {0, 0};", sanitizer="asan"),
    Mutation("key-beyond-last", LOADER, ENTRY_EXISTS, "key(i) <= end_", "asan", after=ASKS_TABLE),
    Mutation("row-of-no-key", LOADER, ENTRY_EXISTS, "true", "asan", after=ROW_BY_ROW),
    Mutation("key-of-sequence-beyond-last", MASK, "clamp(row + last_ + 1)", "clamp(row + last_)"),
    Mutation("unit-not-kept", SCORES, "units.set(powers);"),
    Mutation("unit-of-other-row", SCORES, "unit / powers[row]", "units.of_row(0) / powers[row]"),
    Mutation("unit-of-other-row-at-end", SOFTMAX, "factors[row]", "factors[0]"),
    Mutation("unit-not-applied", SCORES, SCALE + " * inverse", SCALE),
    Mutation(
        "hidden-scale-as-unit", SCORES, "probabilities(row, col) != 0.0f ? scale : 0.0f", "scale"
    ),
    Mutation(
        "hidden-scale-counts", SCORES, "p = p == 0.0f ? 0.0f : p * factor;", "p = p * factor;"
    ),
    Mutation(
        "scale-of-first-page", LOADER, "offset_in_pages(stride, i)", "int64_t{0}", after=SCALES
    ),
    Mutation("scale-of-first-slot", LOADER, "sequence_.slot * stride.batch", "int64_t{0}"),
    Mutation(
        "scale-of-first-row", LOADER, "(sequence_.first_row + key(i)) * stride.row", "int64_t{0}"
    ),
    Mutation("scale-of-head-forgotten", SCORES, "factor_[row] = of_k;", "factor_[row] = 1.0f;"),
    Mutation("nan-of-e4m3-missed", DEQUANTIZE, "pair | e5m2_pair<kA, kB>(nonfinite) >> 2", "pair"),
    Mutation("infinity-of-float8-missed", DEQUANTIZE, "0x04040404", "0x01010101"),
    Mutation("page-mask-too-wide", LOADER, "params_.page_mask", "(2 * params_.page_mask + 1)"),
    Mutation(
        "padding-not-in-page",
        LOADER,
        "static_cast<unsigned>(row_of(i))",
        "static_cast<unsigned>(key(i))",
    ),
    Mutation("padding-not-in-row", LOADER, "row_of(0)", "key(0)"),
    Mutation("padding-not-in-table", CACHE, "(s.first_row + key)", "(key)"),
    Mutation("page-that-does-not-exist", LOADER, "is_page(i) ? columns : 0", "columns"),
    Mutation(
        "split-begins-late",
        CACHE,
        "(first_block + split * each)",
        "(first_block + split * each + (split > 0))",
    ),
    Mutation("split-size-ignored", CACHE, "int64_t{split} * p.split_size", "int64_t{split} * 64"),
)

IN_CLUSTER = of(
    DECODE,
    Mutation("no-cluster-barrier-for-parts", KERNEL, "cluster_sync(); // all splits are in"),
    Mutation("no-cluster-barrier-at-end", KERNEL, "cluster_sync(); // no CTA reads this"),
    Mutation(
        "empty-split-is-not-said",
        EPILOGUE,
        "result.split_lse[row] = -INFINITY",
        "result.split_lse[row]",
    ),
    Mutation("empty-split-counts", EPILOGUE, "lses[s] != -INFINITY", "true"),
    Mutation(
        "sink-of-split",
        EPILOGUE,
        "params.splits_in_cluster ? -INFINITY : row_sink(params, block, row)",
        "row_sink(params, block, row)",
    ),
    Mutation("part-of-own-split", EPILOGUE, "*in_cta(part, s)", "*part"),
    Mutation(
        "lse-of-own-split",
        EPILOGUE,
        "*in_cta(&result.split_lse[row], s)",
        "result.split_lse[row]",
    ),
    Mutation(
        "no-barrier-before-restoring-kept", EPILOGUE, RESTORE, "true", "tsan", after=KEEP_ROWS
    ),
    Mutation(
        "kept-values-not-restored",
        EPILOGUE,
        RESTORE,
        "(__syncthreads_or(found_nonfinite), 0)",
        after=KEEP_ROWS,
    ),
)

IN_COMBINE = of(
    COMBINE,
    Mutation(
        "no-barrier-before-reduction",
        COMBINE_SOURCE,
        "sync(); // every warp has done with what",
    ),
    Mutation("no-barrier-in-reduction", COMBINE_SOURCE, "sync(); // all warps' numbers"),
    Mutation(
        "no-barrier-before-weights",
        COMBINE_SOURCE,
        "sync(); // every warp has done with the w",
    ),
    Mutation("no-barrier-for-weights", COMBINE_SOURCE, "sync(); // the weights are there"),
    Mutation("no-barrier-for-sums", COMBINE_SOURCE, "sync(); // every warp's sums are"),
    Mutation("empty-splits-count", COMBINE_SOURCE, "part != -INFINITY", "true"),
    Mutation("sink-not-in-combined-sum", COMBINE_SOURCE, "sink_term(sink, reference)", "0.0f"),
)

IN_APPEND = of(
    APPEND,
    Mutation(
        "appended-a-row-early",
        APPEND_SOURCE,
        "place_of(c_, sequence, sequence.keys_before + at.row)",
        "place_of(c_, sequence, sequence.keys_before + max(at.row - 1, 0))",
    ),
    Mutation("queries-at-one-position", APPEND_SOURCE, "p_.rotary_steps ? at.row : 0", "0"),
    Mutation("queries-step-always", APPEND_SOURCE, "p_.rotary_steps ? at.row : 0", "at.row"),
    Mutation("rotation-by-number-of-keys", CACHE, "p.rotary_seqlens == nullptr", "true"),
    Mutation("rotation-of-first-sequence", CACHE, "p.rotary_seqlens[index]", "*p.rotary_seqlens"),
    Mutation("pairs-of-halves", APPEND_SOURCE, "at.col % 2 != 0", "at.col >= half"),
    Mutation("appended-scale-of-first-slot", CACHE, "place.slot * scale.stride.batch", "0"),
    Mutation("appended-scale-of-first-row", CACHE, "place.row * scale.stride.row", "0"),
    Mutation(
        "padding-not-in-appended-row",
        CACHE,
        "s.first_row + key",
        "key",
        after="CacheSlot place_of_entry(",
    ),
)

IN_LATENT = tuple(
    Mutation(f"decode-latent-{name}", MAINLOOP, old, new, sanitizer, unit=LATENT)
    for name, old, new, sanitizer in (
        (
            "no-barrier-before-clearing",
            "__syncthreads(); // every warp has done with the tile as",
            "",
            "tsan",
        ),
        ("no-barrier-after-clearing", "__syncthreads(); // its values are without NaN", "", ""),
        ("keeps-nan", "partial && Traits::kLatent", "false", ""),
        ("clears-keys", "partial && !Traits::kLatent", "partial", ""),
        ("columns-of-first-warp", "Traits::column_warp() * kColumns", "0", ""),
    )
)

FIRST_ROWS = "__syncthreads(); // the tile's rows are known"
IN_PREFILL = tuple(
    Mutation(f"prefill-{name}", header, old, new, sanitizer, unit=unit)
    for name, header, old, new, sanitizer, unit in (
        ("no-barrier-for-first-rows", CACHED_KEYS, FIRST_ROWS, "", "", PREFILL),
        ("no-barrier-for-keys", CACHED_KEYS, "__syncthreads(); // K_n is there", "", "", PREFILL),
        ("no-barrier-for-rows", CACHED_KEYS, "__syncthreads(); // the next rows", "", "", PREFILL),
        (
            "rows-of-tile-before",
            CACHED_KEYS,
            "find_rows(kBlockN);",
            "",
            "",
            PREFILL,
        ),
        (
            "no-sequence-for-block",
            PREFILL_KERNEL,
            "__syncthreads(); // where the",
            "",
            "tsan",
            PREFILL,
        ),
        (
            "split-on-old-diagonal",
            PREFILL_BLOCK,
            "work_tile.sequence.shift -= keys.begin;",
            "",
            "",
            PREFILL,
        ),
        (
            "split-of-first-keys",
            PREFILL_BLOCK,
            "sequence.first_row += keys.begin;",
            "",
            "",
            PREFILL,
        ),
        ("no-barrier-for-two-rows", CACHED_KEYS, "__syncthreads(); // the next", "", "", PREFILL_2),
        ("no-barrier-for-two", CACHED_KEYS, "__syncthreads(); // K_n is there", "", "", PREFILL_2),
        ("buffer-in-use", CACHED_KEYS, "k_loader_.advance(to_other_);", "", "", PREFILL_2),
    )
)

IN_PREFILL += of(
    PREFILL,
    Mutation(
        "prefill-holes-read", CACHED_KEYS, "place.slot < 0", "false", after="const auto find ="
    ),
)

DECODE_MUTATIONS = IN_KERNEL + IN_CLUSTER + IN_COMBINE + IN_APPEND + IN_LATENT + IN_PREFILL
