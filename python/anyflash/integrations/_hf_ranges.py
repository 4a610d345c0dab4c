"""Masks as ``key_ranges``: for each key the queries that see it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS = 256  # of the mask that are made at a time
_EDGES = 4  # of two intervals


def key_ranges(rows_of: Callable[[int, int], Tensor], seqlen_q: int) -> Tensor | None:
    """(batch or 1, 1, seqlen_k, 4) int32; None where the queries of some key are more than two
    intervals. Takes O(seqlen_k) memory, and waits for a GPU once.

    ``rows_of(first, count)`` gives rows of the mask, (batch, 1, count, seqlen_k) bool.
    """
    edges: list[Tensor] = []
    before = found = torch.empty(0)
    for first in range(0, seqlen_q, _ROWS):
        rows = rows_of(first, min(_ROWS, seqlen_q - first))
        if rows.stride(0) == 0:  # the same for all sequences
            rows = rows[:1]
        if not edges:
            before = torch.zeros_like(rows[:, :, :1])
            found = torch.zeros_like(rows[:, :, 0], dtype=torch.int32)
            edges = [torch.full_like(found, seqlen_q) for _ in range(_EDGES)]
        # Where a key is seen by one of two neighbouring queries alone, an interval begins or ends.
        changes = rows != torch.cat([before, rows[:, :, :-1]], 2)
        numbers = found[:, :, None] + changes.cumsum(2, dtype=torch.int32)
        for i in range(_EDGES):
            here = changes & (numbers == i + 1)
            edges[i] = torch.where(here.any(2), first + here.int().argmax(2).int(), edges[i])
        before, found = rows[:, :, -1:], numbers[:, :, -1]
    if not edges or bool((found > _EDGES).any()):
        return None
    return torch.stack(edges, -1)
