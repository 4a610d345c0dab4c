"""A process group for tests that need no more than one rank."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """ContextParallel, in a group of one rank."""
    dist = pytest.importorskip("torch.distributed")
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield importlib.import_module("anyflash.torch.distributed").ContextParallel
    dist.destroy_process_group()
