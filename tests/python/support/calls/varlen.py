"""A batch of packed sequences, and each of them alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracle.attention import Array

LENGTHS_Q, LENGTHS_K = (0, 5, 1, 0, 9), (3, 7, 0, 0, 20)


def ends(lengths: tuple[int, ...]) -> Array:
    return np.cumsum((0, *lengths), dtype=np.int32)


def packed(dtype: Any = np.float32) -> list[Any]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    shapes = ((15, 4, 8), (30, 2, 8), (30, 2, 12))
    generator = np.random.default_rng(3)
    tensors = [generator.standard_normal(shape).astype(dtype) for shape in shapes]
    return [*tensors, ends(LENGTHS_Q), ends(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)]


def alone(given: list[Any], index: int) -> list[Array]:
    q, k, v, cu_q, cu_k, *_ = given
    rows, keys = (slice(cu[index], cu[index + 1]) for cu in (cu_q, cu_k))
    return [q[None, rows], k[None, keys], v[None, keys]]
