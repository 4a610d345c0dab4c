"""Attention written the plain way: the truth in float64, and the error a plain program would make.

A result passes if it is at most twice as far from the truth as the naive program in the tensors'
own precision (and 1.5 times on average), plus what one rounding of the result and one of the scores
cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def visible_keys(seqlen_q: int, seqlen_k: int, causal: bool) -> Array:
    """(seqlen_q, seqlen_k): the keys that each query sees, aligned at the bottom right."""
    if not causal:
        return np.ones((seqlen_q, seqlen_k), bool)
    return np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)


Matmul = Callable[[Array, Array], Array]


def _one_by_one(a: Array, b: Array) -> Array:
    """a @ b as a plain loop sums it up; NumPy's own product is more exact than that."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., i, None, :]
    return total


def _product(p: Array, v: Array, visible: Array, matmul: Matmul) -> Array:
    """p v, where a masked NaN or infinity in v does not count."""
    finite = np.isfinite(v)
    out = matmul(p, np.where(finite, v, v.dtype.type(0)))
    for key in np.unique(np.nonzero(~finite)[2]):
        counts = visible[:, key, None] & ~finite[:, :, key, None, :]
        out += np.where(counts, p[..., key, None] * v[:, :, key, None, :], out.dtype.type(0))
    return out


def _attend(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None,
    causal: bool,
    *,
    compute: np.dtype[Any],
    storage: np.dtype[Any],
    matmul: Matmul = np.matmul,
) -> tuple[Array, Array]:
    """Every intermediate is computed in `compute` and rounded to `storage`."""

    def rounded(x: Array) -> Array:
        return x if storage == compute else x.astype(storage).astype(compute)

    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(compute).swapaxes(1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    visible = visible_keys(q.shape[2], k.shape[2], causal)
    with np.errstate(all="ignore"):
        scores = rounded(rounded(matmul(q, k.swapaxes(-1, -2))) * compute.type(scale))
        scores[..., ~visible] = -np.inf
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        top[np.isneginf(top)] = 0  # a row without keys: exp(-inf - 0) = 0
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        lse = (top + np.log(total))[..., 0]
        p = rounded(p / np.where(total == 0, compute.type(1), total))
        out = rounded(_product(p, v, visible, matmul))
    return out.swapaxes(1, 2), lse


def attention(
    q: Array, k: Array, v: Array, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Array, Array]:
    """(out, lse) in float64; for float64 inputs in the widest type that NumPy has."""
    high = np.dtype(np.longdouble if q.dtype == np.float64 else np.float64)
    return _attend(q, k, v, softmax_scale, causal, compute=high, storage=high)


def naive(
    q: Array, k: Array, v: Array, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Array, Array]:
    """out with scores, softmax and product rounded to q's dtype; lse without that rounding."""
    compute = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    exact: dict[str, Any] = {"compute": compute, "storage": compute}
    if compute == q.dtype:
        return _attend(q, k, v, softmax_scale, causal, **exact, matmul=_one_by_one)
    out, _ = _attend(q, k, v, softmax_scale, causal, compute=compute, storage=q.dtype)
    _, lse = _attend(q, k, v, softmax_scale, causal, **exact)
    return out.astype(q.dtype), lse


@dataclass(frozen=True)
class Reference:
    """The truth, and how far from it a result may be."""

    out: Array
    lse: Array
    max_error: float
    mean_error: float
    lse_error: float


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
    return float(epsilon * (1 + min(score, 1000)) * v[np.isfinite(v)].max(initial=0))


def reference(
    q: Array, k: Array, v: Array, softmax_scale: float | None = None, causal: bool = False
) -> Reference:
    out, lse = attention(q, k, v, softmax_scale, causal)
    plain_out, plain_lse = naive(q, k, v, softmax_scale, causal)
    error = _finite_error(plain_out.astype(out.dtype), out)
    rounded = out[np.isfinite(out)].astype(q.dtype)
    third = q.dtype.type(0.3)
    rounding = np.abs(((rounded + third) - third).astype(out.dtype) - rounded.astype(out.dtype))
    unit = _score_rounding(lse, v)
    return Reference(
        out=out,
        lse=lse,
        max_error=float(2 * error.max(initial=0) + 2 * rounding.max(initial=0)) + unit,
        mean_error=float(1.5 * error.mean() + rounding.mean()) + unit if error.size else 0.0,
        lse_error=2 * float(_finite_error(plain_lse, lse).max(initial=0)),
    )


def _same_pattern(name: str, actual: Array, truth: Array) -> None:
    for what, is_it in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        where = np.argwhere(is_it(actual) != is_it(truth))[:3].tolist()
        assert not where, f"{name}: {what} where it must not be, or missing, first at {where}"


def check(out: Array, lse: Array | None, expected: Reference) -> None:
    """Raise AssertionError unless out and lse are as exact as a naive program's."""
    high = expected.out.dtype
    actual = out.astype(high)
    _same_pattern("out", actual, expected.out)
    keyless = np.isneginf(expected.lse).swapaxes(1, 2)
    assert not actual[keyless].any(), "out: a row without keys is not 0"

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
    if lse is None:
        return
    assert lse.dtype == np.float32, f"lse: dtype {lse.dtype}"
    truth = expected.lse.astype(np.float64)
    _same_pattern("lse", lse, truth)
    finite = np.isfinite(truth)
    error = np.abs(lse[finite] - truth[finite])
    allowed = 1e-5 + 1e-5 * np.abs(truth[finite]) + expected.lse_error
    wrong = error > allowed
    assert not wrong.any(), (
        f"lse: error {error[wrong].max():.3g} at {np.argwhere(finite)[wrong][0].tolist()}, "
        f"allowed {allowed[wrong].min():.3g}"
    )
