"""Which gradients have the same bits in whatever order blocks, warps and lanes run."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated_driver import Case, backward, run

# At least three blocks of keys see a row: two sums are the same in either order.
CASES = backward(
    Case(seqlen_q=150, seqlen_k=400, more="dlse=1"),
    Case(seqlen_q=200, seqlen_k=290, more="left=150 right=100 alibi=0.05 sink=1"),
    Case(seqlen_q=30, seqlen_k=400, heads=9, more="dlse=1"),  # three parts of a group
    Case(batch=2, seqlen_q=70, seqlen_k=200, more="bias=fp32 bias_axes=1h1k alibi=0.1 softcap=5"),
    Case(batch=2, seqlen_q=70, seqlen_k=200, more="bias=fp32 sink=1 dropout=0.2 dlse=1"),
    Case(
        seqlen_q=206,
        seqlen_k=450,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,450 alibi=0.05 sink=1 bias=fp32 bias_axes=11qk"
        " block=64,64",
    ),
)
SCHEDULES = (0, 1, 2, 3, 7, 11)  # blocks in order, backwards, and shuffled; every order of lanes


ORDERS = ("det=1", "det=1 grad=fp32", "grad=fp32")


@pytest.fixture(scope="session")
def runs(build: Path, pool: ThreadPoolExecutor) -> dict[tuple[int, str], Future[tuple[int, str]]]:
    def submit(case: Case, more: str) -> Future[tuple[int, str]]:
        scheduled = [
            case._replace(more=f"{case.more} {more} schedule={schedule}") for schedule in SCHEDULES
        ]
        return pool.submit(run, build / "emulated_driver", scheduled)

    return {(i, more): submit(case, more) for i, case in enumerate(CASES) for more in ORDERS}


def digests(output: str) -> list[dict[str, str]]:
    """Of each gradient, by schedule."""
    lines = [line.split() for line in output.splitlines() if line.startswith("  ")]
    assert len(lines) == len(SCHEDULES)
    return [dict(zip(words[::3], words[2::3], strict=True)) for words in lines]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("more", ORDERS)
def test_bits(number: int, more: str, runs: dict[tuple[int, str], Future[tuple[int, str]]]) -> None:
    status, output = runs[number, more].result()
    assert status == 0, output
    first, *others = digests(output)
    same = {name for name in first if all(other[name] == first[name] for other in others)}
    if "det=1" in more:
        assert same == set(first)
    else:
        assert same == set(first) - {"dq"}, "the schedules do not change the order of sums"
