"""A short soak, and that it notices what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_steps as steps
import soak


def test_soak() -> None:
    soak.soak(steps=150, seed=1)


def test_steps_of_a_gpu() -> None:
    """Their tensors, on the CPU: the same bits twice."""
    pytest.importorskip("torch")
    runs = [steps.Steps(1, steps.Gpu(device="cpu", longest=200)) for _ in range(2)]
    for _ in range(30):
        assert runs[0].step() == runs[1].step()


class Recorder:
    """In anyflash's place: says what it was given, and computes nothing."""

    def __init__(self) -> None:
        self.given: dict[str, set[tuple[str, int]]] = {}  # dtypes and head dims of each function
        self.work: dict[bool, int] = {False: 0, True: 0}  # of training with narrow heads, and wide

    def __getattr__(self, function: str) -> Any:
        def call(*x: Any, **options: Any) -> list[Any]:
            q = x[0]
            self.given.setdefault(function, set()).add((q.dtype.name, q.shape[-1]))
            if function == "attention":
                heads, d = q.shape[2:]
                self.work[d > 64] += len(q) * q.shape[1] * x[1].shape[1] * heads * d
                if "out" in options:
                    raise ValueError
            return [x[0]] * 2 if "backward" not in function else [x[1]] * 3

        return call


@dataclass(frozen=True)
class Shown(steps.Gpu):
    def put(self, x: Any) -> Any:
        return x

    def bits(self, x: Any) -> bytes:
        return b""


def recorded(gpu: steps.Gpu, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(steps, "anyflash", recorder)
    monkeypatch.setattr(
        steps.Steps, "array", lambda _, *shape, dtype=np.float32: np.broadcast_to(dtype(0), shape)
    )
    run = steps.Steps(1, gpu)
    for _ in range(1000):
        run.step()
    return recorder


def test_a_gpu_has_heads_of_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training, of packed sequences and of caches, in both dtypes; wide ones take no more of
    the time than there are of them."""
    recorder = recorded(Shown(), monkeypatch)
    wanted = {(dtype, d) for dtype in ("bfloat16", "float16") for d in (64, 96, 128, 192, 256)}
    for function in ("attention", "attention_varlen", "attention_with_kvcache"):
        assert recorder.given[function] >= wanted, function
    assert recorder.work[True] < 0.6 * sum(recorder.work.values())


def kernels(dtype: str, dims: dict[str, int], featured: int) -> list[dict[str, Any]]:
    return [
        {"arch": "sm80", "op": op, "dtype": dtype, "head_dim": d, "features": has, "block_m": m}
        for op, widest in dims.items()
        for d, has in ((widest, []), (featured, sorted(steps.FEATURES)))
        for m in (16, 32, 64)
    ]


def test_a_build_of_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps for these alone: no float16, wide heads without features, caches of narrow ones."""
    dims = {"forward": 256, "backward": 128, "decode": 64}
    gpu = steps.of_build(Shown(), kernels("bfloat16", dims, 64))
    assert gpu.featured == {"bfloat16": 64}
    given = recorded(gpu, monkeypatch).given
    assert {dtype for of_one in given.values() for dtype, _ in of_one} == {"bfloat16"}
    assert max(d for _, d in given["attention"]) == 128
    assert {d for _, d in given["attention_with_kvcache"]} == {64}
    with pytest.raises(SystemExit, match="no kernels for GPUs"):
        steps.of_build(Shown(), [])


LEAK = """
import random_steps as steps
kept = []
step = steps.Steps.step
def leaking(self):
    kept.append(b"x" * (4 << 20))
    return step(self)
steps.Steps.step = leaking
"""
OTHER_BITS = """
import os, random_steps as steps
step = steps.Steps.step
def differing(self):
    self.count = getattr(self, "count", 0) + 1
    wrong = self.count == 7 and os.environ["OMP_NUM_THREADS"] != "1"
    return "0" * 32 if wrong else step(self)
steps.Steps.step = differing
"""
EARLY_END = """
import os, random_steps as steps
step = steps.Steps.step
def ending(self):
    self.count = getattr(self, "count", 0) + 1
    if self.count == 5 and os.environ["OMP_NUM_THREADS"] != "1":
        raise SystemExit(1)
    return step(self)
steps.Steps.step = ending
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (LEAK, "memory grew"),
        (OTHER_BITS, "step 6 of seed 1 has other bits"),
        (EARLY_END, "one of the runs ended after 4 steps"),
    ],
)
def test_what_it_notices(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    folder = repr(str(soak.STEPS.parent))
    program.write_text(f"import sys; sys.path.append({folder})\n{change}\nsteps.main()\n")
    monkeypatch.setattr(soak, "STEPS", program)
    with pytest.raises(AssertionError, match=message):
        soak.soak(steps=40, seed=1)
