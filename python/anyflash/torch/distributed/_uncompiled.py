"""Functions that torch.compile does not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Under torch.compile a graph ends at the call and the next one begins behind it. Without this,
    dynamo would trace what the call does frame by frame, for a minute, to no avail."""
    uncompiled_function: Any = None

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal uncompiled_function
        if "torch._dynamo" not in sys.modules:  # whose import takes seconds
            return function(*arguments, **options)
        if uncompiled_function is None:
            uncompiled_function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return uncompiled_function(*arguments, **options)

    return call  # type: ignore[return-value]
