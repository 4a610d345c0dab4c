"""Sums of dq that calls over the same rows keep in memory of their own."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from backends import capi
from backends.capi import Backend, CallError
from backends.tensors import Tensor, empty
from cases.case import Case
from cases.gradient_case import Call, GradientCase
from oracle.attention import DTYPES
from run.backward import backward_row, run_call
from run.forward import bits

pytestmark = pytest.mark.hopper

ROWS, KEYS = slice(0, 300), slice(0, 90)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"heads": 2, "heads_k": 1},
    "128": {"d": 128, "batch": 1},
    "odd": {"d": 40, "dv": 20},
    "scale": {"scale": 0.3},
    "copied": {"d": 36},  # whose rows have no whole pieces of 16 bytes
}


class Step(NamedTuple):
    """A call over some rows and keys."""

    rows: slice = ROWS
    keys: slice = slice(0, 0)
    begin: bool = False
    end: bool = False


# Each pair of a row and a key is in one step at most.
ORDERS = {
    "one call": [Step(keys=KEYS, begin=True, end=True)],
    "without keys": [
        Step(begin=True),
        Step(slice(128, 300), slice(40, 90)),
        Step(slice(0, 128), slice(0, 40)),
        Step(end=True),
    ],
    "with keys": [
        Step(keys=slice(0, 40), begin=True),
        Step(slice(256, 300), slice(60, 90)),
        Step(keys=slice(40, 60), end=True),
    ],
}


def case_of(name: str, dtype: str) -> GradientCase:
    base = {"sq": 300, "sk": 90, "heads": 1, "heads_k": 1, "batch": 2}
    return GradientCase(Case(f"dq-sums-{name}-{dtype}", dtype, **{**base, **SHAPES[name]}))


def part_of(tensor: Tensor, axis: int, part: slice) -> Tensor:
    axis = range(len(tensor.shape))[axis]
    shape = (*tensor.shape[:axis], part.stop - part.start, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, offset=tensor.offset + part.start * tensor.strides[axis])


def call_of(case: GradientCase, step: Step) -> Call:
    """Without sums that are kept."""
    call = case.call()
    tensors, gradient = call.tensors, call.gradient
    for name in ("q", "out", "dout", "dq"):
        tensors[name] = part_of(tensors[name], 1, step.rows)
    for name in ("k", "v", "dk", "dv"):
        tensors[name] = part_of(tensors[name], 1, step.keys)
    tensors["lse"] = part_of(tensors["lse"], -1, step.rows)
    gradient["dlse"] = part_of(gradient["dlse"], -1, step.rows)
    return call


def sums_of(backend: Backend, case: GradientCase) -> Tensor | None:
    """Their memory; None: the kernel keeps none, or there is none."""
    call = case.call()
    if backward_row(backend, case) is None:
        return None
    given = {name: x for name, x in call.options.items() if name == "softmax_scale"}
    options, size = backend.options(**given), ctypes.c_size_t()
    with backend.on_device([call.tensors["q"]]) as (q,):
        status = backend.library.entry("anyflash_dq_sums_size")(
            ctypes.byref(q),
            *(ctypes.c_int64(case.forward.head_dim_v), ctypes.byref(options), ctypes.byref(size)),
        )
    assert status == capi.OK, backend.library.last_error
    return empty((size.value // 4,), DTYPES["fp32"], axes="d") if size.value else None


def keep(call: Call, sums: Tensor, step: Step) -> Call:
    call.gradient.update(
        dq_sums=sums,
        dq_sums_first=step.rows.start,
        dq_sums_rows=ROWS.stop,
        dq_sums_begin=step.begin,
        dq_sums_end=step.end,
    )
    return call


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SHAPES)
def test_kept(backend: Backend, name: str, order: str) -> None:
    """dq is what the calls give alone, added up, and is written by the last one alone; dk and dv
    are those of each call."""
    found = 0
    for dtype in sorted({row.dtype for row in backend.rows("backward")}):
        case = replace(case_of(name, dtype), grad_dtype="fp64" if dtype == "fp64" else "fp32")
        sums = sums_of(backend, case)
        if sums is None:
            continue
        found += 1
        expected = np.zeros(case.call().tensors["dq"].shape)
        for step in ORDERS[order]:
            alone, call = call_of(case, step), keep(call_of(case, step), sums, step)
            run_call(backend, alone)
            run_call(backend, call)
            expected[:, step.rows] += alone.tensors["dq"].view
            for gradient in ("dk", "dv"):
                one, other = (x.tensors[gradient] for x in (call, alone))
                assert bits(one.view) == bits(other.view), gradient
                one.check_canaries(gradient)
            dq = call.tensors["dq"]
            if step.end:
                np.testing.assert_allclose(dq.view, expected, rtol=1e-5, atol=1e-5)
                dq.check_canaries("dq")
            else:
                assert bits(dq.storage) == bits(call_of(case, step).tensors["dq"].storage)
        sums.check_canaries("dq_sums")
    assert found or backend.name == "emulated-sm80"


@pytest.mark.parametrize("name", ["plain", "copied"])
def test_the_last_call_rounds_and_adds(backend: Backend, name: str) -> None:
    """It may have gradients of 16 bits, or add to dq. Calls before it leave dq of 16 bits alone."""
    found = 0
    for dtype in sorted({row.dtype for row in backend.rows("backward")} - {"fp64"}):
        case = case_of(name, dtype)
        in_float = replace(case, grad_dtype="fp32")
        sums = sums_of(backend, case)
        if sums is None:
            continue
        found += 1
        whole = Step(keys=KEYS, begin=True)
        alone, first = call_of(in_float, whole), keep(call_of(case, whole), sums, whole)
        untouched = first.tensors["dq"].view
        untouched[...] = 1  # not a canary, which the workspace is full of, too
        run_call(backend, alone)
        run_call(backend, first)
        assert (untouched == 1).all()
        for kind in (case, in_float):
            call = keep(call_of(kind, Step()), sums, Step(end=True))
            dq = call.tensors["dq"].view
            expected = alone.tensors["dq"].view
            if kind is in_float:
                dq[...] = 1
                call.gradient["accumulate_dq"] = 1
                expected = expected + 1
            run_call(backend, call)
            tolerance = 1e-5 if dq.dtype == np.float32 else 1e-2
            np.testing.assert_allclose(
                dq.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance
            )
    assert found or backend.name == "emulated-sm80"


def refusal(backend: Backend, call: Call) -> str:
    """Nothing is written."""
    outputs = [*call.outputs().values(), call.gradient["dq_sums"]]
    before = [bits(x.storage) for x in outputs]
    with pytest.raises(CallError) as error:
        run_call(backend, call)
    assert [bits(x.storage) for x in outputs] == before
    assert error.value.status in (capi.INVALID_VALUE, capi.UNSUPPORTED)
    return error.value.message


def test_refused(backend: Backend) -> None:
    for dtype in sorted({row.dtype for row in backend.rows("backward")}):
        case = case_of("plain", dtype)
        whole = Step(keys=KEYS, begin=True, end=True)
        sums = sums_of(backend, case)
        if sums is None:
            some = empty((10**6,), DTYPES["fp32"], axes="d")
            message = refusal(backend, keep(call_of(case, whole), some, whole))
            assert "keeps no sums of such a call" in message
            continue
        for count, message in ((0, "no elements"), (sums.shape[0] - 1, "are needed")):
            small = part_of(sums, 0, slice(0, count))
            assert message in refusal(backend, keep(call_of(case, whole), small, whole))
        unaligned = part_of(sums, 0, slice(1, sums.shape[0]))
        assert "a multiple of 16 bytes" in refusal(
            backend, keep(call_of(case, whole), unaligned, whole)
        )
        for name, value in (("first", 1), ("rows", 299), ("rows", 2**40)):
            call = keep(call_of(case, whole), sums, whole)
            call.gradient[f"dq_sums_{name}"] = value
            assert "they must lie within" in refusal(backend, call)
        if backend.is_cpu:
            continue
        for rows in (slice(64, 300), slice(128, 200)):
            step = Step(rows, KEYS)
            message = refusal(backend, keep(call_of(case, step), sums, step))
            assert "multiples of 128" in message
        call = keep(call_of(case, whole), sums, whole)
        call.gradient["deterministic"] = 1
        assert "keeps no sums of such a call" in refusal(backend, call)
        call = keep(call_of(case, whole), sums, whole)
        call.options["dropout_p"] = 0.5
        assert "keeps no sums of such a call" in refusal(backend, call)
