"""The example that trains a GPT (examples/train): it learns, an interrupt costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

FOLDER = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train"
# Prints the losses of several runs.
SEVERAL = """
import json, sys
import train
losses = [train.main(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps(losses))
"""
# What 1,024 tokens cost that are all as probable: 6.93. How often each occurs gives about 6.
LEARNED = 6.0


class Runs(NamedTuple):
    whole: list[float]
    part: list[float]
    continued: list[float]
    standard: list[float]
    recomputed: list[float]
    folder: Path


@pytest.fixture(scope="module", params=["torch", "jax"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """In one process, which takes most of its time to begin."""
    folder = tmp_path_factory.mktemp("train")
    wanted = [
        ("whole", "--steps=50"),
        ("part", "--steps=2"),
        ("part", "--steps=4"),
        ("standard", "--steps=3", "--attention=standard"),
        ("recomputed", "--steps=3", "--recompute"),
    ]
    common = (f"--framework={request.param}", "--batch-size=2")
    arguments = [[f"--folder={folder / name}", *common, *options] for name, *options in wanted]
    command = [sys.executable, "-c", SEVERAL, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    return Runs(*json.loads(done.stdout.splitlines()[-1]), folder)


def test_learns(runs: Runs) -> None:
    assert len(runs.whole) == 50
    assert 6.8 < runs.whole[0] < 7.1  # nothing is known yet
    assert sum(runs.whole[-5:]) / 5 < LEARNED
    assert (runs.folder / "whole" / "loss.png").stat().st_size > 5000


def test_goes_on_from_a_checkpoint(runs: Runs) -> None:
    assert runs.part == runs.whole[:2]
    assert runs.continued == runs.whole[:4]


def test_as_standard_attention(runs: Runs) -> None:
    assert runs.standard == pytest.approx(runs.whole[:3], rel=1e-4)


def test_activation_checkpointing(runs: Runs) -> None:
    assert runs.recomputed == pytest.approx(runs.whole[:3], rel=1e-4)


def test_says_which_attention_there_is(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "train.py", "--framework=jax", "--attention=flash"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "in jax there is anyflash, cudnn, standard" in done.stderr
    assert not list(tmp_path.iterdir())
