"""Attention written the plain way: the truth in float64, and the error a plain program would make.

A result passes if it is at most twice as far from the truth as the naive program in the tensors'
own precision (and 1.5 times on average), plus what one rounding of the result and one of the scores
cost. Packed sequences are computed apart; those of the same lengths share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import philox

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
    sinks: Array | None = None
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: Array | None = None
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

    def dropout_mask(self) -> Array:
        return philox.kept(self.shape, self.dropout_p, self.seed, self.offset)


class Batch(NamedTuple):
    """Some equally long sequences of a problem; rows count in q, k and v without a batch axis."""

    sequences: Array  # (n,)
    rows_q: Array  # (n, seqlen_q)
    rows_k: Array  # (n, seqlen_k)
    hidden: Array  # (n or 1, heads or 1, seqlen_q, seqlen_k)


def _select(x: Array, sequences: Array, shape: tuple[int, ...]) -> Array:
    """The part of a (batch or 1, heads or 1, rows or 1, columns or 1) tensor that counts."""
    x = x if x.shape[0] == 1 else x[sequences]
    return x[:, :, : shape[0], : shape[1]]


def _hidden(problem: Problem, sequences: Array, seqlen_q: int, seqlen_k: int) -> Array:
    last = np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    key = np.arange(seqlen_k)
    hidden = np.zeros((1, 1, seqlen_q, seqlen_k), bool)
    right = 0 if problem.causal else problem.window_right
    if problem.window_left >= 0:
        hidden |= key < last - min(problem.window_left, FAR)
    if right >= 0:
        hidden |= key > last + min(right, FAR)
    if problem.bias is not None:
        bias = _select(problem.bias, sequences, (seqlen_q, seqlen_k))
        boolean = bias.dtype in (np.bool_, np.uint8)
        hidden = hidden | (bias == (0 if boolean else bias.dtype.type(-np.inf)))
    if problem.block_mask is not None:
        dropped = problem.block_mask == 0
        for axis, size in zip((2, 3), problem.block_size, strict=True):
            dropped = dropped.repeat(size, axis)
        hidden = hidden | _select(dropped, sequences, (seqlen_q, seqlen_k))
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
    for pair in np.unique(lengths, axis=0):
        sequences = np.nonzero((lengths == pair).all(1))[0]
        rows_q = first_q[sequences, None] + np.arange(pair[0])
        rows_k = first_k[sequences, None] + np.arange(pair[1])
        yield Batch(sequences, rows_q, rows_k, _hidden(problem, sequences, *map(int, pair)))


def _rows(x: Array) -> Array:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])


def unseen_keys(problem: Problem) -> Array:
    """(rows of k without a batch axis, heads_k): no query sees them, whatever q and k are."""
    rows, heads_k, _ = _rows(problem.k).shape
    heads = problem.shape[1]
    unseen = np.ones((rows, heads_k), bool)
    for batch in batches(problem):
        shape = (len(batch.sequences), heads, batch.rows_k.shape[1])
        by_head = np.broadcast_to(batch.hidden.all(2), shape)
        by_head = by_head.reshape(shape[0], heads_k, heads // heads_k, shape[2]).all(2)
        unseen[batch.rows_k] = by_head.swapaxes(1, 2)
    return unseen


Matmul = Callable[[Array, Array], Array]


def _one_by_one(a: Array, b: Array) -> Array:
    """a @ b as a plain loop sums it up; NumPy's own product is more exact than that."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., i, None, :]
    return total


def _product(p: Array, v: Array, hidden: Array, matmul: Matmul) -> Array:
    """p v, where a masked NaN or infinity in v does not count."""
    finite = np.isfinite(v)
    out = matmul(p, np.where(finite, v, v.dtype.type(0)))
    for key in np.unique(np.nonzero(~finite)[2]):
        counts = ~hidden[..., key, None] & ~finite[:, :, key, None, :]
        out += np.where(counts, p[..., key, None] * v[:, :, key, None, :], out.dtype.type(0))
    return out


@dataclass(frozen=True)
class Precision:
    """Every intermediate is computed in `compute` and rounded to `storage`."""

    compute: np.dtype[Any]
    storage: np.dtype[Any]
    out: np.dtype[Any]
    matmul: Matmul = np.matmul

    def rounded(self, x: Array) -> Array:
        return x if self.storage == self.compute else x.astype(self.storage).astype(self.compute)


class Result(NamedTuple):
    out: Array  # shapes as in attention.h
    lse: Array
    max_logits: Array
    keyless: Array  # as lse: rows that see no key


def _lowest(dtype: np.dtype[Any]) -> Any:
    return np.longdouble(np.finfo(dtype).min if dtype.kind == "f" else ml_dtypes.finfo(dtype).min)


def _scores(problem: Problem, batch: Batch, q: Array, k: Array, precision: Precision) -> Array:
    """(n, heads, seqlen_q, seqlen_k), in the order of options.h."""
    rounded, number = precision.rounded, precision.compute.type
    scale = problem.softmax_scale
    scores = precision.matmul(q, k.swapaxes(-1, -2))
    scores = rounded(rounded(scores) * number(q.shape[-1] ** -0.5 if scale is None else scale))
    if problem.softcap > 0:
        softcap = number(problem.softcap)
        scores = rounded(softcap * rounded(np.tanh(rounded(scores / softcap))))
    bias = problem.bias
    if bias is not None and bias.dtype not in (np.bool_, np.uint8):
        bias = _select(bias, batch.sequences, scores.shape[2:])
        lowest = bias.dtype.type(max(_lowest(precision.storage), _lowest(bias.dtype)))
        bias = np.where(bias < lowest, lowest, bias)  # -inf is hidden anyway
        scores = rounded(scores + bias.astype(precision.compute))
    if problem.alibi_slopes is not None:
        slopes = np.atleast_2d(problem.alibi_slopes)[:, :, None, None]
        slopes = _select(slopes, batch.sequences, (1, 1)).astype(precision.compute)
        seqlen_q, seqlen_k = scores.shape[2:]
        position = np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
        distance = np.abs(position - np.arange(seqlen_k)).astype(precision.compute)
        scores = rounded(scores - slopes * distance)
    return np.where(batch.hidden, number(-np.inf), scores)


def _attend_batch(
    problem: Problem, batch: Batch, precision: Precision
) -> tuple[Array, Array, Array]:
    """out (n, heads, seqlen_q, head_dim_v), lse (n, heads, seqlen_q), max_logits (n, heads)"""
    rounded, number = precision.rounded, precision.compute.type
    rows = ((problem.q, batch.rows_q), (problem.k, batch.rows_k), (problem.v, batch.rows_k))
    q, k, v = (_rows(x)[index].astype(precision.compute).swapaxes(1, 2) for x, index in rows)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = _scores(problem, batch, q, k, precision)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    sinks = None
    if problem.sinks is not None:
        sinks = problem.sinks.astype(precision.compute)[:, None, None]
        top = np.maximum(top, sinks)
    top[np.isneginf(top)] = 0  # a row without keys: exp(-inf - 0) = 0
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    lse = (top + np.log(total))[..., 0]
    p = rounded(p / np.where(total == 0, number(1), total))
    if problem.dropout_p > 0:
        kept = problem.dropout_mask()[batch.sequences, :, : p.shape[2], : p.shape[3]]
        levels = philox.LEVELS
        factor = number(levels) / number(levels - philox.threshold(problem.dropout_p))
        p = rounded(np.where(kept, p * factor, number(0)))
    out = _product(p, v, batch.hidden, precision.matmul)
    return out.astype(precision.out), lse, scores.max((2, 3), initial=-np.inf)


def _attend(problem: Problem, precision: Precision) -> Result:
    count, heads, seqlen_q, _ = problem.shape
    rows = len(_rows(problem.q))
    out = np.zeros((rows, heads, problem.v.shape[-1]), precision.out)
    lse = np.zeros((heads, rows), precision.compute)
    max_logits = np.full((count, heads), -np.inf, precision.compute)
    keyless = np.ones((heads, rows), bool)
    with np.errstate(all="ignore"):
        for batch in batches(problem):
            part, part_lse, max_logits[batch.sequences] = _attend_batch(problem, batch, precision)
            out[batch.rows_q] = part.swapaxes(1, 2)
            lse[:, batch.rows_q] = part_lse.swapaxes(0, 1)
            keyless[:, batch.rows_q] = batch.hidden.all(-1).swapaxes(0, 1)
    if problem.packed:
        return Result(out, lse, max_logits, keyless)
    by_row = [x.reshape(heads, count, seqlen_q).swapaxes(0, 1) for x in (lse, keyless)]
    out = out.reshape(*problem.q.shape[:3], problem.v.shape[-1])
    return Result(out, by_row[0], max_logits, by_row[1])


def truth(problem: Problem) -> Result:
    """In float64; for float64 inputs in the widest type that NumPy has."""
    high = np.dtype(np.longdouble if problem.q.dtype == np.float64 else np.float64)
    return _attend(problem, Precision(high, high, high))


def naive(problem: Problem) -> Result:
    """out with scores, softmax and product rounded to q's dtype; lse without that rounding."""
    q_dtype = problem.q.dtype
    compute = np.dtype(np.float64 if q_dtype == np.float64 else np.float32)
    out = problem.out_dtype or q_dtype
    if compute == q_dtype:
        return _attend(problem, Precision(compute, compute, out, _one_by_one))
    exact = _attend(problem, Precision(compute, compute, compute))
    return exact._replace(out=_attend(problem, Precision(compute, q_dtype, out)).out)


@dataclass(frozen=True)
class Reference:
    """The truth, and how far from it a result may be."""

    out: Array
    lse: Array
    max_logits: Array
    keyless: Array
    max_error: float
    mean_error: float
    lse_error: float
    max_logits_error: float


def _finite_error(actual: Array, truth: Array) -> Array:
    finite = np.isfinite(truth)
    error = np.abs(actual[finite] - truth[finite])
    assert np.isfinite(error).all(), "the naive program overflows: the case is no yardstick"
    return error


def _score_rounding(lse: Array, v: Array) -> float:
    """What one rounding of the largest score does to out: a small result may be exact by chance."""
    epsilon = np.finfo(np.float64 if v.dtype == np.float64 else np.float32).eps / 2
    score = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    v = np.abs(v.astype(np.float64))
    return float(epsilon * (1 + min(score, 20000)) * v[np.isfinite(v)].max(initial=0))


def reference_of(problem: Problem) -> Reference:
    true, plain = truth(problem), naive(problem)
    out = true.out
    out_dtype = problem.out_dtype or problem.q.dtype
    error = _finite_error(plain.out.astype(out.dtype), out)
    rounded = out[np.isfinite(out)].astype(out_dtype)
    third = out_dtype.type(0.3)
    rounding = np.abs(((rounded + third) - third).astype(out.dtype) - rounded.astype(out.dtype))
    unit = _score_rounding(true.lse, problem.v)
    return Reference(
        *true[:3],
        keyless=true.keyless,
        max_error=float(2 * error.max(initial=0) + 2 * rounding.max(initial=0)) + unit,
        mean_error=float(1.5 * error.mean() + rounding.mean()) + unit if error.size else 0.0,
        lse_error=2 * float(_finite_error(plain.lse, true.lse).max(initial=0)),
        max_logits_error=2 * float(_finite_error(plain.max_logits, true.max_logits).max(initial=0)),
    )


def reference(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Reference:
    """`options` are further fields of Problem."""
    return reference_of(Problem(q, k, v, softmax_scale, causal, **options))


def _same_pattern(name: str, actual: Array, truth: Array) -> None:
    for what, is_it in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        where = np.argwhere(is_it(actual) != is_it(truth))[:3].tolist()
        assert not where, f"{name}: {what} where it must not be, or missing, first at {where}"


def _check_logarithm(name: str, actual: Array, truth: Array, error_of_naive: float) -> None:
    assert actual.dtype == np.float32, f"{name}: dtype {actual.dtype}"
    truth = truth.astype(np.float64)
    _same_pattern(name, actual, truth)
    finite = np.isfinite(truth)
    error = np.abs(actual[finite] - truth[finite])
    allowed = 1e-5 + 1e-5 * np.abs(truth[finite]) + error_of_naive
    wrong = error > allowed
    assert not wrong.any(), (
        f"{name}: error {error[wrong].max():.3g} at {np.argwhere(finite)[wrong][0].tolist()}, "
        f"allowed {allowed[wrong].min():.3g}"
    )


def check(
    out: Array, lse: Array | None, expected: Reference, max_logits: Array | None = None
) -> None:
    """Raise AssertionError unless all are as exact as a naive program's."""
    high = expected.out.dtype
    actual = out.astype(high)
    _same_pattern("out", actual, expected.out)
    assert not actual[expected.keyless.swapaxes(-1, -2)].any(), "out: a row without keys is not 0"

    comparable = np.isfinite(expected.out)
    error = np.abs(actual[comparable] - expected.out[comparable])
    if error.size:
        worst = np.argwhere(comparable)[error.argmax()].tolist()
        assert error.max() <= expected.max_error, (
            f"out: error {error.max():.3g} at {worst}, allowed {expected.max_error:.3g}"
        )
        assert error.mean() <= expected.mean_error, (
            f"out: mean error {error.mean():.3g}, allowed {expected.mean_error:.3g}"
        )
    if lse is not None:
        _check_logarithm("lse", lse, expected.lse, expected.lse_error)
    if max_logits is not None:
        # Which of NaN and the numbers is the largest, nobody says.
        known = ~np.isnan(expected.max_logits)
        _check_logarithm(
            "max_logits", max_logits[known], expected.max_logits[known], expected.max_logits_error
        )
