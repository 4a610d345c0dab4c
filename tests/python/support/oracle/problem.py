"""What a call is given, and which keys its queries see.

Packed sequences are computed apart; those of the same lengths share a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from oracle import philox

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
FAR = 1 << 40  # wider than any window need be


@dataclass(frozen=True)
class Problem:
    """What a call is given; names and meanings as in options.h."""

    q: Array
    k: Array
    v: Array
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    bias: Array | None = None
    block_mask: Array | None = None
    block_size: tuple[int, int] = (128, 128)
    key_ranges: Array | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: Array | None = None
    query_start: int | None = None
    key_start: int | None = None
    diagonal: int | None = None
    query_starts: Array | None = None
    key_starts: Array | None = None
    diagonals: Array | None = None
    batch_start: int = 0
    head_start: int = 0
    total_heads: int = 0
    out_dtype: np.dtype[Any] | None = None  # None: q's

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, seqlen_q, seqlen_k), the last two as upper bounds if packed."""
        if self.cu_seqlens_q is None:
            return self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1]
        return len(self.cu_seqlens_q) - 1, self.q.shape[1], self.max_seqlen_q, self.max_seqlen_k

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        heads_k = self.k.shape[-2]
        return self.q.shape[-2] // heads_k if heads_k else 1

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def dropout_mask(self) -> Array:
        rows, columns = (self.position(name) for name in ("query_start", "key_start"))
        total_heads = self.total_heads or self.shape[1]
        origin = philox.Origin(rows, columns, self.batch_start, self.head_start, total_heads)
        return philox.kept(self.shape, self.dropout_p, self.seed, self.offset, origin)

    def position(self, name: str) -> Array:
        """query_start, key_start or diagonal of each sequence, 0 where it is not given."""
        array, number = getattr(self, f"{name}s"), getattr(self, name)
        given = array if array is not None else number or 0
        return np.broadcast_to(np.asarray(given, np.int64), (self.shape[0],))

    def shifts(self, lengths: Array) -> Array:
        """Of the sequences with these (seqlen_q, seqlen_k): row i and key i + shift are on the
        diagonal."""
        names = ("query_start", "key_start", "diagonal")
        if all(getattr(self, x) is None and getattr(self, f"{x}s") is None for x in names):
            return lengths[:, 1] - lengths[:, 0]
        queries, keys, diagonals = map(self.position, names)
        return queries + diagonals - keys


class Batch(NamedTuple):
    """Some sequences of a problem with equal lengths and shifts; rows count in q, k and v without a
    batch axis."""

    sequences: Array  # (n,)
    rows_q: Array  # (n, seqlen_q)
    rows_k: Array  # (n, seqlen_k)
    shift: int  # row i and key i + shift are on the diagonal
    hidden: Array  # (n or 1, heads or 1, seqlen_q, seqlen_k)

    @property
    def distances(self) -> Array:
        position = np.arange(self.hidden.shape[2])[:, None] + self.shift
        return np.abs(position - np.arange(self.hidden.shape[3]))


def select(x: Array, sequences: Array, shape: tuple[int, ...]) -> Array:
    """The part of a (batch or 1, heads or 1, rows or 1, columns or 1) tensor that counts."""
    x = x if x.shape[0] == 1 else x[sequences]
    return x[:, :, : shape[0], : shape[1]]


def _out_of_ranges(problem: Problem, ranges: Array, sequences: Array, rows_k: Array) -> Array:
    """(n, heads or 1, seqlen_q, seqlen_k)"""
    if problem.packed:
        ranges = ranges[:, rows_k].swapaxes(0, 1)
    else:
        ranges = (ranges if ranges.shape[0] == 1 else ranges[sequences])[:, :, : rows_k.shape[1]]
    if ranges.shape[1] > 1:
        ranges = ranges.repeat(problem.group, 1)
    first_row = problem.position("query_start")[sequences][:, None, None, None]
    row = first_row + np.arange(problem.shape[2])[:, None]
    outside = np.ones((1,), bool)
    for first in range(0, ranges.shape[-1], 2):
        begin, end = (ranges[:, :, None, :, first + i].astype(np.int64) for i in (0, 1))
        outside = outside & ~((begin <= row) & (row < end))
    return outside


def _hidden(problem: Problem, sequences: Array, rows_k: Array, seqlen_q: int, shift: int) -> Array:
    seqlen_k = rows_k.shape[1]
    last = np.arange(seqlen_q)[:, None] + shift
    key = np.arange(seqlen_k)
    hidden = np.zeros((1, 1, seqlen_q, seqlen_k), bool)
    right = 0 if problem.causal else problem.window_right
    if problem.window_left >= 0:
        hidden |= key < last - min(problem.window_left, FAR)
    if right >= 0:
        hidden |= key > last + min(right, FAR)
    if problem.bias is not None:
        bias = select(problem.bias, sequences, (seqlen_q, seqlen_k))
        boolean = bias.dtype in (np.bool_, np.uint8)
        hidden = hidden | (bias == (0 if boolean else bias.dtype.type(-np.inf)))
    if problem.block_mask is not None:
        dropped = problem.block_mask == 0
        for axis, size in zip((2, 3), problem.block_size, strict=True):
            dropped = dropped.repeat(size, axis)
        hidden = hidden | select(dropped, sequences, (seqlen_q, seqlen_k))
    if problem.key_ranges is not None:
        outside = _out_of_ranges(problem, problem.key_ranges, sequences, rows_k)
        hidden = hidden | outside[:, :, :seqlen_q]
    return hidden


def batches(problem: Problem) -> Iterator[Batch]:
    count, _, seqlen_q, seqlen_k = problem.shape
    if problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None:
        first_q, first_k = problem.cu_seqlens_q[:-1], problem.cu_seqlens_k[:-1]
        lengths = np.stack([np.diff(problem.cu_seqlens_q), np.diff(problem.cu_seqlens_k)], 1)
    else:
        first_q, first_k = np.arange(count) * seqlen_q, np.arange(count) * seqlen_k
        lengths = np.tile([seqlen_q, seqlen_k], (count, 1))
    if problem.seqused_k is not None:
        lengths[:, 1] = np.minimum(lengths[:, 1], problem.seqused_k)
    kinds = np.column_stack([lengths, problem.shifts(lengths)])
    for kind in np.unique(kinds, axis=0):
        seqlen_q, seqlen_k, shift = map(int, kind)
        sequences = np.nonzero((kinds == kind).all(1))[0]
        rows_q = first_q[sequences, None] + np.arange(seqlen_q)
        rows_k = first_k[sequences, None] + np.arange(seqlen_k)
        hidden = _hidden(problem, sequences, rows_k, seqlen_q, shift)
        yield Batch(sequences, rows_q, rows_k, shift, hidden)


def rows_of(x: Array) -> Array:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])


def unseen_keys(problem: Problem) -> Array:
    """(rows of k without a batch axis, heads_k): no query sees them, whatever q and k are."""
    rows, heads_k, _ = rows_of(problem.k).shape
    heads = problem.shape[1]
    unseen = np.ones((rows, heads_k), bool)
    for batch in batches(problem):
        shape = (len(batch.sequences), heads, batch.rows_k.shape[1])
        by_head = np.broadcast_to(batch.hidden.all(2), shape)
        by_head = by_head.reshape(shape[0], heads_k, heads // heads_k, shape[2]).all(2)
        unseen[batch.rows_k] = by_head.swapaxes(1, 2)
    return unseen


def unseeing_queries(problem: Problem) -> Array:
    """(rows of q without a batch axis, heads): they see no key."""
    rows, heads, _ = rows_of(problem.q).shape
    unseeing = np.ones((rows, heads), bool)
    for batch in batches(problem):
        shape = (len(batch.sequences), heads, batch.rows_q.shape[1])
        unseeing[batch.rows_q] = np.broadcast_to(batch.hidden.all(3), shape).swapaxes(1, 2)
    return unseeing
