"""New rows that a call writes to the cache; single results are the tables' (cases/kvcache.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from backends import capi
from backends.capi import Backend
from backends.tensors import empty, place
from cases.cache_case import Append, CacheCall, CacheCase
from oracle.attention import DTYPES, Array, check
from oracle.kvcache import CACHE_DTYPES, EIGHT_BIT, answer, check_written
from run.forward import bits
from run.kvcache import check_call, run_cache

pytestmark = pytest.mark.hopper

BASE = CacheCase("append", "bf16", (0, 15, 16, 40), 5, causal=True, page=16, append=Append(5))


def without_append(call: CacheCall, new: int) -> CacheCall:
    """The cache as it is now, with the new rows counted."""
    cache = {n: x for n, x in call.cache.items() if not n.startswith(("k_new", "v_new", "rotary"))}
    cache["cache_seqlens"] = place(call.cache["cache_seqlens"].view + np.int32(new), axes="b")
    out, lse = (empty(x.view.shape, x.view.dtype, axes="bshd"[: x.view.ndim]) for x in call[3:5])
    return call._replace(out=out, lse=lse, cache=cache)


@pytest.mark.parametrize("cache_dtype", ["", *EIGHT_BIT])
@pytest.mark.parametrize("splits", [0, 3])
def test_append_then_attend(backend: Backend, cache_dtype: str, splits: int) -> None:
    """The same bits as attention to a cache that holds the rows."""
    case = replace(BASE, cache_dtype=cache_dtype, splits=splits)
    once = run_cache(backend, case.call())
    twice = run_cache(backend, without_append(once, BASE.new))
    assert bits(twice.out.view) == bits(once.out.view)
    assert bits(twice.lse.view) == bits(once.lse.view)
    assert bits(twice.k_cache.storage) == bits(once.k_cache.storage)


@pytest.mark.parametrize("neox", [False, True])
def test_token_by_token_is_prefill(backend: Backend, neox: bool) -> None:
    """A decoder's steps leave the same cache, bit by bit, and the same results."""
    case = replace(BASE, id="steps", lengths=(0, 3), sq=20, append=Append(20, 32, neox))
    whole = run_cache(backend, case.call())
    call = case.call()
    out, lse = [], []
    for t in range(case.new):
        at = slice(t, t + 1)
        cache = call.cache | {
            name: place(call.cache[name].view[:, at]) for name in ("k_new", "v_new")
        }
        cache["cache_seqlens"] = place(call.cache["cache_seqlens"].view + np.int32(t), axes="b")
        step = call._replace(
            q=place(call.q.view[:, at]),
            out=empty((2, 1, case.heads, case.d), DTYPES["bf16"]),
            lse=empty((2, case.heads, 1), DTYPES["fp32"], axes="bhs"),
            cache=cache,
        )
        run_cache(backend, step)
        out.append(step.out.view)
        lse.append(step.lse.view)
    for name in ("k_cache", "v_cache"):
        assert bits(getattr(call, name).storage) == bits(getattr(whole, name).storage), name
    expected = case.expected().reference
    check(np.concatenate(out, 1), np.concatenate(lse, 2), expected)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT)
def test_every_number_is_rounded_right(backend: Backend, cache_dtype: str, dtype: str) -> None:
    """All 16-bit numbers, and of float32 the numbers about all ties."""
    if dtype not in {row.dtype for row in backend.rows("decode")}:
        return
    kind = DTYPES[dtype]
    numbers = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "fp32":
        x = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        x = np.resize(x, 0x8000)
        values = np.concatenate([x, -np.nextafter(x, np.float32(1))])
    else:
        values = numbers.view(kind)
    given = values
    if cache_dtype == "int8":  # has no NaN: it becomes 0
        values = np.where(np.isnan(values.astype(np.float32)), kind.type(0), values)
    case = CacheCase("numbers", dtype, (0,), 1, 1, 1, 64, cache_dtype=cache_dtype)
    case = replace(case, append=Append(1024), poison=False, window=(0, 0))
    call = case.call()

    def append(x: Array) -> None:
        call.cache["k_new"].view[...] = x.reshape(1, 1024, 1, 64)
        call.cache["v_new"].view[...] = x[::-1].reshape(1, 1024, 1, 64)

    append(values)
    expected = answer(call.problem())
    append(given)
    run_cache(backend, call)
    assert expected.k and expected.v
    check_written("k_cache", call.k_cache.view, expected.k)
    check_written("v_cache", call.v_cache.view, expected.v)
    if cache_dtype != "int8":
        stored = call.k_cache.view[expected.k.slots, expected.k.rows].ravel()
        nan = np.isnan(values.astype(np.float32))
        assert np.isnan(stored[nan].astype(np.float32)).all()


def test_values_are_copied_bit_by_bit(backend: Backend) -> None:
    """NaN's payload, infinity, -0 and subnormal numbers."""
    case = replace(BASE, dtype="fp16", lengths=(0,), append=Append(64), sq=64, page=0, heads_k=1)
    odd = np.array([0x7E55, 0xFC00, 0x7C00, 0x8000, 0x0001, 0x83FF], np.uint16).view(np.float16)
    call = case.call()
    call.cache["v_new"].view[...] = np.resize(odd, (1, 64, 1, 64))
    call.cache["k_new"].view[...] = np.resize(odd[::-1], (1, 64, 1, 64))
    new = {name: call.cache[f"{name}_new"].view.copy() for name in "kv"}
    run_cache(backend, call)
    for name, tensor in (("k", call.k_cache), ("v", call.v_cache)):
        assert bits(tensor.view[:, :64]) == bits(new[name]), name


def test_rotation_keeps_nan_in_its_pair(backend: Backend) -> None:
    case = replace(BASE, dtype="fp16", append=Append(5, 32, True))
    call, before = case.call(), case.call()
    for one in (call, before):
        one.cache["k_new"].view[1, 2, 0, 3] = np.nan
    rows = answer(before.problem()).k
    assert rows is not None
    assert np.isnan(rows.value.astype(np.float32)).sum() == 2
    run_cache(backend, call)
    check_written("k_cache", call.k_cache.view, rows)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_table_that_is_too_short(backend: Backend, causal: bool) -> None:
    """A GPU takes the last row; a CPU refuses, and writes nothing."""
    case = replace(BASE, lengths=(3, 40), causal=causal, append=Append(5, 32), poison=False)
    call, before = case.call(), case.call()
    for one, name in itertools.product((call, before), ("rotary_cos", "rotary_sin")):
        one.cache[name] = place(one.cache[name].view[:42].copy(), axes="sd")
    if backend.is_cpu:
        with pytest.raises(capi.CallError, match="rotary_cos has 42 rows; sequence 1 needs 45"):
            run_cache(backend, call)
        for a, b in zip(call.tensors, before.tensors, strict=True):
            assert bits(a.storage) == bits(b.storage)
        return
    check_call(run_cache(backend, call), before, answer(before.problem()))


@pytest.mark.parametrize("row", [-1, -(1 << 31), 11, (1 << 31) - 1])
def test_rotation_by_rows_that_are_not(backend: Backend, row: int) -> None:
    """Of 15 rows the first new key of 5 may have row 10: a GPU takes rows that there are; a CPU
    refuses, and writes nothing."""
    append = Append(5, 32, seqlens=(0, 10, 3, 4))
    case = replace(BASE, append=append, poison=False)
    call, before = case.call(), case.call()
    for one in (call, before):
        one.cache["rotary_seqlens"].view[1] = row
    if backend.is_cpu:
        message = rf"rotary_seqlens\[1\] is {row}; 0 to 10 is allowed: rotary_cos has 15 rows, 5"
        with pytest.raises(capi.CallError, match=message):
            run_cache(backend, call)
        for a, b in zip(call.tensors, before.tensors, strict=True):
            assert bits(a.storage) == bits(b.storage)
        return
    check_call(run_cache(backend, call), before, answer(before.problem()))


def test_all_cache_types_are_tried(backend: Backend) -> None:
    """Of each type of q that this backend has, each type of cache."""
    for dtype in sorted({row.dtype for row in backend.rows("decode")}):
        for cache_dtype in ("", *sorted(CACHE_DTYPES.keys() - DTYPES.keys())):
            case = replace(BASE, dtype=dtype, cache_dtype=cache_dtype)
            check_call(run_cache(backend, case.call()), case.call(), case.expected())
