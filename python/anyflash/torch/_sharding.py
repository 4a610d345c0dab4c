"""Whether there are DTensors: then their rules are registered."""

from __future__ import annotations

import functools
import sys
from typing import Any

from anyflash.torch._dispatch_state import PLAIN

_MODULE = "torch.distributed.tensor"


def register_rules() -> bool:
    """Of the operators, where PyTorch's module of DTensors has been imported and takes rules."""
    return _MODULE in sys.modules and _import_rules()


# A constant for torch.compile, which calls it as it traces.
register_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_distributed(x: Any) -> bool:
    """Whether it is a DTensor, by what compilers can follow."""
    return type(x) not in PLAIN and hasattr(x, "placements")


@functools.cache
def _import_rules() -> bool:
    try:
        from anyflash.torch import _dtensor  # noqa: F401
    except ImportError:  # older versions take no rules of custom operators
        return False
    return True
