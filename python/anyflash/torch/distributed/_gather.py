"""Every rank gets all keys and values, in the order of the whole, and computes its own rows. Each
row is one piece, as on a single device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflash.torch.distributed._layout import Layout, Run
from anyflash.torch.distributed._pieces import BackwardSums, ForwardSums, Keys, Pieces, Results
from anyflash.torch.distributed._transport import (
    Axis,
    Group,
    all_gather_rows,
    apart,
    side_by_side,
    sum_of_rows,
)

Grads = tuple[Tensor | None, ...]


class Gather:
    def __init__(self, group: Group, layout: Layout, pieces: Pieces, k: Tensor, v: Tensor) -> None:
        self.group, self.pieces = group, pieces
        length = pieces.whole.seqlen_k
        self.axis = Axis(layout, length, 1)
        joined = side_by_side(k, v)
        whole = all_gather_rows(group, "gathering k and v", self.axis, joined)
        tensors = apart(whole, (k.shape[2:], v.shape[2:]))
        runs = (Run(0, length, 0),) if length else ()
        self.keys = Keys(tensors[0], tensors[1], runs)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sums = ForwardSums(self.pieces, self.keys.v.shape[-1], dtype)
        sums.add(self.keys)
        return sums.finish(dtype)

    def backward(self, results: Results, wanted: Sequence[bool]) -> Grads:
        """Of q, k, v, bias, sinks and slopes."""
        sums = BackwardSums(self.pieces, results, wanted)
        joined = side_by_side(*sums.add(self.keys))
        own = sum_of_rows(self.group, "summing dk and dv", self.axis, joined)
        dk, dv = apart(own, (self.keys.k.shape[2:], self.keys.v.shape[2:]))
        return sums.finish(), dk, dv, sums.dbias, sums.dsinks, sums.dslopes
