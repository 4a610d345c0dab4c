"""What check.py and check_backward.py share: the checker, masks, lengths and the program."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from isolated import isolated

MASKS = {
    "full": (-1, -1),
    "causal": (-1, 0),
    "left": (100, -1),
    "window": (70, 30),
    "right": (-1, 50),
    "thin": (0, 0),
    "far causal": (300, 0),
}
LIMIT_S = 45.0  # of a group


class Checker:
    """Makes inputs, counts checks and prints those that fail."""

    failure_word = "FAILED"
    most_printed = sys.maxsize

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.failures: list[str] = []
        self.count = 0
        self.worst = 0.0
        self.generator: torch.Generator | None = None  # None: PyTorch's own

    def random(self, *shape: int) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda", generator=self.generator)
        return x.to(self.dtype)

    def expect(self, ok: bool, what: str) -> None:
        self.count += 1
        if ok:
            return
        self.failures.append(what)
        if len(self.failures) <= self.most_printed:
            print(self.failure_word, what, flush=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((a.contiguous().view(bits) == b.contiguous().view(bits)).all())


def cumulative(lengths: list[int]) -> torch.Tensor:
    sums = [0, *itertools.accumulate(lengths)]
    return torch.tensor(sums, dtype=torch.int32, device="cuda")


def run_check(
    make: Callable[[str, torch.dtype], Checker], path: str, dtype: torch.dtype, d: int, check: Any
) -> tuple[int, int, float]:
    checker = make(path, dtype)
    check(checker, d)
    return checker.count, len(checker.failures), checker.worst


def run_checks(make: Callable[[str, torch.dtype], Checker], all_checks: tuple[Any, ...]) -> int:
    """The program: `make` a checker of the library for each group, in a process of its own."""
    path, d = sys.argv[1], int(sys.argv[2])
    dtype = torch.float16 if "float16" in sys.argv else torch.bfloat16
    checks = all_checks[:2] if "quick" in sys.argv else all_checks
    count, failed, worst, broken = 0, 0, 0.0, []
    for check in checks:
        start = time.time()
        result, problem = isolated(LIMIT_S, run_check, make, path, dtype, d, check)
        if result is None:
            broken.append(f"{check.__name__} {problem}")
        else:
            count, failed, worst = count + result[0], failed + result[1], max(worst, result[2])
        said = problem or f"{result[1]} of {result[0]} failed"
        print(f"{check.__name__}: {said}, {time.time() - start:.1f} s", flush=True)
    print(
        f"{path}: {count} checks, {failed} failed, worst relative error {worst:.2e}",
        *broken,
        sep="; ",
    )
    return 1 if failed or broken else 0
