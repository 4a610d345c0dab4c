"""Whether there are DTensors: then their rules are registered. Which part of one a rank holds."""

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


# A Problem's batch_start, head_start and total_heads where it is no part of anything.
WHOLE = 0, 0, 0


def part_of(q: Any) -> tuple[int, int, int]:
    """Which part of a DTensor this rank holds: the numbers of its first batch entry and of its
    first head, and the heads of the whole. It is (batch, seqlen, heads, head_dim) or packed.

    Shards are as torch.chunk makes them, along one axis of the mesh after the other.
    """
    mesh = q.device_mesh
    coordinate = mesh.get_coordinate()
    starts, sizes = [0] * q.ndim, list(q.shape)
    for i, placement in enumerate(q.placements):
        if coordinate is not None and placement.is_shard():  # else this rank computes nothing
            axis = placement.dim
            step = -(-sizes[axis] // mesh.size(i))
            first = min(step * coordinate[i], sizes[axis])
            starts[axis] += first
            sizes[axis] = min(step, sizes[axis] - first)
    return (starts[0] if q.ndim == 4 else 0), starts[-2], q.shape[-2]


@functools.cache
def _import_rules() -> bool:
    try:
        from anyflash.torch import _dtensor  # noqa: F401
    except ImportError:  # older versions take no rules of custom operators
        return False
    return True
