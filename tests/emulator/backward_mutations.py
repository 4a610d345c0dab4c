"""What test_mutations.py breaks in the backward."""

from __future__ import annotations

from mutations import BACKWARD, DROPOUT, MASK, ONE_BUFFER, RELOADED_V, ROWS, SCORE_MOD, Mutation
from pingpong_mutations import PINGPONG, PINGPONG_MUTATIONS

MAINLOOP = "sm80/backward/mainloop.h"
VISITS = "cuda/query_tile_iterator.h"
KERNEL = "sm80/backward/kernel.h"
PARTS = "sm80/backward/gqa_partials.h"
EPILOGUE = "sm80/backward/epilogue.h"
SCORES = "variant/backward_variants.h"
SCORED = "variant/backward_single_feature.h"
ROW_PASS = "sm80/backward/deterministic_dq.h"
ROW_TILE = "sm80/backward/score_gradient_tile.h"
ROWS_SOURCE = "cuda/backward_preprocess.cu"

CLEAR_DO = "if (clear_nonfinite(tOsDO)) atomicMax(&smem.nonfinite_dout, 1);"
READ_K = "thread_k.partition_D(by_key(sK))"
LOAD_K = (
    "load_tile<true>(load_k, thread_k.partition_S(gK), tKsK, tKcK, columns,"
    " sequence.seqlen_k - block.first_key);"
)
LOAD_V = (
    "load_tile<true>(load_v, thread_v.partition_S(gV), tVsV, tVcV, columns,"
    " sequence.seqlen_k - block.first_key);"
)
LOAD_Q = "load_tile<true>(load_q, thread_q.partition_S(gQ), tQsQ, tQcQ, columns, rows);"
LOAD_DO = "load_tile<true>(load_do, thread_do.partition_S(gDO), tOsDO, tOcDO, columns_v, rows);"
LOAD_X = "load_tile<true>(typename Tile::Load{}, thread.partition_S(gX), tXsX, tXcX, guard, rows);"
BEGIN_STEP = "const int row0 = tiles.row();"
END_PASS = "__syncthreads(); // every warp has done with K and V"
HIDE = "kMasked && seen.hides(j) ? kHiddenP : p"
END_MAINLOOP = "backward_mainloop<Traits, Scores>(params, block, smem, acc_dk, acc_dv);"

SYNCHRONISATION = (
    Mutation("no-barrier-for-tile", PINGPONG, "__syncthreads();"),
    Mutation("no-barrier-for-p", MAINLOOP, "__syncthreads(); // P and dS are there"),
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
    Mutation("no-flip-of-loads", MAINLOOP, "tQsQ.data() = tQsQ.data() + other_q;"),
    Mutation("no-flip-of-scores", MAINLOOP, "q.advance(other_q);"),
    Mutation("no-flip-of-products", MAINLOOP, "dout_t.advance(other_do);"),
    Mutation("flip-in-one-direction", MAINLOOP, "buffer ^= 1;"),
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
        ROW_PASS,
        "__syncthreads(); // every warp has done with the tiles before",
    ),
    Mutation("no-barrier-for-dbias-tiles", ROW_PASS, "__syncthreads(); // the tiles are there"),
    Mutation(
        "no-barrier-before-dbias-sums",
        ROW_PASS,
        "__syncthreads(); // every warp has done with the tiles",
        after="// Through shared memory",
    ),
    Mutation("no-barrier-for-dbias-sums", ROW_PASS, "__syncthreads(); // all sums are there"),
    Mutation(
        "no-barrier-before-clearing-keys",
        ROW_TILE,
        "__syncthreads_or(!all_finite(tKsK)) == 0",
        "false",
        "tsan",
    ),
    Mutation("no-barrier-for-cleared-keys", ROW_TILE, "__syncthreads(); // K without NaN"),
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
    Mutation("left-mask-forgotten", MASK, "tile < full || tile >= masked", "tile >= masked"),
    Mutation("right-mask-forgotten", MASK, "tile < full || tile >= masked", "tile < full"),
    Mutation(
        "one-row-tile-too-few",
        MASK,
        "ceil_div(static_cast<int>(end), block_m)",
        "static_cast<int>(end) / block_m",
    ),
    Mutation("head-of-larger-part-forgotten", VISITS, "block.gqa_split < larger ? 1 : 0", "0"),
    Mutation("first-heads-in-all-parts", VISITS, "block.gqa_split * each", "0"),
    Mutation(
        "hidden-block-visited",
        VISITS,
        "!BlockMask(params_, block_.batch, head_).keep(row(), block_.first_key)",
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
        EPILOGUE,
        "sequence.all_keys - block.first_key",
        "sequence.seqlen_k - block.first_key",
    ),
    Mutation(
        "gradient-of-another-sequence",
        EPILOGUE,
        "sequence.first_k + block.first_key",
        "block.first_key",
    ),
    Mutation("dq-of-another-sequence", ROW_PASS, "sequence.first_q + row0", "row0"),
    Mutation("order-of-k", MAINLOOP, READ_K, "thread_k.partition_D(sK)", alone=True),
    Mutation(
        "order-of-gradient",
        EPILOGUE,
        "composition(sX.layout(), make_tile(Order{}, _))",
        "sX.layout()",
        alone=True,
    ),
)

BOUNDS = (
    Mutation("q-read-past-end", MAINLOOP, LOAD_Q, LOAD_Q.replace("true", "false"), "asan"),
    Mutation("dout-read-past-end", MAINLOOP, LOAD_DO, LOAD_DO.replace("true", "false"), "asan"),
    Mutation("k-read-past-end", MAINLOOP, LOAD_K, LOAD_K.replace("true", "false"), "asan"),
    Mutation("v-read-past-end", MAINLOOP, LOAD_V, LOAD_V.replace("true", "false"), "asan"),
    Mutation("tile-read-past-end", ROW_TILE, LOAD_X, LOAD_X.replace("true", "false"), "asan"),
    Mutation(
        "float-gradient-past-end",
        EPILOGUE,
        "row < target.rows && col < target.columns",
        "col < target.columns",
        "asan",
    ),
    Mutation(
        "float-gradient-columns",
        EPILOGUE,
        "row < target.rows && col < target.columns",
        "row < target.rows",
        "asan",
    ),
    Mutation("dbias-past-end", ROW_PASS, "(!one_row && row >= params.dbias_rows)", "false", "asan"),
)

ARITHMETIC = (
    Mutation("hidden-q-not-cleared", MAINLOOP, "clear_nonfinite(tQsQ);"),
    Mutation("hidden-dout-not-cleared", MAINLOOP, CLEAR_DO),
    Mutation("cleared-dout-forgotten", MAINLOOP, CLEAR_DO, "clear_nonfinite(tOsDO);"),
    Mutation("nan-in-k-not-seen", MAINLOOP, "!all_finite(tKsK)", "false"),
    Mutation("hidden-k-not-cleared", MAINLOOP, "kMasked && smem.nonfinite_keys != 0", "false"),
    Mutation(
        "hidden-k-not-cleared-in-pass",
        ROW_PASS,
        "range.needs_mask(n) || variant.may_hide_anywhere()",
        "false",
    ),
    Mutation(
        "restored-where-mask-hides",
        EPILOGUE,
        "!mask.keep(row, key) || !variant.keep(row, key)",
        "!variant.keep(row, key)",
    ),
    Mutation(
        "restored-where-bias-hides",
        EPILOGUE,
        "!mask.keep(row, key) || !variant.keep(row, key)",
        "!mask.keep(row, key)",
    ),
    Mutation("dropped-infinity-restored", EPILOGUE, "variant.is_dropped(row, key)", "false"),
    Mutation("nan-of-hidden-dp", SCORES, "kMasked && is_hidden(p(i))", "false"),
    Mutation("hidden-p-like-others", SCORES, "__float_as_uint(p) == 0x80000000u", "false"),
    Mutation("mask-of-first-part", MAINLOOP, "block.first_key + kKey", "block.first_key"),
    Mutation("edge-everywhere", VISITS, "edge_ && m_ == range_.begin", "m_ == range_.begin"),
    Mutation("edge-in-all-tiles", VISITS, "edge_ && m_ == range_.begin", "edge_"),
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
        "slope-of-alibi",
        SCORE_MOD,
        "-fabsf(static_cast<float>(row - seqlen_q_ + (seqlen_k_ - col)))",
        "static_cast<float>(row - seqlen_q_ + (seqlen_k_ - col))",
    ),
    Mutation("delta-forgotten", SCORES, "dp(row, col) - stats(row).delta", "dp(row, col)"),
    Mutation("delta-of-another-row", SCORES, "-stats(2 * m + i / 2).delta", "-stats(2 * m).delta"),
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
        "return dropout_scale(params.dropout_threshold);",
        "return 1.0f;",
    ),
    Mutation(
        "parts-overwritten", PARTS, "first_part<Traits>(params, block) + block.gqa_split", "0"
    ),
    Mutation(
        "last-part-forgotten",
        PARTS,
        "part < first + params.gqa_splits",
        "part < first + params.gqa_splits - 1",
    ),
    Mutation("nan-of-parts", PARTS, "nonfinite_dout |= params.gqa_nonfinite_dout[part];"),
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
        ROW_PASS,
        "broadcast ? Span{0, count} : Span{index, index + 1}",
        "Span{index, index + 1}",
    ),
)

# Of the kernels with one feature.
ONE_FEATURE = (
    Mutation(
        "tile-on-diagonal-as-beside-it",
        SCORED,
        "diagonal > -kBlockM && diagonal < kBlockN",
        "false",
    ),
    Mutation(
        "first-tile-above-diagonal-as-below",
        SCORED,
        "diagonal > -kBlockM && diagonal < kBlockN",
        "diagonal > 0 && diagonal < kBlockN",
    ),
    Mutation("side-of-diagonal", SCORED, "tile.row0 + shift_ > tile.col0", "true"),
    Mutation("distance-of-another-row", SCORED, "diagonal + row_offset", "diagonal"),
    Mutation("alibi-mask-forgotten", SCORED, HIDE, "p"),
    Mutation(
        "slope-of-alibi-kernel",
        SCORED,
        "-fabsf(static_cast<float>(row + shift_ - col))",
        "static_cast<float>(row + shift_ - col)",
    ),
    Mutation("column-forgotten-by-alibi", SCORED, "at_first + offset * slope", "at_first"),
    Mutation("p-not-4-times", SCORED, "kLog2Of4 - stats(row).lse", "-stats(row).lse"),
    Mutation(
        "draws-of-another-run", SCORED, "tile.col0 + get<1>(coordinates(0, run))", "tile.col0"
    ),
    Mutation(
        "dropout-not-scaled-in-ds",
        SCORED,
        "return dropout_scale(params.dropout_threshold);",
        "return 1.0f;",
        after="static float ds_factor(",
    ),
    Mutation(
        "dropout-kernel-not-scaled-in-dv",
        SCORED,
        "return dropout_scale(params.dropout_threshold);",
        "return 1.0f;",
        after="static float p_scale(const BackwardScratch& params)",
    ),
    Mutation("slope-of-softcap-kernel", SCORED, "t - t * t", "t"),
    Mutation("capped-p-not-scaled", SCORED, "return 0.25f;", "return 1.0f;"),
    Mutation("hidden-p-of-softcap", SCORED, "hidden ? kHiddenP : exp2f(p)", "exp2f(p)"),
    Mutation(
        "nan-of-hidden-softcap", SCORED, "hidden ? kHiddenP : both[k] * slope", "both[k] * slope"
    ),
    Mutation(
        "dropped-p-stored", SCORED, "round_positive<Element>(p)", "round_fragment<Element>(p)"
    ),
    Mutation("dropped-p-not-marked", SCORED, "dropout_.keep(draws[row], i) ? p : -p", "p"),
    Mutation("draws-of-upper-halves", DROPOUT, "i % 2 == 0 ? word << 16 : word", "word"),
    Mutation("dropout-delta-not-scaled", SCORED, "init.data()[i] *= kept_;"),
    Mutation("dropped-delta-not-scaled", SCORED, "stats(row).delta * kept_", "stats(row).delta"),
    Mutation("nan-of-hidden-dropout", SCORED, "kMasked && p(row, col) == 0.0f ? 0.0f : ds", "ds"),
    Mutation(
        "dropped-infinity-of-dropout",
        SCORED,
        "!dropout_.keep(dropout_.draws(row, col / 8)[col % 8])",
        "false",
    ),
)

OF_ROWS = (
    Mutation(
        "rows-beyond-not-prepared",
        ROWS_SOURCE,
        "p.lse_delta[padded + r] = stats;",
        "if (exists) p.lse_delta[padded + r] = stats;",
    ),
    Mutation("rows-beyond-with-lse", ROWS_SOURCE, "INFINITY", "0.0f", after="LseDelta stats{"),
    Mutation("keyless-lse-kept", ROWS_SOURCE, "fabsf(lse) != INFINITY", "true"),
    Mutation("dlse-forgotten", ROWS_SOURCE, "p.dlse == nullptr", "true"),
    Mutation("delta-of-unrounded-dout", ROWS_SOURCE, "dout[i] = to_float(rounded.x[i]);"),
    Mutation(
        "slope-of-the-first-head",
        ROWS_SOURCE,
        "batch * stride.batch + head * stride.head",
        "batch * stride.batch",
        after="p.slopes_log2[pair] =",
    ),
    Mutation("dq-sum-not-zero", ROWS_SOURCE, "sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};"),
    Mutation(
        "slopes-of-one-batch", ROWS_SOURCE, "p.dalibi_slopes.stride.batch == 0 ? p.batch : 1", "1"
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
    Mutation("no-barrier-for-only-tile", PINGPONG, "__syncthreads();"),
    Mutation("no-wait-for-only-tile", MAINLOOP, "cp_async_wait<0>();", after=BEGIN_STEP),
)

V_THERE = "cp_async_wait<0>(); __syncthreads(); // V is there"
RELOADED_V_MUTATIONS = (
    Mutation("no-barrier-for-v", MAINLOOP, V_THERE, "cp_async_wait<0>();"),
    Mutation("no-wait-for-v", MAINLOOP, V_THERE, "__syncthreads();"),
    Mutation("no-barrier-before-p", MAINLOOP, "__syncthreads(); // every warp has done with V"),
)

BACKWARD_MUTATIONS = (
    *_of_unit(BACKWARD, SYNCHRONISATION + POSITIONS + BOUNDS + ARITHMETIC + ONE_FEATURE),
    *_of_unit(ONE_BUFFER, ONE_BUFFER_MUTATIONS),
    *_of_unit(ONE_BUFFER, PINGPONG_MUTATIONS),
    *_of_unit(RELOADED_V, RELOADED_V_MUTATIONS),
    *_of_unit(ROWS, OF_ROWS),
)
