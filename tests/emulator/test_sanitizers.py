"""The kernels under Address, Undefined Behaviour and Thread Sanitizer.

Thread Sanitizer sees each CUDA thread as a thread of its own, with barriers as the only order
between them: a race detector that needs no luck with the schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_driver import CASES, Case, run

SEEDS = (0, 1, 2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_asan(build: Path, head_dim: int) -> None:
    wide = [
        case._replace(head_dim=case.head_dim + head_dim - 64, head_dim_v=case.head_dim_v, seed=seed)
        for case in CASES
        for seed in SEEDS[:2]
    ]
    status, output = run(build / "emulated_driver_asan", wide, ASAN_OPTIONS="detect_leaks=0")
    assert status == 0, output


def test_tsan(build: Path) -> None:
    cases = [case._replace(seed=seed) for case in CASES for seed in SEEDS]
    status, output = run(build / "emulated_driver_tsan", cases, TSAN_OPTIONS="halt_on_error=1")
    assert status == 0, output


def test_driver_fails_on_wrong_results(build: Path) -> None:
    """An unreadable line, and an impossible problem, are not passed over."""
    assert run(build / "emulated_driver", [Case(heads=3, heads_k=2)])[0] == 1
    assert run(build / "emulated_driver", [Case(dtype="fp8")])[0] == 2
