"""Which of our kernels a call launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyflash


def launches(function: Callable[[], Any]) -> tuple[int, Any]:
    """How many of our kernels it launched, and its result."""

    def count() -> int:
        return sum(kernel["launches"] for kernel in anyflash.build_info()["kernels"])

    before = count()
    result = function()
    return count() - before, result
