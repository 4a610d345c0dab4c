"""A forward that continues the result over other keys, and a backward that adds to gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.capi import Backend
from backends.tensors import Tensor, empty, place
from cases.case import Case, Features, Packed, Tensors
from cases.gradient_case import GradientCase, GradientLayouts
from oracle.attention import DTYPES, Array
from run.backward import run_call, supports_backward
from run.forward import bits, run, supports

pytestmark = pytest.mark.hopper

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "heads_k": 1, "d": 128},
    "wide": {"d": 256, "dv": 256, "sq": 40},
    "odd": {"d": 40, "dv": 20},
    "no-keys": {"sk": 0},
    "sinks": {"features": Features(sinks="normal")},
    "alibi": {"features": Features(alibi="h")},
    "bias": {"features": Features(alibi="h", softcap=3.0, dropout_p=0.2)},
    "packed": {"features": Features(packed=Packed((70, 0, 33), (90, 5, 0)), window=(30, 10))},
    "nonfinite": {"values": "nan_v_element", "causal": True},
}


def case_of(name: str, dtype: str) -> Case:
    base = {"sq": 150, "sk": 90, "heads": 2, "heads_k": 2}
    return Case(f"state-{name}-{dtype}", dtype, **{**base, **SHAPES[name]})


def prior_of(
    case: Case, dtype: str, lse_dtype: str = "fp32", layout: str = "rows_odd"
) -> tuple[Tensor, Tensor]:
    """A result over other keys, which some rows have not seen any of; what these hold is NaN."""
    _, _, _, out, lse = case.tensors()
    random = np.random.default_rng(5)
    values = random.standard_normal(out.shape).astype(DTYPES[dtype])
    lses = random.choice([0.1, 1, 30], lse.shape) * random.standard_normal(lse.shape)
    lses = np.where(random.integers(0, 5, lse.shape) == 0, -np.inf, lses)
    values[np.isinf(lses).swapaxes(-1, -2)] = np.nan
    axes = "shd" if case.features.packed else "bshd"
    return (
        place(values, layout, axes),
        place(lses.astype(DTYPES[lse_dtype]), "contiguous", "hs" if axes == "shd" else "bhs"),
    )


def joined(prior: tuple[Tensor, Tensor], now: Tensors) -> tuple[Array, Array]:
    """In float64; a row that has seen nothing yet weighs nothing."""
    lses = np.stack([prior[1].view, now.lse.view]).astype(float)
    top = lses.max(0)
    weights = np.exp(lses - np.where(np.isinf(top), 0, top))
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = top + np.log(total)
        weights = weights / np.where(total == 0, 1, total)
    of_rows = [w.swapaxes(-1, -2)[..., None] for w in weights]
    outs = (prior[0].view.astype(float), now.out.view.astype(float))
    terms = [np.where(w == 0, 0, w * out) for w, out in zip(of_rows, outs, strict=True)]
    return terms[0] + terms[1], lse


TOLERANCES = {"fp64": 1e-6, "fp32": 2e-6, "fp16": 2.0**-10, "bf16": 2.0**-7}


# Where four columns can be read and written together, and where they cannot.
LAYOUTS = ("contiguous", "rows_odd", "step_d", "offset_1")


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "contiguous") for name in SHAPES] + [("causal", layout) for layout in LAYOUTS[1:]],
)
@pytest.mark.parametrize("out_dtype", ["", "fp32"])
def test_forward_continues(backend: Backend, name: str, layout: str, out_dtype: str) -> None:
    """As merge_states joins the result with the one before."""
    for dtype in sorted({row.dtype for row in backend.rows()}):
        state_dtype = "fp64" if dtype == "fp64" else "fp32"
        case = case_of(name, dtype)
        if not supports(backend.name, case) or (out_dtype and dtype == "fp64"):
            continue
        now = run(backend, replace(case, out_dtype=state_dtype))
        prior = prior_of(case, state_dtype, layout=layout)
        expected, lse = joined(prior, now)
        layouts = case.layouts._replace(out=layout if out_dtype else "contiguous")
        asked = replace(case, out_dtype=out_dtype, layouts=layouts)
        found = run(backend, asked, prior_out=prior[0], prior_lse=prior[1])
        tolerance = TOLERANCES[out_dtype or dtype]
        np.testing.assert_allclose(
            found.out.view.astype(float), expected, rtol=tolerance, atol=tolerance
        )
        np.testing.assert_allclose(found.lse.view, lse, rtol=1e-6, atol=1e-6)
        for tensor in (found.out, found.lse):
            tensor.check_canaries(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_is_continued_in_place(backend: Backend, layout: str) -> None:
    """The bits are those that another place would get."""
    for dtype in sorted({row.dtype for row in backend.rows()}):
        state_dtype = "fp64" if dtype == "fp64" else "fp32"
        case = replace(case_of("causal", dtype), out_dtype=state_dtype)
        if not supports(backend.name, case):
            continue
        out, lse = prior_of(case, state_dtype, layout=layout)
        apart = run(backend, case, prior_out=out, prior_lse=lse)
        backend.forward(
            *case.tensors()[:3], out, lse, prior_out=out, prior_lse=lse, **case.options()
        )
        assert bits(out.view) == bits(apart.out.view), dtype
        assert bits(lse.view) == bits(apart.lse.view), dtype
        out.check_canaries("out")
        lse.check_canaries("lse")


def test_a_float64_lse_is_continued(backend: Backend) -> None:
    """On the CPU, where more of an LSE is worth keeping."""
    if not backend.is_cpu:
        return
    for dtype in sorted({row.dtype for row in backend.rows()}):
        state_dtype = "fp64" if dtype == "fp64" else "fp32"
        case = replace(case_of("plain", dtype), out_dtype=state_dtype)
        tensors = case.tensors()
        wide = empty(tensors.lse.shape, DTYPES["fp64"], "contiguous", "bhs")
        now = tensors._replace(lse=wide)
        backend.forward(*now, **case.options())
        prior = prior_of(case, state_dtype, "fp64")
        expected, lse = joined(prior, now)
        found = case.tensors()._replace(lse=empty(wide.shape, DTYPES["fp64"], axes="bhs"))
        backend.forward(*found, prior_out=prior[0], prior_lse=prior[1], **case.options())
        np.testing.assert_allclose(found.out.view, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.lse.view, lse, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("which", ["dq", "dkv"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "contiguous") for name in SHAPES if name != "nonfinite"]
    + [("causal", layout) for layout in LAYOUTS[1:]],
)
def test_gradients_are_added(
    backend: Backend, name: str, layout: str, deterministic: bool, which: str
) -> None:
    """Only to those that are asked for."""
    for dtype in sorted({row.dtype for row in backend.rows("backward")}):
        forward = replace(case_of(name, dtype), sq=70, sk=min(90, case_of(name, dtype).sk))
        grad_dtype = "fp64" if dtype == "fp64" else "fp32"
        case = GradientCase(
            forward,
            grad_dtype=grad_dtype,
            deterministic=deterministic,
            layouts=GradientLayouts(dq=layout, dk=layout, dv=layout),
        )
        if not supports_backward(backend.name, case):
            continue
        alone, call = case.call(), case.call()
        run_call(backend, alone)
        before = {}
        for gradient in ("dq", "dk", "dv"):
            view = call.tensors[gradient].view
            view[...] = np.random.default_rng(7).standard_normal(view.shape)
            before[gradient] = view.astype(float)
        call.gradient[f"accumulate_{which}"] = 1
        run_call(backend, call)
        for gradient, old in before.items():
            is_added = gradient in {"dq": ("dq",), "dkv": ("dk", "dv")}[which]
            expected = alone.tensors[gradient].view + (old if is_added else 0)
            # Without `deterministic`, atomic additions come in any order.
            np.testing.assert_allclose(
                call.tensors[gradient].view, expected, rtol=1e-5, atol=1e-5, err_msg=gradient
            )
            call.tensors[gradient].check_canaries(gradient)
