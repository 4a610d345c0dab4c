"""What test_mutations.py breaks in the backward where groups of warps take turns."""

from __future__ import annotations

from mutations import Mutation

MAINLOOP = "sm80/backward/mainloop.h"
TURNS = "sm80/backward/pingpong.h"
SUMS = "sm80/backward/accumulate.h"

AWAIT_BUFFER = "if (tiles.valid() && shared) barriers_.used[1 - group_].wait(parity_before());"
RACES = (
    Mutation("no-barrier-for-k", MAINLOOP, "__syncthreads(); // K and V are there"),
    Mutation("no-barrier-of-group", TURNS, "sync_some(group_, Traits::kRowThreads);"),
    Mutation("no-wait-for-turn", TURNS, "if (with_before()) await_scores_before();"),
    Mutation("no-wait-for-p", TURNS, "barriers_.used[group_].wait(parity_ ^ 1);"),
    Mutation("no-wait-for-scores", TURNS, "barriers_.scores[group_].wait(parity_);"),
    Mutation("no-wait-for-buffer", TURNS, AWAIT_BUFFER),
)
RESULTS = (
    Mutation("wrong-phase-before", TURNS, "parity_ ^ group_ ^ 1", "parity_ ^ group_"),
    Mutation("wrong-buffer", TURNS, "buffer_ == 0 ? 2 : buffer_ - 1", "(buffer_ + 1) % 3"),
    Mutation("unseen-tile-before", TURNS, "tiles.on_edge() && group_ == 1", "false"),
    Mutation("unseen-tile", MAINLOOP, "!kEdge || group == 0", "true"),
    Mutation("no-last-tile-before", MAINLOOP, "!turns.with_before()", "true"),
    Mutation("hidden-k-not-zero", SUMS, "is_finite(x)", "true"),
)

TURNS_MUTATIONS = (*(race._replace(sanitizer="tsan") for race in RACES), *RESULTS)
