"""A short soak, and that it notices what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_steps as steps
import soak


def test_soak() -> None:
    soak.soak(steps=150, seed=1)


def test_steps_of_a_gpu() -> None:
    """Their tensors, on the CPU: the same bits twice."""
    pytest.importorskip("torch")
    runs = [steps.Steps(1, steps.Gpu(device="cpu")) for _ in range(2)]
    for _ in range(40):
        assert runs[0].step() == runs[1].step()


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
