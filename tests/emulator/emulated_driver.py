"""Lines for the emulated driver (library/driver.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    dtype: str = "fp16"
    batch: int = 1
    seqlen_q: int = 131
    seqlen_k: int = 203
    heads: int = 2
    heads_k: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: int = 0
    scale: float = 0.125
    seed: int = 0


# Few and telling: odd lengths on both sides of each other, masked rows, odd head dims, both copies.
CASES = (
    Case(),
    Case(causal=1),
    Case(seqlen_q=203, seqlen_k=131, causal=1),
    Case(seqlen_q=1, seqlen_k=65, causal=1),
    Case(seqlen_q=200, seqlen_k=3, causal=1),
    Case(batch=2, seqlen_q=64, seqlen_k=128, heads=1),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, causal=1),
    Case(seqlen_q=40, seqlen_k=70, head_dim=37, head_dim_v=51),
    Case(seqlen_q=130, seqlen_k=90, scale=-0.2, causal=1),
)


def run(driver: Path, cases: list[Case], **environment: str) -> tuple[int, str]:
    """The driver's exit status and everything it printed."""
    lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    result = subprocess.run(
        [driver], input=lines, capture_output=True, text=True, env=environment, check=False
    )
    return result.returncode, result.stdout + result.stderr
