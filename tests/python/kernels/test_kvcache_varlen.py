"""Attention with a cache of sequences with different numbers of queries, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.capi import Backend, CallError
from backends.tensors import empty, place
from cases.auxiliary import int32_tensor
from cases.cache_case import Append, CacheCall, CacheCase
from cases.packed_cache import PackedCall, PackedCase, Row
from run.forward import bits
from run.kvcache import expected_kernel, run_cache
from run.packed_cache import verify_packed

pytestmark = pytest.mark.hopper


def test_case(backend: Backend, packed_cache_case: PackedCase) -> None:
    verify_packed(backend, packed_cache_case)


BASE = CacheCase("base", "fp16", causal=True, page=16, heads=4, heads_k=2)
ROWS = (Row(90, 1), Row(0, 0), Row(130, 70), Row(64, 5), Row(7, 1), Row(200, 33))


def alone(packed: PackedCall, index: int) -> CacheCall:
    """One sequence of a call that appends nothing, with the whole cache."""
    rows = slice(packed.ends[index], packed.ends[index + 1])
    call, one = packed.call, slice(index, index + 1)
    cache: dict[str, Any] = dict(call.cache)
    for name, axes in (("cache_seqlens", "b"), ("block_table", "bs")):
        cache[name] = place(np.ascontiguousarray(cache[name].view[one]), axes=axes)
    out, lse = call.out.view[rows], call.lse.view[:, rows]
    length = packed.ends[index + 1] - packed.ends[index]
    return call._replace(
        q=place(call.q.view[rows], axes="shd"),
        out=empty(out.shape, out.dtype, axes="shd"),
        lse=empty(lse.shape, lse.dtype, axes="hs"),
        cache=cache,
        options=call.options | {"cu_seqlens_q": int32_tensor([0, length])},
    )


@pytest.mark.parametrize("how", [{"splits": 1}, {"split_size": 64}], ids=str)
def test_batch_invariance(backend: Backend, how: dict[str, int]) -> None:
    """A sequence has the same bits alone and beside others, whatever max_seqlen_q is."""
    packed = PackedCase("invariance", ROWS, replace(BASE, **how)).call()
    call = run_cache(backend, packed.call)
    bounded = PackedCase("invariance", ROWS, replace(BASE, **how), max_seqlen=70).call()
    assert bits(run_cache(backend, bounded.call).out.view) == bits(call.out.view)
    for index, row in enumerate(ROWS):
        rows = slice(packed.ends[index], packed.ends[index + 1])
        for longest in (0, row.queries):
            one = run_cache(backend, alone(packed, index), max_seqlen_q=longest)
            assert bits(one.out.view) == bits(call.out.view[rows]), f"out {index} differs"
            assert bits(one.lse.view) == bits(call.lse.view[:, rows]), f"lse {index} differs"


def test_same_bits_as_without_packing(backend: Backend) -> None:
    """Where the same kernel runs: for single tokens, and above a tile until prefill begins."""
    rows = (Row(90, 1), Row(130, 50), Row(64, 1))
    packed = PackedCase("like-dense", rows, replace(BASE, splits=1)).call()
    call = run_cache(backend, packed.call)
    for index, part in enumerate(packed.parts):
        dense = run_cache(backend, part)
        of = slice(packed.ends[index], packed.ends[index + 1])
        assert bits(dense.out.view[0]) == bits(call.out.view[of])
        assert bits(dense.lse.view[0]) == bits(call.lse.view[:, of])


def test_without_lse(backend: Backend) -> None:
    case = PackedCase("no-lse", ROWS, replace(BASE, splits=2))
    call = case.call().call
    backend.forward_with_kvcache(*call.tensors[:4], None, cache=call.cache, **call.options)
    assert bits(call.out.view) == bits(run_cache(backend, case.call().call).out.view)


def test_empty_batch(backend: Backend) -> None:
    call = PackedCase("empty", (Row(5, 0),), BASE).call().call
    cache = call.cache | {
        "cache_seqlens": int32_tensor([]),
        "block_table": place(call.cache["block_table"].view[:0], axes="bs"),
    }
    options = call.options | {"cu_seqlens_q": int32_tensor([0])}
    run_cache(backend, call._replace(cache=cache, options=options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [0, 1, 1, 71, 76, 77]}, "block_table has shape"),
        ({"cu_seqlens_q": []}, "cu_seqlens_q has shape (0,); expected batch + 1 elements"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1"),
        ({"cu_seqlens_k": [0, 1]}, "cu_seqlens_k is given"),
        ({"cu_seqlens_k_new": [0] * 7}, "cu_seqlens_k_new is given without cu_seqlens_q and k_new"),
        ({"tree_mask": np.ones((3, 70), bool)}, "tree_mask has shape (3, 70)"),
        ({"lse": np.zeros((110, 4), np.float32)}, "lse has shape (110, 4)"),
        (
            {"out": np.zeros((1, 110, 4, 64), np.float16)},
            "out has 4 dimensions, shape (1, 110, 4, 64); expected 3",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments(backend: Backend, changes: dict[str, Any], message: str) -> None:
    call = PackedCase("wrong", ROWS, BASE).call().call
    out = bits(call.out.storage)
    for name, given in changes.items():
        value: Any = given
        if isinstance(given, list):
            value = int32_tensor(given)
        elif isinstance(given, np.ndarray):
            value = place(given, axes="bshd"[-given.ndim :])
        if name in ("out", "lse"):
            call = call._replace(**{name: value})
        elif name.startswith(("cu_seqlens_k_new", "tree")):
            call = call._replace(cache=call.cache | {name: value})
        else:
            call = call._replace(options=call.options | {name: value})
    with pytest.raises(CallError) as error:
        run_cache(backend, call)
    assert message in str(error.value)
    if "out" not in changes:
        assert bits(call.out.storage) == out


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens_q", [1, 1, 1, 71, 76, 77, 110], "cu_seqlens_q[0] is 1; it must be 0"),
        ("cu_seqlens_q", [0, 2, 1, 71, 76, 77, 110], "cu_seqlens_q[2] is 1, less than"),
        ("cu_seqlens_q", [0, 1, 1, 71, 76, 77, 109], "it must be the number of rows of q, 110"),
        ("cache_seqlens", [90, 0, 130, 64, 7, 300], "cache_seqlens[5] is 300; 0 to"),
    ],
)
def test_wrong_lengths(cpu: Backend, name: str, value: list[int], message: str) -> None:
    """On the CPU, or with validate, what does not fit is said before anything is written."""
    call = PackedCase("lengths", ROWS, BASE).call().call
    out = bits(call.out.storage)
    with pytest.raises(CallError) as error:
        run_cache(cpu, call, **{name: int32_tensor(value)})
    assert message in str(error.value)
    assert bits(call.out.storage) == out


def test_new_keys_that_do_not_fit(cpu: Backend) -> None:
    rows = (Row(10, 3, 3), Row(20, 2, 2))
    call = PackedCase("room", rows, replace(BASE, append=Append())).call().call
    with pytest.raises(CallError, match=r"cache_seqlens\[1\] is 31; 0 to 30 is allowed"):
        run_cache(cpu, call, cache_seqlens=int32_tensor([10, 31]))


@pytest.mark.parametrize(
    "ends",
    [
        [-5, -1, 3, 2, 1 << 30, -(1 << 31), 40],
        [0, 1 << 30, 0, 110, 110, 110, (1 << 31) - 1],
        [110, 90, 80, 70, 40, 1, 0],
        [-(1 << 31)] * 7,
        [(1 << 31) - 1] * 7,
    ],
    ids=str,
)
@pytest.mark.parametrize("appends", [False, True])
def test_lengths_are_clamped_on_a_gpu(gpu: Backend, ends: list[int], appends: bool) -> None:
    """Wrong lengths give wrong numbers, and no access outside of the tensors."""
    rows = tuple(row._replace(new=row.queries if appends else 0) for row in ROWS)
    base = replace(BASE, append=Append(rotary=16) if appends else None, splits=2)
    packed = PackedCase("clamped", rows, base, own_new=appends).call()
    call = run_cache(gpu, packed.call, cu_seqlens_q=int32_tensor(ends))
    for name in ("out", "lse"):
        getattr(call, name).check_canaries(name)


def test_kernels_by_length(gpu: Backend) -> None:
    """Single tokens take the kernel that they take without packing."""
    call = PackedCase("kernels", (Row(40, 1), Row(9, 1)), BASE, max_seqlen=1).call().call
    old = gpu.library.launches()
    run_cache(gpu, call)
    launched = {n: c - old[n] for n, c in gpu.library.launches().items() if c != old[n]}
    assert launched == {expected_kernel(gpu, BASE): 1}


@pytest.mark.parametrize("page", [0, 16])
def test_cache_without_rows(backend: Backend, page: int) -> None:
    """Prefill and single tokens that see no key: there is no memory to read."""
    rows = (Row(0, 130), Row(0, 1))
    packed = PackedCase("no-rows", rows, replace(BASE, page=page)).call()
    call, none = packed.call, np.zeros((len(rows), 0), np.int32)
    slots = slice(0, 0 if page else len(rows))
    empty_cache = call.k_cache.view[slots, : page or 0]
    cache: dict[str, Any] = dict(call.cache)
    if page:
        cache["block_table"] = place(none, axes="bs")
    caches = {name: place(np.ascontiguousarray(empty_cache)) for name in ("k_cache", "v_cache")}
    run_cache(backend, call._replace(cache=cache, **caches))
    assert not call.out.view.any()
    assert np.isneginf(call.lse.view).all()
