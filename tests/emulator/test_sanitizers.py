"""The kernels under Address, Undefined Behaviour and Thread Sanitizer.

Thread Sanitizer sees each CUDA thread as a thread of its own, with barriers as the only order
between them: a race detector that needs no luck with the schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_driver import CASES, Case, run


@pytest.mark.parametrize("head_dim", [64, 128])
def test_asan(build: Path, head_dim: int) -> None:
    wide = [case._replace(head_dim=case.head_dim + head_dim - 64) for case in CASES]
    status, output = run(build / "emulated_driver_asan", wide, ASAN_OPTIONS="detect_leaks=0")
    assert status == 0, output


def test_tsan(build: Path) -> None:
    status, output = run(
        build / "emulated_driver_tsan", list(CASES), TSAN_OPTIONS="halt_on_error=1"
    )
    assert status == 0, output


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(heads=3, heads_k=2), 1),  # an impossible problem
        (Case(dtype="fp8"), 2),
        (Case(more="softcup=5"), 2),
        (Case(more="nan=seen bias=int4"), 1),
    ],
)
def test_driver_fails_on_what_it_cannot_do(build: Path, case: Case, expected: int) -> None:
    """Such lines are not passed over."""
    assert run(build / "emulated_driver", [case])[0] == expected
