"""Which probabilities dropout keeps, by the definition in cpp/kernels/variant/dropout.h.

Philox-4x32-10 is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ROUNDS = 10
FACTORS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
LEVELS = 1 << 16  # a probability is a multiple of 1 / LEVELS


class Origin(NamedTuple):
    """Where the rows, columns, sequences and heads of a mask lie in the whole one."""

    rows: Array  # (batch,)
    columns: Array  # (batch,), multiples of 8
    batch: int
    head: int
    total_heads: int


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Four random words for each counter; both (..., 4) uint64 below 2**32."""
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    word, half = np.uint64(WORD), np.uint64(32)
    for n in range(ROUNDS):
        k0, k1 = (np.uint64((k + n * step) & WORD) for k, step in zip(key, KEY_STEPS, strict=True))
        product0, product1 = np.uint64(FACTORS[0]) * c0, np.uint64(FACTORS[1]) * c2
        c0, c1 = product1 >> half ^ c1 ^ k0, product1 & word
        c2, c3 = product0 >> half ^ c3 ^ k1, product0 & word
    return np.stack([c0, c1, c2, c3], -1)


def threshold(dropout_p: float) -> int:
    """A 16-bit draw below it drops the probability."""
    return min(math.floor(dropout_p * LEVELS + 0.5), LEVELS - 1)


def draws(
    shape: tuple[int, int, int, int], seed: int, offset: int, origin: Origin | None = None
) -> Array:
    """A 16-bit number for each (batch, head, row, column)."""
    batch, heads, rows, columns = shape
    zeros = np.zeros(batch, np.int64)
    at = origin or Origin(zeros, zeros, 0, 0, heads)
    groups = -(-columns // 8)
    sequences = (at.batch + np.arange(batch)) * at.total_heads + at.head
    counter = np.empty((batch, heads, rows, groups, 4), np.uint64)
    counter[..., 0] = at.columns[:, None, None, None] // 8 + np.arange(groups)
    counter[..., 1] = at.rows[:, None, None, None] + np.arange(rows)[:, None]
    counter[..., 2] = (sequences[:, None] + np.arange(heads))[..., None, None] & WORD
    counter[..., 3] = offset & WORD
    words = philox(counter, (seed & WORD, seed >> 32 ^ offset >> 32))
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1)
    return halves.reshape(batch, heads, rows, groups * 8)[..., :columns]


def kept(
    shape: tuple[int, int, int, int],
    dropout_p: float,
    seed: int,
    offset: int,
    origin: Origin | None = None,
) -> Array:
    """(batch, heads, rows, columns): True where a probability is kept."""
    return draws(shape, seed, offset, origin) >= np.uint64(threshold(dropout_p))
