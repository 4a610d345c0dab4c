"""Rows are exchanged for heads (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): a rank
computes some heads of the whole sequence. With two axes of ranks (Fang and Zhao, "USP", arXiv
2405.07719), these are of the rows that it has with the other ranks of the second axis. A ring along
the first brings the other keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anyflash.torch.distributed._layout import Layout, Run
from anyflash.torch.distributed._pieces import Pieces, Results
from anyflash.torch.distributed._problem import Given
from anyflash.torch.distributed._ring import Ring
from anyflash.torch.distributed._transport import (
    Axis,
    Group,
    all_gather_rows,
    all_to_all,
    sum_of_rows,
)

Grads = tuple[Tensor | None, ...]


def heads_of(rank: int, size: int, heads: int) -> slice:
    """Of q."""
    each = heads // size
    return slice(rank * each, (rank + 1) * each)


def keys_heads_of(rank: int, size: int, heads: int, heads_k: int) -> slice:
    """Of k and v, which those of q need: where there are fewer than ranks, several ranks have
    one."""
    group = heads // heads_k
    own = heads_of(rank, size, heads)
    return slice(own.start // group, -(-own.stop // group))


def why_not(size: int, heads: int, heads_k: int) -> str | None:
    """What is wrong with these numbers of heads."""
    if heads % size:
        return f"q has {heads} heads, which {size} ranks do not divide"
    each, group = heads // size, heads // heads_k
    if each % group and group % each:
        return (
            f"{heads_k} heads of k cannot be shared out among {size} ranks with {heads} heads of q"
        )
    return None


class Trade:
    """Exchanges rows of all heads, (batch, rows, heads, ...), for some heads of all rows."""

    def __init__(self, group: Group, layout: Layout, length: int, heads: Sequence[slice]) -> None:
        self.group, self.layout, self.length, self.heads = group, layout, length, heads
        self.counts = layout.all_rows(length)

    def to_heads(self, what: str, x: Tensor) -> Tensor:
        own = self.heads[self.group.rank]
        shape = (x.shape[0], -1, own.stop - own.start, *x.shape[3:])
        per_row = x.shape[0] * (own.stop - own.start) * x.shape[3:].numel()
        parts = [[x[:, :, heads]] for heads in self.heads]
        received = all_to_all(self.group, what, parts, [per_row * n for n in self.counts], x)
        whole = x.new_empty((x.shape[0], self.length, *shape[2:]))
        for rank, part in enumerate(received):
            rows = part.view(x.shape[0], self.counts[rank], *shape[2:])
            for run in self.layout.runs(rank, self.length):
                whole[:, run.start : run.stop] = rows[:, run.own]
        return whole

    def to_rows(self, what: str, x: Tensor, heads: int) -> Tensor:
        """What several ranks have of a head is added up, in the order of the ranks."""
        runs = [self.layout.runs(rank, self.length) for rank in range(self.group.size)]
        parts = [[x[:, run.start : run.stop] for run in of_rank] for of_rank in runs]
        count = self.counts[self.group.rank]
        per_head = x.shape[0] * count * x.shape[3:].numel()
        sizes = [per_head * (own.stop - own.start) for own in self.heads]
        received = all_to_all(self.group, what, parts, sizes, x)
        total = x.new_empty((x.shape[0], count, heads, *x.shape[3:]))
        done = 0  # so many first heads are there
        for own, part in zip(self.heads, received, strict=True):
            for run, rows in self._split(part, runs[self.group.rank], total[:, :, own]):
                target = total[:, run.own, own]
                if own.start < done:
                    target += rows
                else:
                    target.copy_(rows)
            done = own.stop
        return total

    @staticmethod
    def _split(part: Tensor, runs: Sequence[Run], target: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """The rows of each run, which lie one behind the other in ``part``."""
        at = 0
        for run in runs:
            shape = target[:, run.own].shape
            yield run, part[at : at + shape.numel()].view(shape)
            at += shape.numel()


class Ulysses:
    def __init__(self, group: Group, layout: Layout, pieces: Pieces, k: Tensor, v: Tensor) -> None:
        whole, q, given = pieces.whole, pieces.q, pieces.given
        ring, ring_layout = Group(None, 0, 1), Layout("contiguous", 1, layout.multiple)
        if group.axes is not None:
            ring, group = (axis._replace(doing=group.doing) for axis in group.axes)
            ring_layout, layout = layout.outer, layout.inner
        self.group, self.layout, self.given = group, layout, given
        self.total, self.total_k = q.shape[2], k.shape[2]
        ranks = range(group.size)
        heads = [heads_of(rank, group.size, self.total) for rank in ranks]
        heads_k = [keys_heads_of(rank, group.size, self.total, self.total_k) for rank in ranks]
        # What the ranks that exchange have together.
        self.length = ring_layout.rows(ring.rank, whole.seqlen_q)
        self.of_rows = Trade(group, layout, self.length, heads)
        self.of_keys = Trade(group, layout, ring_layout.rows(ring.rank, whole.seqlen_k), heads_k)
        self.own = heads[group.rank]
        own_pieces = Pieces(
            whole,
            self._of_heads(given, heads_k[group.rank]),
            pieces.packed,
            pieces.part._replace(
                head_start=pieces.part.head_start + self.own.start,
                total_heads=pieces.part.total_heads or self.total,
            ),
            (
                self.of_rows.to_heads("exchanging q", q),
                ring_layout.runs(ring.rank, whole.seqlen_q),
            ),
        )
        if pieces.max_logits is not None:
            own_pieces.max_logits = pieces.max_logits[:, self.own]
        keys = self.of_keys.to_heads("exchanging k", k)
        values = self.of_keys.to_heads("exchanging v", v)
        self.ring = Ring(ring, ring_layout, own_pieces, keys, values)

    def _of_heads(self, given: Given, key_heads: slice) -> Given:
        """What belongs to this rank's heads, and to all rows."""

        def own(x: Tensor | None, axis: int) -> Tensor | None:
            if x is None or x.shape[axis] == 1 or axis < 0:
                return x
            return x.narrow(axis, self.own.start, self.own.stop - self.own.start)

        bias, sinks, slopes = given.bias, given.sinks, given.alibi_slopes
        if bias is not None and bias.shape[2] != 1:
            bias = self._bias_of_all_rows(bias)
        elif bias is not None:
            bias = own(bias, 1)
        part = slice(self.own.start, self.own.stop)
        ranges = given.key_ranges
        if ranges is not None and ranges.shape[1] != 1:
            ranges = ranges[:, key_heads]
        return given._replace(
            bias=bias,
            sinks=None if sinks is None else sinks[part],
            alibi_slopes=None if slopes is None else slopes[..., part],
            block_mask=own(given.block_mask, 1),
            key_ranges=ranges,
        )

    def _bias_of_all_rows(self, bias: Tensor) -> Tensor:
        if bias.shape[1] == 1:
            what = "gathering bias"
            return all_gather_rows(self.group, what, Axis(self.layout, self.length, 2), bias)
        rows_first = bias.transpose(1, 2)
        return self.of_rows.to_heads("exchanging bias", rows_first).transpose(1, 2)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out, lse = self.ring.forward(dtype)
        by_row = lse.transpose(1, 2)[..., None]
        out = self.of_rows.to_rows("exchanging out", out, self.total)
        lse = self.of_rows.to_rows("exchanging lse", by_row, self.total)
        return out, lse[..., 0].transpose(1, 2).contiguous()

    def backward(self, results: Results, wanted: Sequence[bool]) -> Grads:
        """Of q, k, v, bias, sinks and slopes."""
        trade = self.of_rows

        def by_head(what: str, x: Tensor) -> Tensor:
            rows = x.transpose(1, 2)[..., None]
            return trade.to_heads(f"exchanging {what}", rows)[..., 0].transpose(1, 2)

        given = Results(
            trade.to_heads("exchanging out", results.out),
            by_head("lse", results.lse),
            trade.to_heads("exchanging dout", results.dout),
            None if results.dlse is None else by_head("dlse", results.dlse),
        )
        dq, dk, dv, dbias, dsinks, dslopes = self.ring.backward(given, wanted)
        return (
            trade.to_rows("exchanging dq", dq, self.total),
            self.of_keys.to_rows("exchanging dk", dk, self.total_k),
            self.of_keys.to_rows("exchanging dv", dv, self.total_k),
            self._dbias(dbias),
            self._placed(dsinks, self.given.sinks),
            self._placed(dslopes, self.given.alibi_slopes),
        )

    def _dbias(self, own: Tensor | None) -> Tensor | None:
        bias = self.given.bias
        if own is None or bias is None:
            return None
        if bias.shape[2] == 1:
            if bias.shape[1] == 1:
                return own
            total = own.new_zeros(bias.shape)
            total[:, self.own] = own
            return total
        if bias.shape[1] == 1:
            axis = Axis(self.layout, self.length, 2)
            return sum_of_rows(self.group, "summing dbias", axis, own)
        rows_first = own.transpose(1, 2)
        return self.of_rows.to_rows("exchanging dbias", rows_first, self.total).transpose(1, 2)

    def _placed(self, own: Tensor | None, like: Tensor | None) -> Tensor | None:
        """Of the rank's heads, among zeros for the others."""
        if own is None or like is None:
            return None
        total = own.new_zeros(like.shape)
        total[..., self.own] = own
        return total
