"""What test_mutations.py breaks in the backward's kernels for one feature."""

from __future__ import annotations

from mutations import DROPOUT, Mutation

SCORED = "variant/backward_single_feature.h"

HIDE = "kMasked && seen.hides(j) ? kHiddenP : p"

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
    Mutation("p-not-4-times", SCORED, "kLog2Of4 - lse", "-lse"),
    Mutation(
        "draws-of-another-run", SCORED, "tile.col0 + get<1>(coordinates(0, run))", "tile.col0"
    ),
    Mutation(
        "dropout-not-scaled-in-ds",
        SCORED,
        "return dropout_scale(params.attention.dropout_threshold);",
        "return 1.0f;",
        after="static float ds_factor(",
    ),
    Mutation(
        "dropout-kernel-not-scaled-in-dv",
        SCORED,
        "return dropout_scale(params.attention.dropout_threshold);",
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
    Mutation(
        "dropped-delta-not-scaled",
        SCORED,
        "lse_and_delta(row).delta * kept_",
        "lse_and_delta(row).delta",
    ),
    Mutation("nan-of-hidden-dropout", SCORED, "kMasked && p(row, col) == 0.0f ? 0.0f : ds", "ds"),
    Mutation(
        "dropped-infinity-of-dropout",
        SCORED,
        "!dropout_.keep(dropout_.draws(row, col / 8)[col % 8])",
        "false",
    ),
)
