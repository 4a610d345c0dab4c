"""Attention written the plain way: the truth in float64, and the error a plain program would make.

A result passes if it is at most twice as far from the truth as the naive program in the tensors'
own precision (and 1.5 times on average), plus what one rounding of the result and one of the scores
cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from oracle import philox
from oracle.problem import (
    DTYPES,
    Array,
    Batch,
    Problem,
    batches,
    rows_of,
    select,
    unseen_keys,
)

# What other modules take from here as well.
__all__ = ["DTYPES", "Array", "Problem", "unseen_keys"]

Matmul = Callable[[Array, Array], Array]


def one_by_one(a: Array, b: Array) -> Array:
    """a @ b as a plain loop sums it up; NumPy's own product is more exact than that."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., i, None, :]
    return total


def masked_product(p: Array, v: Array, hidden: Array, matmul: Matmul) -> Array:
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


def capped_scores(problem: Problem, q: Array, k: Array, precision: Precision) -> Array:
    """(n, heads, seqlen_q, seqlen_k): scores before bias, ALiBi and masks."""
    rounded, number = precision.rounded, precision.compute.type
    scores = precision.matmul(q, k.swapaxes(-1, -2))
    scores = rounded(rounded(scores) * number(problem.scale))
    if problem.softcap > 0:
        softcap = number(problem.softcap)
        scores = rounded(softcap * rounded(np.tanh(rounded(scores / softcap))))
    return scores


def final_scores(problem: Problem, batch: Batch, scores: Array, precision: Precision) -> Array:
    """What the softmax gets, of capped_scores()."""
    rounded, number = precision.rounded, precision.compute.type
    bias = problem.bias
    if bias is not None and bias.dtype not in (np.bool_, np.uint8):
        bias = select(bias, batch.sequences, scores.shape[2:])
        lowest = bias.dtype.type(max(_lowest(precision.storage), _lowest(bias.dtype)))
        bias = np.where(bias < lowest, lowest, bias)  # -inf is hidden anyway
        scores = rounded(scores + bias.astype(precision.compute))
    if problem.alibi_slopes is not None:
        slopes = np.atleast_2d(problem.alibi_slopes)[:, :, None, None]
        slopes = select(slopes, batch.sequences, (1, 1)).astype(precision.compute)
        distance = batch.distances.astype(precision.compute)
        scores = rounded(scores - slopes * distance)
    return np.where(batch.hidden, number(-np.inf), scores)


def gathered(problem: Problem, batch: Batch, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """q, k and v of a batch: (n, heads, rows, head_dim), the keys' heads repeated."""
    rows = ((problem.q, batch.rows_q), (problem.k, batch.rows_k), (problem.v, batch.rows_k))
    q, k, v = (rows_of(x)[index].astype(dtype).swapaxes(1, 2) for x, index in rows)
    group = problem.group
    return q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)


def softmax(problem: Problem, scores: Array, precision: Precision) -> tuple[Array, Array]:
    """Probabilities, and their LSE (n, heads, seqlen_q)."""
    number = precision.compute.type
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
    return precision.rounded(p / np.where(total == 0, number(1), total)), lse


def keep_factors(problem: Problem, batch: Batch, precision: Precision) -> Array | None:
    """What dropout multiplies probabilities by."""
    if problem.dropout_p == 0:
        return None
    number, levels = precision.compute.type, philox.LEVELS
    kept = select(problem.dropout_mask(), batch.sequences, batch.hidden.shape[2:])
    factor = number(levels) / number(levels - philox.threshold(problem.dropout_p))
    return np.where(kept, factor, number(0))


def _attend_batch(
    problem: Problem, batch: Batch, precision: Precision
) -> tuple[Array, Array, Array]:
    """out (n, heads, seqlen_q, head_dim_v), lse (n, heads, seqlen_q), max_logits (n, heads)"""
    q, k, v = gathered(problem, batch, precision.compute)
    scores = final_scores(problem, batch, capped_scores(problem, q, k, precision), precision)
    p, lse = softmax(problem, scores, precision)
    keep = keep_factors(problem, batch, precision)
    if keep is not None:
        p = np.where(keep == 0, keep, precision.rounded(p * keep))
    out = masked_product(p, v, batch.hidden, precision.matmul)
    return out.astype(precision.out), lse, scores.max((2, 3), initial=-np.inf)


def _attend(problem: Problem, precision: Precision) -> Result:
    count, heads, seqlen_q, _ = problem.shape
    rows = len(rows_of(problem.q))
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
        return _attend(problem, Precision(compute, compute, out, one_by_one))
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


FEW = 16  # results, of which the naive program may get all right by chance
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def _rounding(problem: Problem, lse: Array, results: int) -> float:
    """What one rounding of the largest score does to out, and where there are few results, one of
    its probability: a small result may be exact by chance."""
    epsilon = np.finfo(np.float64 if problem.q.dtype == np.float64 else np.float32).eps / 2
    score = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    seen = rows_of(problem.v)[~unseen_keys(problem)]  # what is hidden may be huge
    v = np.abs(seen.astype(np.float64))
    relative = epsilon * (1 + min(score, 20000))
    if results < FEW:
        relative += ROUNDING.get(problem.q.dtype.name, 0.0)
    return float(relative * v[np.isfinite(v)].max(initial=0))


def reference_of(problem: Problem, rounded_problem: Problem | None = None) -> Reference:
    """`rounded_problem`, if given, is what the naive program sees: inputs that it has made itself,
    in its own precision."""
    true, plain = truth(problem), naive(rounded_problem or problem)
    out = true.out
    out_dtype = problem.out_dtype or problem.q.dtype
    error = _finite_error(plain.out.astype(out.dtype), out)
    rounded = out[np.isfinite(out)].astype(out_dtype)
    third = out_dtype.type(0.3)
    rounding = np.abs(((rounded + third) - third).astype(out.dtype) - rounded.astype(out.dtype))
    unit = _rounding(problem, true.lse, error.size)
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


def same_pattern(name: str, actual: Array, truth: Array) -> None:
    for what, is_it in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        where = np.argwhere(is_it(actual) != is_it(truth))[:3].tolist()
        assert not where, f"{name}: {what} where it must not be, or missing, first at {where}"


def _check_logarithm(name: str, actual: Array, truth: Array, error_of_naive: float) -> None:
    assert actual.dtype == np.float32, f"{name}: dtype {actual.dtype}"
    truth = truth.astype(np.float64)
    same_pattern(name, actual, truth)
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
    same_pattern("out", actual, expected.out)
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
