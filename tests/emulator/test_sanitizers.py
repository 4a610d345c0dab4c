"""The kernels under Address, Undefined Behaviour and Thread Sanitizer.

Thread Sanitizer sees each CUDA thread as a thread of its own, with barriers as the only order
between them: a race detector that needs no luck with the schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_driver import BACKWARD_CASES, BACKWARD_FEATURE_CASES, CASES, Case, run


def wide(cases: tuple[Case, ...]) -> list[Case]:
    """With kernels of head dim 128 instead of 64."""
    return [case._replace(head_dim=case.head_dim + 64) for case in cases]


@pytest.mark.parametrize("cases", [CASES, BACKWARD_CASES], ids=["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_asan(build: Path, cases: tuple[Case, ...], head_dim: int) -> None:
    chosen = list(cases) if head_dim == 64 else wide(cases)
    status, output = run(build / "emulated_driver_asan", chosen, ASAN_OPTIONS="detect_leaks=0")
    assert status == 0, output


# The backward's generic kernel of head dim 128 has one buffer.
TSAN = {
    "forward": list(CASES),
    "backward": list(BACKWARD_CASES),
    "one-buffer": wide(BACKWARD_FEATURE_CASES),
}


@pytest.mark.parametrize("name", TSAN)
def test_tsan(build: Path, name: str) -> None:
    status, output = run(build / "emulated_driver_tsan", TSAN[name], TSAN_OPTIONS="halt_on_error=1")
    assert status == 0, output


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(heads=3, heads_k=2), 1),  # an impossible problem
        (Case(dtype="fp8"), 2),
        (Case(more="softcup=5"), 2),
        (Case(more="nan=seen bias=int4"), 1),
        (Case(more="op=sideways"), 2),
        (Case(more="op=backward grad=bf16"), 1),
    ],
)
def test_driver_fails_on_what_it_cannot_do(build: Path, case: Case, expected: int) -> None:
    """Such lines are not passed over."""
    assert run(build / "emulated_driver", [case])[0] == expected
