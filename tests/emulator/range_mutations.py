"""Mutations of key ranges."""

from __future__ import annotations

from mutations import FORWARD, Mutation

KEY_RANGES = "variant/key_ranges.h"
APPLY_KEY_RANGES = "variant/apply_key_ranges.h"
RANGE_BOUNDS = "variant/key_range_bounds.h"
RANGE_BOUNDS_SOURCE = "cuda/key_range_bounds.cu"
RANGE_BOUNDS_UNIT = "key_range_bounds"

# Of the forward and of the backward.
RANGES = (
    Mutation(
        "range-begins-late",
        KEY_RANGES,
        "(begin <= place && place < end)",
        "begin < place && place < end",
    ),
    Mutation(
        "range-ends-late",
        KEY_RANGES,
        "(begin <= place && place < end)",
        "begin <= place && place <= end",
    ),
    Mutation("second-range", KEY_RANGES, "(second_begin <= place && place < second_end)", "false"),
    Mutation(
        "ranges-not-applied",
        APPLY_KEY_RANGES,
        "!seen.has(places[row])",
        "false",
    ),
    Mutation(
        "tile-skipped-for-its-first-row",
        RANGE_BOUNDS,
        "first < largest_end",
        "first + 1 < largest_end",
    ),
    Mutation(
        "tile-skipped-for-its-last-row", RANGE_BOUNDS, "least_begin <= last", "least_begin < last"
    ),
    Mutation(
        "tile-skipped-for-second-range",
        RANGE_BOUNDS,
        "first.meet(rows.first, rows.last) || second.meet(rows.first, rows.last)",
        "first.meet(rows.first, rows.last)",
    ),
    Mutation(
        "all-seen-but-by-the-first-row",
        RANGE_BOUNDS,
        "largest_begin <= first",
        "largest_begin <= first + 1",
    ),
    Mutation("all-seen-but-by-the-last-row", RANGE_BOUNDS, "last < least_end", "last <= least_end"),
    Mutation("ranges-of-another-head", KEY_RANGES, "head_k * p.key_ranges.stride.head", "0"),
    Mutation(
        "ranges-of-another-sequence", KEY_RANGES, "sequence.first_k * p.key_ranges.stride.row", "0"
    ),
    Mutation("range-past-end", KEY_RANGES, "(key < keys_ ? key : keys_ - 1)", "key", "asan"),
)

# Of what is made of them before, for both.
OF_RANGE_BOUNDS = (
    Mutation("bounds-of-another-head", RANGE_BOUNDS, "(heads_ == 1 ? 0 : head_k)", "0"),
    Mutation(
        "bounds-of-another-sequence",
        RANGE_BOUNDS,
        "sequence.first_k / kKeys + index",
        "sequence.first_k / kKeys",
    ),
    Mutation("keys-without-rows-left-out", RANGE_BOUNDS, "largest_begin = INT_MAX;", ""),
    Mutation("bounds-of-a-lane", RANGE_BOUNDS_SOURCE, "add_over_warp(first);", ""),
    Mutation("bounds-of-some-keys", RANGE_BOUNDS_SOURCE, "key += 32", "key += 64"),
    Mutation(
        "bounds-of-one-interval",
        RANGE_BOUNDS_SOURCE,
        "if (p.key_intervals == 2) target[1] = second;",
        "",
    ),
)

RANGE_MUTATIONS = (
    *(m._replace(name=f"forward-{m.name}", unit=FORWARD) for m in RANGES),
    *(m._replace(unit=RANGE_BOUNDS_UNIT) for m in OF_RANGE_BOUNDS),
)
