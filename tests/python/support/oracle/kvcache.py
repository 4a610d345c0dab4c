"""Attention with a cache, written the plain way: the new rows are written to the cache, each
sequence's keys are gathered from it, and what remains is attention over packed sequences
(attention.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from oracle.attention import (
    DTYPES,
    ROUNDING,
    Array,
    Problem,
    Reference,
    reference_of,
    truth,
    unseen_keys,
)

INT8 = np.dtype(np.int8)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
EIGHT_BIT = {"int8": INT8, "e4m3": E4M3, "e5m2": E5M2}
CACHE_DTYPES = DTYPES | EIGHT_BIT
LARGEST = {INT8: (-128, 127), E4M3: (-448, 448), E5M2: (-57344, 57344)}


@dataclass(frozen=True)
class CacheProblem:
    """What a call is given; names and meanings as in options.h."""

    q: Array
    k_cache: Array
    v_cache: Array
    cache_seqlens: Array | None = None
    cache_batch_idx: Array | None = None
    cache_leftpad: Array | None = None
    block_table: Array | None = None
    k_new: Array | None = None
    v_new: Array | None = None
    rotary_cos: Array | None = None
    rotary_sin: Array | None = None
    rotary_seqlens: Array | None = None
    rotary_neox: bool = False
    tree_mask: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    # Latent attention: v_cache and v_scale are views of k_cache's columns, and k_scale.
    head_dim_v: int = 0
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    out_dtype: np.dtype[Any] | None = None  # None: q's

    @property
    def seqlen_new(self) -> int:
        return 0 if self.k_new is None else self.k_new.shape[1]

    @property
    def capacity(self) -> int:
        page_size = self.k_cache.shape[1]
        return page_size * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def filled(self) -> Array:
        """(batch,): rows before the append."""
        most = self.capacity - self.seqlen_new
        if self.cache_seqlens is None:
            return np.full(len(self.q), most)
        return np.clip(self.cache_seqlens.astype(np.int64), 0, most)

    @property
    def first_row(self) -> Array:
        """(batch,): the row of key 0."""
        if self.cache_leftpad is None:
            return np.zeros(len(self.q), np.int64)
        return np.clip(self.cache_leftpad.astype(np.int64), 0, self.filled)

    @property
    def lengths(self) -> Array:
        return self.filled + self.seqlen_new - self.first_row

    @property
    def first_rotation(self) -> Array:
        """(batch,): the rotary tables' row of the first new key."""
        if self.rotary_seqlens is None:
            return self.filled - self.first_row
        return np.maximum(self.rotary_seqlens.astype(np.int64), 0)

    @property
    def steps(self) -> bool:
        """Whether query i is rotated by a row of its own."""
        return self.causal or self.window_left >= 0 or self.window_right >= 0

    def places(self, sequence: int, rows: Array) -> tuple[Array, Array]:
        """Where in the cache the rows of a sequence lie; -1: nowhere."""
        slots = self.k_cache.shape[0]
        if self.block_table is not None:
            page_size = self.k_cache.shape[1]
            slot = self.block_table[sequence].astype(np.int64)[rows // page_size]
            rows = rows % page_size
        elif self.cache_batch_idx is not None:
            slot = np.full_like(rows, self.cache_batch_idx[sequence])
        else:
            slot = np.full_like(rows, sequence)
        return np.where((slot < 0) | (slot >= slots), -1, slot), rows


class Written(NamedTuple):
    """What an append writes to one tensor, by (new row, head, column)."""

    slots: Array
    rows: Array
    low: Array  # what may be written: rounding of exact results, and of what float32 makes of them
    value: Array  # of the cache's dtype
    high: Array


class Answer(NamedTuple):
    reference: Reference
    k: Written | None
    v: Written | None


# ---- the append ----


def rotated(p: CacheProblem, x: Array, first: Array, steps: bool) -> tuple[Array, Array]:
    """(batch, rows, heads, columns) in float64, and by how much float32 may be off. Row t of
    sequence b is turned by row first[b] + t of the tables, or by row first[b]."""
    wide = x.astype(np.longdouble if x.dtype == np.float64 else np.float64)
    if p.rotary_cos is None or p.rotary_sin is None:
        return wide, np.zeros_like(wide)
    row = first[:, None] + np.arange(x.shape[1]) * int(steps)
    row = np.clip(row, 0, len(p.rotary_cos) - 1)
    cos, sin = (table[row][:, :, None].astype(wide.dtype) for table in (p.rotary_cos, p.rotary_sin))
    half = cos.shape[-1]
    one, two = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if p.rotary_neox:
        one, two = slice(0, half), slice(half, 2 * half)
    x1, x2 = wide[..., one], wide[..., two]
    result, error = wide.copy(), np.zeros_like(wide)
    result[..., one] = x1 * cos - x2 * sin
    result[..., two] = x1 * sin + x2 * cos
    unit = 2.0**-51 if x.dtype == np.float64 else 2.0**-22
    error[..., one] = unit * (np.abs(x1 * cos) + np.abs(x2 * sin))
    error[..., two] = unit * (np.abs(x1 * sin) + np.abs(x2 * cos))
    return result, error


def quantised(x: Array, dtype: np.dtype[Any]) -> Array:
    if dtype not in LARGEST:
        return x.astype(dtype)
    x = np.clip(x, *LARGEST[dtype])
    return (np.rint(x) if dtype == INT8 else x.astype(np.float32)).astype(dtype)


def all_places(p: CacheProblem, first: Array, count: Array) -> tuple[Array, Array]:
    """Of `count` rows of each sequence from its row `first` on."""
    slots, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for b, (start, n) in enumerate(zip(first, count, strict=True)):
        slot, row = p.places(b, start + np.arange(n))
        slots.append(slot)
        rows.append(row)
    return np.concatenate(slots), np.concatenate(rows)


def scale_of(scale: Array | None, slots: Array, rows: Array) -> Array:
    """(rows, heads_k or 1, 1)"""
    if scale is None:
        return np.ones((1, 1, 1), np.float32)
    if scale.ndim == 1:
        return scale[None, :, None]
    found = scale[slots] if scale.ndim == 2 else scale[slots, rows]
    return np.where(slots[:, None] >= 0, found, np.float32(1))[..., None]


def written(p: CacheProblem, new: Array, cache: Array, scale: Array | None, turn: bool) -> Written:
    slots, rows = all_places(p, p.filled, np.full(len(new), new.shape[1]))
    exact, error = new.astype(np.float64), np.zeros(new.shape)
    if turn:
        exact, error = rotated(p, new, p.first_rotation, steps=True)
    results = []
    for sign in (-1, 0, 1):
        x = (exact + sign * error).astype(new.dtype).reshape(-1, *new.shape[2:])
        if cache.dtype in LARGEST:
            x = x.astype(np.float64) / scale_of(scale, slots, rows).astype(np.float64)
            x = x + np.where(np.isfinite(x), sign * 2.0**-22 * np.abs(x), 0)
        results.append(quantised(x, cache.dtype))
    inside = slots >= 0
    return Written(slots[inside], rows[inside], *(x[inside] for x in results))


def check_written(name: str, cache: Array, expected: Written) -> None:
    """Raise AssertionError unless the cache's new rows hold what they may."""
    actual = cache[expected.slots, expected.rows].astype(np.float64)
    low, value, high = (x.astype(np.float64) for x in expected[2:])
    nan = np.isnan(value)
    wrong = np.where(nan, ~np.isnan(actual), ~((low <= actual) & (actual <= high)))
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        was, wanted = actual[tuple(place)], value[tuple(place)]
        raise AssertionError(
            f"{name}: {wrong.sum()} new elements are wrong, the first at [row, head, column] = "
            f"{place}: {was}, not {wanted}"
        )


# ---- attention ----


def gathered(p: CacheProblem, cache: Array, scale: Array | None, exact: bool) -> Array:
    """(total_k, heads_k, columns): the keys or values of all sequences; 8-bit ones times their
    scale, exactly or rounded to float32."""
    slots, rows = all_places(p, p.first_row, p.lengths)
    found = cache[slots, rows]
    found[slots < 0] = 0
    if cache.dtype not in LARGEST:
        return found
    dtype = np.dtype(np.float64 if exact else np.float32)
    with np.errstate(over="ignore"):  # of keys that nobody sees
        return found.astype(dtype) * scale_of(scale, slots, rows).astype(dtype)


def tree_bias(p: CacheProblem) -> Array | None:
    """The tree as a boolean bias (batch, 1, seqlen_q, most keys)."""
    if p.tree_mask is None:
        return None
    count, seqlen_q = p.q.shape[:2]
    keep = np.ones((count, 1, seqlen_q, int(p.lengths.max(initial=0))), bool)
    for b, length in enumerate(p.lengths):
        tree = p.tree_mask[b if len(p.tree_mask) > 1 else 0] != 0
        shift = int(length) - seqlen_q
        keep[b, 0, :, max(shift, 0) : length] = tree[:, max(-shift, 0) :]
    return keep


def dense(p: CacheProblem, k_cache: Array, v_cache: Array, exact: bool = True) -> Problem:
    """The problem without a cache, after the append."""
    count, seqlen_q = p.q.shape[:2]
    q = rotated(p, p.q, p.first_rotation, p.steps)[0].astype(p.q.dtype)
    return Problem(
        q.reshape(-1, *q.shape[2:]),
        gathered(p, k_cache, p.k_scale, exact),
        gathered(p, v_cache, p.v_scale, exact),
        p.softmax_scale,
        p.causal,
        p.window_left,
        p.window_right,
        p.softcap,
        p.alibi_slopes,
        tree_bias(p),
        sinks=p.sinks,
        cu_seqlens_q=np.arange(count + 1) * seqlen_q,
        cu_seqlens_k=np.cumsum([0, *p.lengths]),
        max_seqlen_q=seqlen_q,
        max_seqlen_k=int(p.lengths.max(initial=0)),
        out_dtype=p.out_dtype,
    )


def shifts(p: CacheProblem, k: Array) -> Array:
    """(batch, seqlen_q, heads): by how much a row's scores may be off because elements of the
    rotated q lie between two numbers, and float32 takes the other one. k: (keys, columns)"""
    exact, error = rotated(p, p.q, p.first_rotation, p.steps)
    low, high = ((exact + sign * error).astype(p.q.dtype).astype(np.float64) for sign in (-1, 1))
    finite = np.where(np.isfinite(k), np.abs(k), 0).astype(np.float64)
    scale = p.q.shape[-1] ** -0.5 if p.softmax_scale is None else abs(p.softmax_scale)
    columns = np.where(np.isfinite(high - low), high - low, 0) * finite.max(0, initial=0)
    return columns.sum(-1) * scale


def scale_rounding(problem: Problem) -> tuple[float, float]:
    """(most, mean) of what one rounding of every probability to q's dtype does to out.

    A kernel multiplies a probability by its value's scale, and rounds the product for the tensor
    cores: an error of at most half a unit in the last place of each summand. The naive program
    rounds the probability alone. That of a single key is 1, which has no error to compare with.
    """
    if problem.q.dtype.name not in ROUNDING:
        return 0.0, 0.0
    unit = ROUNDING[problem.q.dtype.name] + float(np.finfo(np.float32).eps)
    size = truth(replace(problem, v=np.abs(problem.v))).out
    size = size[np.isfinite(size)]
    return (unit * float(size.max()), unit * float(size.mean())) if size.size else (0.0, 0.0)


def attention(p: CacheProblem, k_cache: Array, v_cache: Array) -> Reference:
    """Of a cache that holds the new rows already."""
    problem = dense(p, k_cache, v_cache)
    plain = None
    if k_cache.dtype in LARGEST:
        plain = dense(p, k_cache, v_cache, exact=False)
    result = reference_of(problem, plain)
    if k_cache.dtype in LARGEST and p.v_scale is not None:
        most, mean = scale_rounding(problem)
        result = replace(
            result,
            max_error=max(result.max_error, most),
            mean_error=max(result.mean_error, mean),
        )
    count, seqlen_q, heads = p.q.shape[:3]
    lse, keyless = (
        x.reshape(heads, count, seqlen_q).swapaxes(0, 1) for x in (result.lse, result.keyless)
    )
    out = result.out.reshape(count, seqlen_q, heads, v_cache.shape[-1])
    result = replace(result, out=out, lse=lse, keyless=keyless)
    if p.rotary_cos is None or not out.size:
        return result
    seen = ~unseen_keys(problem)  # what is hidden may be huge
    shift = shifts(p, problem.k[seen])
    v = np.abs(problem.v[seen].astype(np.float64))
    of_out = 2 * shift * v[np.isfinite(v)].max(initial=0)
    return replace(
        result,
        max_error=result.max_error + float(of_out.max()),
        mean_error=result.mean_error + float(of_out.mean()),
        lse_error=result.lse_error + float(shift.max()),
    )


def answer(p: CacheProblem) -> Answer:
    if p.k_new is None:
        return Answer(attention(p, p.k_cache, p.v_cache), None, None)
    k_cache = p.k_cache.copy()
    with np.errstate(invalid="ignore"):  # NaN and infinity are copied
        k = written(p, p.k_new, p.k_cache, p.k_scale, turn=True)
        k_cache[k.slots, k.rows] = k.value
        if p.v_new is None:
            return Answer(attention(p, k_cache, k_cache[..., : p.head_dim_v]), k, None)
        v = written(p, p.v_new, p.v_cache, p.v_scale, turn=False)
    v_cache = p.v_cache.copy()
    v_cache[v.slots, v.rows] = v.value
    return Answer(attention(p, k_cache, v_cache), k, v)
