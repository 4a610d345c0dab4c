"""What test_mutations.py breaks in the backward with ping-pong."""

from __future__ import annotations

from mutations import Mutation

MAINLOOP = "sm80/backward/mainloop_pingpong.h"
PINGPONG = "sm80/backward/pingpong.h"
SUMS = "sm80/backward/accumulate.h"

AWAIT_BUFFER = "if (tiles.valid() && shared) barriers_.used[1 - group_].wait(peer_parity());"
RACES = (
    Mutation("no-barrier-for-k", MAINLOOP, "__syncthreads(); // K and V are there"),
    Mutation("no-barrier-of-group", PINGPONG, "named_barrier_sync(group_, Traits::kRowThreads);"),
    Mutation("no-wait-for-turn", PINGPONG, "if (has_peer()) await_peer_scores();"),
    Mutation("no-wait-for-p", PINGPONG, "barriers_.used[group_].wait(parity_ ^ 1);"),
    Mutation("no-wait-for-scores", PINGPONG, "barriers_.scores[group_].wait(parity_);"),
    Mutation("no-wait-for-buffer", PINGPONG, AWAIT_BUFFER),
)
RESULTS = (
    Mutation("wrong-phase-before", PINGPONG, "parity_ ^ group_ ^ 1", "parity_ ^ group_"),
    Mutation("wrong-buffer", PINGPONG, "buffer_ == 0 ? 2 : buffer_ - 1", "(buffer_ + 1) % 3"),
    Mutation("unseen-tile-before", PINGPONG, "tiles.on_diagonal() && group_ == 1", "false"),
    Mutation("unseen-tile", MAINLOOP, "!kDiagonal || group == 0", "true"),
    Mutation("no-last-tile-before", MAINLOOP, "!schedule.has_peer()", "true"),
    Mutation("hidden-k-not-zero", SUMS, "is_finite(x)", "true"),
)

PINGPONG_MUTATIONS = (*(race._replace(sanitizer="tsan") for race in RACES), *RESULTS)
