"""Gradients of attention written the plain way, by the equations in attention.h.

A gradient passes if it is at most three times as far from the truth as a naive program in the
tensors' own precision (and 1.5 times on average), plus what one rounding of the result and a few of
the float32 intermediates cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from oracle.attention import (
    Precision,
    capped_scores,
    final_scores,
    gathered,
    keep_factors,
    masked_product,
    one_by_one,
    softmax,
    truth,
)
from oracle.problem import Array, Batch, Problem, batches, rows_of

NAMES = ("dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes")


@dataclass(frozen=True)
class Given:
    """What the backward is given. `out` and `lse` are the forward's; None: the true ones."""

    problem: Problem
    dout: Array
    dlse: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)  # unlike their tensors'

    def inputs(self) -> dict[str, Array]:
        """By the name of its gradient, each tensor that has one."""
        problem = self.problem
        inputs = {"dq": problem.q, "dk": problem.k, "dv": problem.v}
        small = {"dsinks": problem.sinks, "dalibi_slopes": problem.alibi_slopes}
        if problem.bias is not None and problem.bias.dtype not in (np.bool_, np.uint8):
            small["dbias"] = problem.bias
        return inputs | {name: x for name, x in small.items() if x is not None}

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self.dtypes.get(name, self.inputs()[name].dtype)


class Terms(NamedTuple):
    """Of some equally long sequences; all (n, heads, ...)."""

    q: Array
    k: Array
    v: Array
    dout: Array
    hidden: Array  # where P is 0 whatever the tensors hold
    p: Array
    kept_p: Array  # times dropout's factors
    dp: Array
    delta: Array  # (n, heads, seqlen_q, 1)
    ds: Array
    slope: Array  # of the softcap
    sink_p: Array | None  # (n, heads, seqlen_q, 1)


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _heads_first(problem: Problem, x: Array) -> Array:
    """An LSE as (heads, rows of q)."""
    return x if problem.packed else x.swapaxes(0, 1).reshape(problem.shape[1], -1)


def _of_rows(given: Given, x: Array, batch: Batch) -> Array:
    """The part of an LSE that belongs to a batch: (n, heads, seqlen_q, 1)."""
    return _heads_first(given.problem, x)[:, batch.rows_q].swapaxes(0, 1)[..., None]


def _terms(given: Given, batch: Batch, precision: Precision, recompute: bool) -> Terms:
    """`recompute`: from the given LSE and out; else as automatic differentiation would."""
    problem, rounded, zero = given.problem, precision.rounded, precision.compute.type(0)
    q, k, v = gathered(problem, batch, precision.compute)
    dout = rows_of(given.dout)[batch.rows_q].astype(precision.compute).swapaxes(1, 2)
    dout = rounded(dout)
    capped = capped_scores(problem, q, k, precision)
    scores = final_scores(problem, batch, capped, precision)
    if recompute:
        assert given.lse is not None
        lse = _of_rows(given, given.lse, batch).astype(precision.compute)
        p = np.exp(scores - lse)
    else:
        p, lse = softmax(problem, scores, precision)
        lse = lse[..., None]
    hidden = batch.hidden | np.isinf(lse)
    dout = np.where(hidden.all(-1, keepdims=True), zero, dout)  # a row without keys gives 0
    p = np.where(hidden, zero, p)
    keep = keep_factors(problem, batch, precision)
    kept_p, dp = p, rounded(precision.matmul(dout, transposed(v)))
    if keep is not None:
        kept_p = np.where(keep == 0, zero, rounded(p * keep))
        dp = rounded(dp * keep)
    dp = np.where(hidden, zero, dp)
    if recompute:
        assert given.out is not None
        out = rows_of(given.out)[batch.rows_q].astype(precision.compute).swapaxes(1, 2)
        delta = (dout * out).sum(-1, keepdims=True)
    else:
        delta = (p * dp).sum(-1, keepdims=True)
    if given.dlse is not None:
        delta = delta - _of_rows(given, given.dlse, batch)
    ds = rounded(np.where(hidden, zero, p * (dp - delta)))
    slope = np.ones_like(p)
    if problem.softcap > 0:
        tanh = rounded(capped / precision.compute.type(problem.softcap))
        slope = np.where(hidden, zero, rounded(slope - rounded(tanh * tanh)))
    sink_p = None
    if problem.sinks is not None:
        sinks = problem.sinks.astype(precision.compute)[:, None, None]
        sink_p = np.where(np.isfinite(lse), rounded(np.exp(sinks - lse)), zero)
    return Terms(q, k, v, dout, hidden, p, kept_p, dp, delta, ds, slope, sink_p)


def _magnitudes(given: Given, batch: Batch, terms: Terms) -> Terms:
    """The same with the absolute value of all that is added up, in units of its rounding."""

    def size(x: Array) -> Array:
        return np.abs(np.where(np.isfinite(x), x, x.dtype.type(0)))

    q, k, v, dout, p, kept_p = (
        size(x) for x in (terms.q, terms.k, terms.v, terms.dout, terms.p, terms.kept_p)
    )
    assert given.out is not None
    out = size(rows_of(given.out)[batch.rows_q].astype(q.dtype).swapaxes(1, 2))
    delta = (dout * out).sum(-1, keepdims=True)
    if given.dlse is not None:
        delta = delta + size(_of_rows(given, given.dlse, batch))
    # P is exp(score - LSE): as wrong as these two are.
    score = abs(given.problem.scale) * (q @ transposed(k)) * size(terms.slope)
    assert given.lse is not None
    lse = size(_of_rows(given, given.lse, batch)).astype(q.dtype)
    factor = 1 + np.minimum(score + given.problem.softcap + lse, 100000)
    p, kept_p = p * factor, kept_p * factor
    ds = kept_p * (dout @ transposed(v)) + p * delta
    # The slope of a softcap is a difference of numbers up to 1.
    slope, sink_p = np.ones_like(p), terms.sink_p
    sink_p = sink_p if sink_p is None else size(sink_p) * (1 + np.minimum(lse, 100000))
    return Terms(q, k, v, dout, terms.hidden, p, kept_p, terms.dp, delta, ds, slope, sink_p)


class Sums:
    """The gradients of a problem, added up batch by batch."""

    def __init__(self, given: Given, precision: Precision) -> None:
        self.problem = given.problem
        self.precision = precision
        zeros = {n: np.zeros(x.shape, precision.compute) for n, x in given.inputs().items()}
        self.gradients = zeros

    def add(self, batch: Batch, terms: Terms, scale: float, sign: int) -> None:
        """`sign` is that of what is subtracted in the equations."""
        rounded, matmul = self.precision.rounded, self.precision.matmul
        number = self.precision.compute.type
        ds0 = rounded(rounded(terms.ds * terms.slope) * number(scale))
        hidden = terms.hidden
        dq = masked_product(ds0, terms.k, hidden, matmul)
        dk = masked_product(transposed(ds0), terms.q, transposed(hidden), matmul)
        dv = masked_product(transposed(terms.kept_p), terms.dout, transposed(hidden), matmul)
        rows_of(self.gradients["dq"])[batch.rows_q] = dq.swapaxes(1, 2)
        for name, x in (("dk", dk), ("dv", dv)):
            heads_k = x.shape[1] // self.problem.group
            by_group = x.reshape(len(x), heads_k, self.problem.group, *x.shape[2:]).sum(2)
            rows_of(self.gradients[name])[batch.rows_k] = by_group.swapaxes(1, 2)
        if "dbias" in self.gradients:
            self._add_dbias(batch, terms.ds)
        if terms.sink_p is not None:
            self.gradients["dsinks"] += sign * (terms.sink_p * terms.delta).sum((0, 2, 3))
        if "dalibi_slopes" in self.gradients:
            distance = batch.distances.astype(self.precision.compute)
            part = sign * rounded(terms.ds * distance).sum((2, 3))
            slopes = self.gradients["dalibi_slopes"]
            if slopes.ndim == 2 and len(slopes) > 1:
                slopes[batch.sequences] += part
            else:
                slopes += part.sum(0)

    def _add_dbias(self, batch: Batch, ds: Array) -> None:
        dbias = self.gradients["dbias"]
        for axis in (1, 2, 3):
            if dbias.shape[axis] == 1:
                ds = ds.sum(axis, keepdims=True)
        rows, columns = ds.shape[2:]
        if len(dbias) == 1:
            dbias[0, :, :rows, :columns] += ds.sum(0)
        else:
            dbias[batch.sequences, :, :rows, :columns] += ds


def _differentiate(given: Given, precision: Precision, recompute: bool) -> tuple[Sums, Sums]:
    """The gradients and, if recomputed, how large the sums in them may be."""
    values, sizes = Sums(given, precision), Sums(given, precision)
    with np.errstate(all="ignore"):
        for batch in batches(given.problem):
            terms = _terms(given, batch, precision, recompute)
            values.add(batch, terms, given.problem.scale, -1)
            if recompute:
                scale = abs(given.problem.scale)
                sizes.add(batch, _magnitudes(given, batch, terms), scale, 1)
    return values, sizes


def _with_forward(given: Given) -> Given:
    if given.out is not None and given.lse is not None:
        return given
    forward = truth(given.problem)
    return replace(given, out=forward.out, lse=forward.lse)


def _high(given: Given) -> Precision:
    high = np.dtype(np.longdouble if given.problem.q.dtype == np.float64 else np.float64)
    return Precision(high, high, high)


def true_gradients(given: Given) -> dict[str, Array]:
    return _differentiate(_with_forward(given), _high(given), True)[0].gradients


def naive_gradients(given: Given) -> dict[str, Array]:
    """What automatic differentiation of a program in q's dtype gives, `out` and `lse` its own.

    Sums over a group of heads and over broadcast axes are rounded once, at the end.
    """
    storage = given.problem.q.dtype
    compute = np.dtype(np.float64 if storage == np.float64 else np.float32)
    matmul = one_by_one if compute == storage else np.matmul
    precision = Precision(compute, storage, compute, matmul)
    gradients = _differentiate(given, precision, False)[0].gradients
    with np.errstate(all="ignore"):
        return {name: x.astype(given.dtype_of(name)) for name, x in gradients.items()}


class Bound(NamedTuple):
    """The truth of one gradient, and how far from it a result may be."""

    truth: Array
    dtype: np.dtype[Any]
    allowed: Array
    allowed_mean: float
    zero: Array  # where nothing is added up


def _bound(given: Given, name: str, true: Array, error: Array, size: Array) -> Bound:
    """`error` is the naive program's; `size` is that of the sums."""
    dtype = given.dtype_of(name)
    rounded = true[np.isfinite(true)].astype(dtype)
    third = dtype.type(0.3)
    rounding = np.abs(((rounded + third) - third).astype(true.dtype) - rounded.astype(true.dtype))
    # A naive gradient may be exact by chance, above all where a softmax is a choice: then roundings
    # of the score and of sums in float32 show. So they do in what a softcap leaves.
    epsilon = np.finfo(np.float64 if given.problem.q.dtype == np.float64 else np.float32).eps
    unit = epsilon * size
    one = np.abs(true) * true.dtype.type(ml_dtypes.finfo(dtype).eps) / 2  # its own rounding
    return Bound(
        true,
        dtype,
        3 * error.max(initial=0) + 2 * rounding.max(initial=0) + unit + one,
        float(1.5 * error.mean() + rounding.mean() + unit.mean()) if error.size else 0.0,
        size == 0,
    )


def gradient_bounds(given: Given) -> dict[str, Bound]:
    """Of a result that is made from the given out and lse."""
    exact = true_gradients(replace(given, out=None, lse=None))
    plain = naive_gradients(given)
    given = _with_forward(given)
    values, sizes = _differentiate(given, _high(given), True)
    bounds = {}
    for name, true in values.gradients.items():
        finite = np.isfinite(exact[name])
        error = np.abs(plain[name].astype(true.dtype)[finite] - exact[name][finite])
        assert np.isfinite(error).all(), f"{name}: the naive program overflows: no yardstick"
        bounds[name] = _bound(given, name, true, error, sizes.gradients[name])
    return bounds


def check_gradients(actual: Mapping[str, Array], bounds: Mapping[str, Bound]) -> None:
    """Raise AssertionError unless all are as exact as a naive program's."""
    assert actual.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert actual[name].dtype == bound.dtype, f"{name}: dtype {actual[name].dtype}"
        _check(name, actual[name].astype(bound.truth.dtype), bound)


def _check(name: str, actual: Array, bound: Bound) -> None:
    finite = np.isfinite(bound.truth)
    where = np.argwhere(np.isfinite(actual) != finite)
    assert not len(where), (
        f"{name}: {len(where)} elements are NaN or infinite and must not be, or the reverse, "
        f"first at {where[:3].tolist()}"
    )
    where = np.argwhere(bound.zero & (actual != 0) & finite)
    assert not len(where), (
        f"{name}: {len(where)} elements must be 0, the first at {where[:3].tolist()}"
    )
    error, allowed = np.abs(actual[finite] - bound.truth[finite]), bound.allowed[finite]
    if not error.size:
        return
    worst = (error - allowed).argmax()
    assert error[worst] <= allowed[worst], (
        f"{name}: error {error[worst]:.3g} at {np.argwhere(finite)[worst].tolist()}, allowed "
        f"{allowed[worst]:.3g}; {(error > allowed).sum()} of {error.size} are wrong"
    )
    few = error.size < 64  # whose mean is up to chance
    assert few or error.mean() <= bound.allowed_mean, (
        f"{name}: mean error {error.mean():.3g}, allowed {bound.allowed_mean:.3g}"
    )
