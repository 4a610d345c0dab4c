"""DTensors on two ranks: each computes what it holds, and nothing is communicated.

The cases are in support/calls/dtensor_cases.py; one program on each rank runs them all.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from run import ranks

CASES = Path(ranks.__file__).parents[1] / "calls" / "dtensor_cases.py"
NAMES = re.findall(r"^@case\ndef (\w+)", CASES.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    tensor = pytest.importorskip("torch.distributed.tensor.experimental")
    if not hasattr(tensor, "register_sharding"):
        pytest.skip("this PyTorch takes no rules of custom operators")
    return ranks.run("calls.dtensor_cases", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(results: list[Any], name: str) -> None:
    for rank, found in enumerate(results):
        assert not found[name], f"rank {rank}:\n{found[name]}"


def test_no_case_is_left_out(results: list[Any]) -> None:
    assert sorted(results[0]) == sorted(NAMES)


def test_rules_wait_for_dtensors(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of PyTorch's module takes long."""
    sharding = importlib.import_module("anyflash.torch._sharding")
    monkeypatch.delitem(importlib.import_module("sys").modules, sharding._MODULE, raising=False)
    assert not sharding.register_rules()
