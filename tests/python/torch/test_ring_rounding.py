"""The ring's last call writes 16-bit results itself: they are what rounding the sums gives."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from anyflash.bench._cases import Case

ranks_of_one_process: Any = importlib.import_module("anyflash.bench._ranks")
pieces: Any = importlib.import_module("anyflash.torch.distributed._pieces")
ring: Any = importlib.import_module("anyflash.torch.distributed._ring")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
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
    # The last hop brings the next rank's keys. Behind a causal mask only late rows see those, but
    # the first rank's are the next of the last.
    some = slice(64, 128) if causal else slice(0, 128)
    assert rows == [some] * (ranks - 1) + [slice(0, 128)]
