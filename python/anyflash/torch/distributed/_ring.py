"""Keys and values travel, a hop at a time (Liu et al., "Ring attention", arXiv 2310.01889). In hop
h a rank has those of the rank h before it, while those of the next hop arrive.

They come from their owner directly, not through the ranks between. So one whose rows see none of
them is left out: windows send and compute no more than they need. Results and gradients are
joined in the order of the hops, whatever arrives when.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.torch.distributed._layout import Layout
from anyflash.torch.distributed._pieces import (
    BackwardSums,
    ForwardSums,
    Keys,
    Pieces,
    Results,
    sum_dtype,
)
from anyflash.torch.distributed._transport import Exchange, Group, Message

# Of q, k, v, bias, sinks and slopes.
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class _Packed(NamedTuple):
    """Two tensors in one message."""

    shapes: tuple[torch.Size, torch.Size]
    data: Tensor

    @staticmethod
    def of(a: Tensor, b: Tensor) -> _Packed:
        return _Packed((a.shape, b.shape), torch.cat([a.flatten(), b.flatten()]))

    def unpacked(self) -> tuple[Tensor, Tensor]:
        size = self.shapes[0].numel()
        return self.data[:size].view(self.shapes[0]), self.data[size:].view(self.shapes[1])


class Ring:
    def __init__(self, group: Group, layout: Layout, pieces: Pieces, k: Tensor, v: Tensor) -> None:
        self.group, self.layout, self.pieces = group, layout, pieces
        self.k, self.v = k, v
        whole = pieces.whole
        self.rows = [layout.runs(rank, whole.seqlen_q) for rank in range(group.size)]
        self.keys = [layout.runs(rank, whole.seqlen_k) for rank in range(group.size)]

    def needs(self, reader: int, owner: int) -> bool:
        """Whether a rank's rows see another's keys."""
        pairs = itertools.product(self.rows[reader], self.keys[owner])
        return any(self.pieces.sees(rows, keys) for rows, keys in pairs)

    def _empty(self, rank: int, dtype: torch.dtype) -> _Packed:
        """Room for a rank's keys and values, or gradients of them."""
        n = self.layout.rows(rank, self.pieces.whole.seqlen_k)
        shapes = [torch.Size((x.shape[0], n, *x.shape[2:])) for x in (self.k, self.v)]
        size = sum(shape.numel() for shape in shapes)
        return _Packed((shapes[0], shapes[1]), self.k.new_empty(size, dtype=dtype))

    def _what(self, hop: int, what: str) -> str:
        return f"hop {hop} of {self.group.size - 1}: {what}"

    def _hop(self, hop: int, own: _Packed) -> tuple[Exchange, _Packed] | None:
        """Begins to exchange what is wanted in a hop; None after the last."""
        group = self.group
        if hop >= group.size:
            return None
        owner, reader = group.peer(-hop), group.peer(hop)
        wanted = self._empty(owner, self.k.dtype)
        receive = Message(wanted.data, owner) if self.needs(group.rank, owner) else None
        send = Message(own.data, reader) if self.needs(reader, group.rank) else None
        return Exchange(group, self._what(hop, "k and v"), 2 * hop, send, receive), wanted

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        alone = self.group.size == 1  # no row gets a second piece
        sums = ForwardSums(self.pieces, self.v.shape[-1], dtype if alone else None)
        own = _Packed.of(self.k, self.v)
        coming = self._hop(1, own)
        last = self._last_hop()
        sums.add(Keys(self.k, self.v, self.keys[self.group.rank]), dtype if last == 0 else None)
        hop = 1
        while coming is not None:
            exchange, arrived = coming
            coming = self._hop(hop + 1, own)
            if exchange.wait() is not None:
                keys = Keys(*arrived.unpacked(), self.keys[self.group.peer(-hop)])
                sums.add(keys, dtype if hop == last else None)
            hop += 1
        return sums.finish(dtype)

    def _last_hop(self) -> int:
        """That brings keys which this rank's rows see; 0: there is none."""
        group = self.group
        return max(h for h in range(group.size) if h == 0 or self.needs(group.rank, group.peer(-h)))

    def backward(self, results: Results, wanted: Sequence[bool]) -> Grads:
        """Parts of dk and dv go back to the keys' owner."""
        group = self.group
        sums = BackwardSums(self.pieces, results, wanted)
        own = _Packed.of(self.k, self.v)
        coming = self._hop(1, own)
        dk, dv = sums.add(Keys(self.k, self.v, self.keys[group.rank]))
        returning: tuple[Exchange, _Packed] | None = None
        for hop in range(1, group.size):
            assert coming is not None
            exchange, arrived = coming
            coming = self._hop(hop + 1, own)
            found = None
            if exchange.wait() is not None:
                owner = group.peer(-hop)
                found = self._empty(owner, sum_dtype(self.k))
                keys = Keys(*arrived.unpacked(), self.keys[owner])
                sums.add(keys, found.unpacked())
            self._add(returning, dk, dv)
            returning = self._return(hop, found)
        self._add(returning, dk, dv)
        return sums.finish(), dk, dv, sums.dbias, sums.dsinks, sums.dslopes

    def _return(self, hop: int, found: _Packed | None) -> tuple[Exchange, _Packed]:
        group = self.group
        owner, reader = group.peer(-hop), group.peer(hop)
        wanted = self._empty(group.rank, sum_dtype(self.k))
        receive = Message(wanted.data, reader) if self.needs(reader, group.rank) else None
        send = None if found is None else Message(found.data, owner)
        return Exchange(group, self._what(hop, "dk and dv"), 2 * hop + 1, send, receive), wanted

    @staticmethod
    def _add(returning: tuple[Exchange, _Packed] | None, dk: Tensor, dv: Tensor) -> None:
        if returning is None:
            return
        exchange, arrived = returning
        if exchange.wait() is not None:
            more_dk, more_dv = arrived.unpacked()
            dk += more_dk
            dv += more_dv
