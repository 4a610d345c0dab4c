"""A ring's steps of several hops, and its last call, which writes 16-bit results itself: they are
what rounding the sums gives."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from anyflash._call.options import AttentionOptions, Part
from anyflash.bench._cases import Case

ranks_of_one_process: Any = importlib.import_module("anyflash.bench._ranks")
pieces: Any = importlib.import_module("anyflash.torch.distributed._pieces")
ring: Any = importlib.import_module("anyflash.torch.distributed._ring")
problem: Any = importlib.import_module("anyflash.torch.distributed._problem")
transport: Any = importlib.import_module("anyflash.torch.distributed._transport")
layouts: Any = importlib.import_module("anyflash.torch.distributed._layout")
arguments: Any = importlib.import_module("anyflash.torch.distributed._arguments")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_same_bits(
    torch: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: str, causal: bool, ranks: int
) -> None:
    written = []

    def finish(sums: Any, dtype: Any) -> Any:
        rows = None if sums._rounded is None else sums._rounded[1]
        written.append(rows)
        return finished(sums, dtype)

    finished = pieces.ForwardSums.finish
    monkeypatch.setattr(pieces.ForwardSums, "finish", finish)
    case = Case(
        *("forward", 1, ranks * 128, 4, 16, dtype),
        **{"heads_k": 2, "causal": causal, "method": "ring", "ranks": ranks, "transport": "alone"},
    )
    for rank in range(ranks):
        torch.manual_seed(rank)
        call = ranks_of_one_process._virtual_call(case, rank, torch.device("cpu"))
        out = call()
        assert out.dtype == getattr(torch, dtype)
        with monkeypatch.context() as without:
            without.setattr(ring.Ring, "_last_hop", lambda self: -1)
            assert torch.equal(out, call())
    rows, unrounded = written[::2], written[1::2]
    assert unrounded == [None] * ranks
    assert rows == _last_rows(ranks, causal)


def _last_rows(ranks: int, causal: bool) -> list[list[slice]]:
    """Of each rank, those that the last step's keys are seen by. Three or fewer ranks have steps of
    one hop, which brings the next rank's keys; of four, the last two hops are one step."""
    first, second, both = slice(0, 64), slice(64, 128), slice(0, 128)
    if not causal:
        return [[both]] * ranks
    # Behind a causal mask both chunks of rows see the first chunk of an earlier rank. Those of a
    # later rank are seen by the second one alone.
    if ranks == 4:
        return [[second], [second], [first, second], [both]]
    return [[second]] * (ranks - 1) + [[both]]


@pytest.mark.parametrize(
    ("heads_k", "steps"),
    [
        (2, [1, 2, 4]),
        (8, [1, 2, 3, 1]),  # 40 MiB a rank
        (32, [1] * 7),
    ],
)
def test_steps_double_up_to_their_bytes(torch: ModuleType, heads_k: int, steps: list[int]) -> None:
    ranks, rows = 8, 10240
    k = torch.empty(1, rows, heads_k, 128, dtype=torch.bfloat16, device="meta")
    whole = arguments.read_whole(AttentionOptions(causal=True), (ranks * rows, ranks * rows), False)
    for rank in range(ranks):
        group, layout = transport.Group(None, rank, ranks), layouts.Layout("zigzag", ranks, 64)
        of_rank = pieces.Pieces(
            whole, problem.Given(), None, Part(), (k, layout.runs(rank, ranks * rows))
        )
        assert ring.Ring(group, layout, of_rank, k, k).steps == steps


@pytest.mark.parametrize("alike", [True, False])
def test_packed_sequences_take_one_call_a_hop(torch: ModuleType, alike: bool) -> None:
    """Where the host does not know the lengths: of rows and keys that are packed alike. Otherwise
    one for each pair of chunks."""
    ranks, rows = 4, 128
    length = ranks * rows
    ends = torch.tensor([0, 100, 130, 400, length], dtype=torch.int32)
    packed = problem.Packed(ends, ends if alike else ends.clone(), 270, 270, None)
    whole = arguments.read_whole(AttentionOptions(causal=True), (length, length), False)
    layout = layouts.Layout("zigzag", ranks, 64)
    q = torch.empty(1, rows, 1, 8)
    for rank in range(ranks):
        of_rank = pieces.Pieces(
            whole, problem.Given(), packed, Part(), (q, layout.runs(rank, length))
        )
        group = transport.Group(None, rank, ranks)
        hops = ring.Ring(group, layout, of_rank, q, q)
        for hop in range(ranks):
            owner, wanted = hops.keys[group.peer(-hop)], hops.wanted[hop]
            runs = [run for run in owner if wanted.start <= run.at < wanted.stop]
            pairs = len(hops.rows[rank]) * len(runs)
            assert len(of_rank.of(runs)) == (1 if alike else pairs)


def test_dsinks_of_rows_without_keys(torch: ModuleType) -> None:
    """Their out is 0, and their dout may be anything."""
    rows = 4
    q = torch.ones(1, rows, 2, 8)
    whole = arguments.read_whole(AttentionOptions(causal=True), (rows, rows), False)
    sinks = torch.tensor([0.5, torch.inf])
    runs = layouts.Layout("zigzag", 1, 64).runs(0, rows)
    of_rank = pieces.Pieces(whole, problem.Given(sinks=sinks), None, Part(), (q, runs))
    out, dout = torch.ones_like(q), torch.ones_like(q)
    lse = torch.full((1, 2, rows), 1.5)
    out[:, 0], out[:, :, 1] = 0, 0
    dout[:, 0], lse[:, 0, 0], lse[:, 1] = torch.nan, 0.5, torch.inf
    found = pieces.BackwardSums(
        of_rank, pieces.Results(out, lse, dout, None), (False, True, False)
    ).dsinks
    torch.testing.assert_close(found, torch.tensor([-3 * 8 / torch.e, 0.0]), check_dtype=False)
