"""FSDP2 or HSDP, tensor parallelism, activation checkpointing and torch.compile together: training
goes as on one rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from run import ranks


def test_four_ranks_train_as_one(torch: ModuleType, tmp_path: Path) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    training = importlib.import_module("calls.parallel_training")
    right = training.train(training.model(), 0, 1)
    assert right[-1] < 0.2 * right[0], "it does not learn, and would show nothing"
    for found in ranks.run("calls.parallel_training", 4, tmp_path):
        assert found.keys() == training.SETTINGS.keys()
        for name, result in found.items():
            assert (result["graphs"] > 0) == training.SETTINGS[name].compiled, name
            # A mistake in one gradient is far larger after so many steps.
            torch.testing.assert_close(result["losses"], right, rtol=0, atol=1e-11)
