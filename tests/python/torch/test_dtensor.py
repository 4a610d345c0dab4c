"""DTensors on two or four ranks: each computes what it holds, and nothing is communicated.

The cases are in support/calls/dtensor_*.py; one program of each file runs them all on each rank.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from run import ranks

CALLS = Path(ranks.__file__).parents[1] / "calls"
PROGRAMS = {"dtensor_cases": (2,), "dtensor_dropout": (2, 4), "dtensor_kvcache": (2, 4)}


def names_of(program: str) -> list[str]:
    text = (CALLS / f"{program}.py").read_text()
    return re.findall(r"^@case\ndef (\w+)", text, re.MULTILINE)


RUNS = [(program, size) for program, sizes in PROGRAMS.items() for size in sizes]
CASES = [(*run, name) for run in RUNS for name in names_of(run[0])]
Results = Callable[[str, int], list[Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    tensor = pytest.importorskip("torch.distributed.tensor.experimental")
    if not hasattr(tensor, "register_sharding"):
        pytest.skip("this PyTorch takes no rules of custom operators")

    @functools.cache
    def run(program: str, size: int) -> list[Any]:
        return ranks.run(f"calls.{program}", size, tmp_path_factory.mktemp("ranks"))

    return run


@pytest.mark.parametrize(("program", "size", "name"), CASES)
def test_ranks(results: Results, program: str, size: int, name: str) -> None:
    for rank, found in enumerate(results(program, size)):
        assert not found[name], f"rank {rank}:\n{found[name]}"


@pytest.mark.parametrize(("program", "size"), RUNS)
def test_no_case_is_left_out(results: Results, program: str, size: int) -> None:
    assert sorted(results(program, size)[0]) == sorted(names_of(program))


def test_rules_wait_for_dtensors(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of PyTorch's module takes long."""
    sharding = importlib.import_module("anyflash.torch._sharding")
    monkeypatch.delitem(importlib.import_module("sys").modules, sharding._MODULE, raising=False)
    assert not sharding.register_rules()
