"""Caches of 8 bits; single results are the tables' (cases/kvcache.py)."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from backends import capi
from backends.capi import Backend
from backends.emulated import emulated
from backends.tensors import place
from cases.cache_case import CacheCall, CacheCase
from oracle.kvcache import CACHE_DTYPES, EIGHT_BIT, answer
from run.forward import bits
from run.kvcache import check_call, run_cache

__all__ = ["emulated"]  # a fixture

NONFINITE = (("e4m3", np.nan), ("e5m2", np.nan), ("e5m2", np.inf), ("e5m2", -np.inf))
BASE = CacheCase("8-bit", "fp16", (77, 30), 3, page=16, scale=0.05)


def codes(cache_dtype: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(CACHE_DTYPES[cache_dtype])


@pytest.mark.parametrize("scales", ["", "head", "slot", "row"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_every_element_as_a_value(backend: Backend, cache_dtype: str, scales: str) -> None:
    """One key: the result is the value, in every column."""
    for dtype in sorted({row.dtype for row in backend.rows("decode")}):
        case = CacheCase("values", dtype, (1,), 1, 1, 1, page=16, poison=False)
        case = replace(case, cache_dtype=cache_dtype, scales=scales, out_dtype="fp32")
        if dtype == "fp64":
            case = replace(case, out_dtype="")
        for first in range(0, 256, 64):
            call = case.call()
            page = call.cache["block_table"].view[0, 0]
            elements = codes(cache_dtype)[first : first + 64]
            call.v_cache.view[page, 0, 0] = elements
            run_cache(backend, call)
            scale = np.float32(1)
            if scales:
                table = call.cache["v_scale"].view
                scale = table[(page, 0)[: table.ndim - 1]][0]
            wanted = elements.astype(np.float64) * float(scale)
            with np.errstate(invalid="ignore"):  # of infinities
                error = np.abs(call.out.view[0, 0, 0] - wanted)
            # One probability of 1, times the scale, may be rounded to q's type before the product.
            unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(dtype, 2.0**-23)
            finite = np.isfinite(wanted)
            np.testing.assert_array_equal(call.out.view[0, 0, 0][~finite], wanted[~finite])
            allowed = (unit if scales else 0) * np.abs(wanted[finite])
            assert (error[finite] <= allowed).all()


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_every_element_as_a_key(backend: Backend, cache_dtype: str) -> None:
    """One key, and queries that are one in one column: the LSE is the element."""
    case = CacheCase("keys", "fp16", (1,), 1, 256, 1, 256, scale=0.5, poison=False)
    case = replace(case, cache_dtype=cache_dtype, scales="head")
    call = case.call()
    call.q.view[0, 0] = np.eye(256, dtype=np.float16)
    elements = codes(cache_dtype).astype(np.float64)
    call.k_cache.view[0, 0, 0] = np.where(np.isfinite(elements), elements, 0).astype(
        CACHE_DTYPES[cache_dtype]
    )
    run_cache(backend, call)
    scale = float(call.cache["k_scale"].view[0])
    wanted = 0.5 * scale * call.k_cache.view[0, 0, 0].astype(np.float64)
    np.testing.assert_allclose(call.lse.view[0, :, 0], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scales", ["", "head", "slot", "row"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_scales_of_one_are_none(backend: Backend, cache_dtype: str, scales: str) -> None:
    case = replace(BASE, cache_dtype=cache_dtype)
    none = run_cache(backend, case.call())
    if not scales:  # what the bits are compared with is right
        check_call(none, case.call(), case.expected())
        return
    call = case.call()
    places = ("head", "slot", "row").index(scales)
    shape = (*call.k_cache.view.shape[:places], 2)
    for name in ("k_scale", "v_scale"):
        call.cache[name] = place(np.ones(shape, np.float32), axes=("h", "bh", "bsh")[places])
    run_cache(backend, call)
    np.testing.assert_array_equal(call.out.view, none.out.view)
    np.testing.assert_array_equal(call.lse.view, none.lse.view)


@pytest.mark.parametrize("scales", ["", "row"])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize(("cache_dtype", "value"), NONFINITE)
def test_visible_nonfinite(
    backend: Backend, cache_dtype: str, value: float, which: str, scales: str
) -> None:
    """What is not finite and a query sees is in its result, and in no other's."""
    case = replace(BASE, cache_dtype=cache_dtype, scales=scales, sq=6, causal=True, splits=3)

    def poisoned() -> CacheCall:
        call = case.call()
        if scales:
            call.cache["v_scale"].view[...] *= -1
        table = call.cache["block_table"].view
        for row in (75, 20):  # of sequence 0; the former is seen by the last queries alone
            page = table[0, row // 16]
            getattr(call, which).view[page, row % 16, 1, 7] = value
            if row == 75 and which == "k_cache":
                break
        return call

    call = run_cache(backend, poisoned())
    check_call(call, poisoned(), answer(poisoned().problem()))
    reached = ~np.isfinite(call.out.view.astype(np.float32))
    assert reached.any()
    assert not reached[1].any()
    assert not reached[:, :, :2].any()


@pytest.mark.parametrize("scales", ["slot", "row"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_scales_may_be_broadcast_views(backend: Backend, cache_dtype: str, scales: str) -> None:
    """Scales with any strides, and one number for all of them."""
    case = replace(BASE, cache_dtype=cache_dtype, scales=scales, poison=False)
    axes = {"slot": "bh", "row": "bsh"}[scales]
    plain = run_cache(backend, case.call())
    for layout in ("flip_bh", "step_h", "sbhd"):
        call = case.call()
        for name in ("k_scale", "v_scale"):
            call.cache[name] = place(call.cache[name].view.copy(), layout, axes)
        run_cache(backend, call)
        assert bits(call.out.view) == bits(plain.out.view), layout
    call = case.call()
    for name in ("k_scale", "v_scale"):
        call.cache[name] = place(np.full_like(call.cache[name].view, 0.5), "expand_bh", axes)
    check_call(run_cache(backend, call), call, answer(call.problem()))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_nonfinite_scale_of_a_head(
    backend: Backend, cache_dtype: str, value: float, splits: int
) -> None:
    """It reaches the rows that see a key, of its head alone. Rows that see none are 0: the first of
    three queries of two keys."""
    case = replace(BASE, lengths=(40, 2), cache_dtype=cache_dtype, scales="head", splits=splits)
    case = replace(case, causal=True)
    one = run_cache(backend, case.call())
    call = case.call()
    call.cache["v_scale"].view[1] = value
    run_cache(backend, call)
    group = call.out.view.shape[2] // 2
    assert not np.isfinite(call.out.view[0, :, group:]).any()
    assert not np.isfinite(call.out.view[1, 1:, group:]).any()
    assert (call.out.view[1, 0] == 0).all()
    assert bits(call.out.view[:, :, :group]) == bits(one.out.view[:, :, :group])


@pytest.mark.parametrize("factor", [1e5, np.inf, np.nan])
@pytest.mark.parametrize("scales", ["slot", "row"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_scale_of_a_key_reaches_the_rows_that_see_it(
    backend: Backend, cache_dtype: str, scales: str, factor: float
) -> None:
    """Key 0 is seen by the first of 16 queries alone. On a GPU a thread has this row and another,
    and P counts in units of the largest scale."""
    page = 1 if scales == "slot" else 0
    case = CacheCase("one-scale", "fp16", (200,), 16, 1, 1, page=page, window=(184, 0))
    case = replace(case, cache_dtype=cache_dtype, scales=scales, out_dtype="fp32", scale=0.05)

    def changed() -> CacheCall:
        call = case.call()
        scale = call.cache["v_scale"].view
        place = (call.cache["block_table"].view[0, 0], 0) if page else (0, 0)
        scale[place[: scale.ndim - 1]] *= np.float32(factor)
        return call

    one, other = run_cache(backend, case.call()), run_cache(backend, changed())
    assert bits(other.out.view[:, 1:]) == bits(one.out.view[:, 1:])
    if np.isfinite(factor):
        check_call(other, changed(), answer(changed().problem()))
    else:
        assert not np.isfinite(other.out.view[:, 0]).any()


def check_range(backend: Backend, cache_dtype: str, exponent: int) -> None:
    case = replace(BASE, dtype="bf16", cache_dtype=cache_dtype, out_dtype="fp32")
    case = replace(case, scale=0.05 * 2.0**-exponent)
    call = case.call()
    view = call.q.view
    view[...] = (view.astype(np.float64) * 2.0**exponent).astype(view.dtype)
    wanted = case.call()
    wanted.q.view[...] = view
    check_call(run_cache(backend, call), wanted, answer(wanted.problem()))


@pytest.mark.parametrize("exponent", [-120, -40, 0, 40, 115])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_range_of_bfloat16_queries(backend: Backend, cache_dtype: str, exponent: int) -> None:
    """Each row of Q has a range of its own, and numbers that are small beside its largest."""
    check_range(backend, cache_dtype, exponent)


@pytest.mark.emulated
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_subnormal_queries(emulated: ctypes.CDLL, cache_dtype: str) -> None:
    """Numbers that GPU code would take for 0 in most of its instructions."""
    emulated.emu_flush_subnormals(1)
    check_range(capi.backend("emulated-sm80"), cache_dtype, -120)
