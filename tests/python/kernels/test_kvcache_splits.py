"""Splits of the keys: they change rounding, and nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends import capi
from backends.abi import KvCacheOptions, structure
from backends.capi import Backend
from backends.emulated import emulated
from cases.cache_case import Append, CacheCase
from oracle.attention import Array
from run.forward import bits
from run.kvcache import check_call, run_cache

pytestmark = pytest.mark.hopper

__all__ = ["emulated"]

BASE = CacheCase("splits", "bf16", (700, 0, 65, 64), 2, page=16, causal=True, heads=8)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (300, 0)},
    "sinks": {"sinks": True},
    "tree": {"tree": "b", "causal": False},
    "alibi": {"alibi": "bh", "softcap": 20.0},
    "append": {"append": Append(3, 32)},
    "e4m3": {"cache_dtype": "e4m3", "scales": "slot"},
    "e5m2": {"cache_dtype": "e5m2", "scales": "row"},
}

MANY_SPLITS = ("plain", "emulated-sm90")  # of emulated GPUs: there so many launches take a while


@pytest.mark.parametrize("name", FEATURES)
def test_results_do_not_depend_on_splits(backend: Backend, name: str) -> None:
    """In float32: what is left of the differences is rounding."""
    case = replace(BASE, out_dtype="fp32", **FEATURES[name])
    one = run_cache(backend, replace(case, splits=1).call())
    v = np.abs(one.out.view).max()
    is_slow = backend.name.startswith("emulated") and (name, backend.name) != MANY_SPLITS
    most = 300 if is_slow else 65535
    for how in ({"splits": 2}, {"splits": 11}, {"splits": most}, {"split_size": 64}, {}):
        other = run_cache(backend, replace(case, **how).call())
        check_call(other, case.call(), case.expected())
        np.testing.assert_allclose(other.out.view, one.out.view, rtol=0, atol=0.02 * v)
        np.testing.assert_allclose(other.lse.view, one.lse.view, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [{"splits": 1}, {"splits": 3}, {"splits": 11}], ids=str)
@pytest.mark.parametrize("cache_dtype", ["", "e4m3"])
def test_infinite_sink(backend: Backend, cache_dtype: str, how: dict[str, int]) -> None:
    """It has all the weight of its head's rows, also of those that see no key."""
    if cache_dtype and backend.name == "emulated-sm90":  # runs on emulated-sm80's kernels
        return
    case = replace(BASE, dtype="fp16", sinks=True, cache_dtype=cache_dtype, **how)
    one, call = run_cache(backend, case.call()), case.call()
    call.options["sinks"].view[3] = np.inf
    run_cache(backend, call)
    others = [head for head in range(case.heads) if head != 3]
    assert (call.out.view[:, :, 3] == 0).all()
    assert np.isposinf(call.lse.view[:, 3]).all()
    assert bits(call.out.view[:, :, others]) == bits(one.out.view[:, :, others])
    assert bits(call.lse.view[:, others]) == bits(one.lse.view[:, others])
    if backend.is_cpu:  # as without splits
        assert not np.signbit(call.out.view[:, :, 3].astype(np.float32)).any()


def test_infinite_sink_in_a_cluster(emulated: ctypes.CDLL) -> None:
    """Of sm80's kernels: Hopper's own take no pages of 4 rows."""
    emulated.emulated_set_compute_capability(90)
    call = replace(BASE, dtype="fp16", sinks=True, page=4, splits=2).call()
    call.options["sinks"].view[3] = np.inf
    run_cache(capi.backend("emulated-sm80"), call)
    assert (call.out.view[:, :, 3] == 0).all()
    assert np.isposinf(call.lse.view[:, 3]).all()


def test_a_split_of_all_keys_is_none(backend: Backend) -> None:
    one = run_cache(backend, replace(BASE, splits=1).call())
    for size in (704, 1 << 20, 1 << 62):
        other = run_cache(backend, replace(BASE, split_size=size).call())
        assert bits(other.out.view) == bits(one.out.view), size
        assert bits(other.lse.view) == bits(one.lse.view), size


def test_bits_do_not_depend_on_the_capacity(backend: Backend) -> None:
    """Nor on how many rows behind a sequence's last are free."""
    results: list[Array] = []
    for capacity in (704, 1024, 5000):
        case = replace(BASE, split_size=128, capacity=capacity, page=0, poison=False)
        case = replace(case, out_dtype="fp32")  # of which rounding to 16 bits hides little
        call = case.call()
        source = BASE.call().problem()
        for b, length in enumerate(BASE.lengths):
            slots, rows = source.places(b, np.arange(length))
            call.k_cache.view[b, :length] = source.k_cache[slots, rows]
            call.v_cache.view[b, :length] = source.v_cache[slots, rows]
        call.q.view[...] = source.q
        results.append(run_cache(backend, call).out.view)
    for other in results[1:]:
        assert bits(other) == bits(results[0])


@pytest.mark.parametrize("name", FEATURES)
def test_clusters_join_as_the_kernel_does(emulated: ctypes.CDLL, name: str) -> None:
    """On GPUs that have them: the same bits."""
    gpu = capi.backend("emulated-sm80")
    # Hopper's own kernels take no pages of 4 rows.
    case = replace(BASE, out_dtype="fp32", page=4, **FEATURES[name])
    for how in ({"splits": 2}, {"splits": 3}, {"split_size": 128}):
        results = []
        for capability in (80, 90):
            emulated.emulated_set_compute_capability(capability)
            call = run_cache(gpu, replace(case, **how).call())
            results.append((bits(call.out.view), bits(call.lse.view)))
        assert results[0] == results[1], how


def test_workspace_does_not_grow_with_the_keys(backend: Backend) -> None:
    """It is partial results of each split, and nothing else. There are too many sequences for a GPU
    to join their splits without."""
    sequences = 32

    def size(length: int, splits: int) -> int:
        call = replace(
            BASE, lengths=(length,) * sequences, page=0, splits=splits, seqlens=False
        ).call()
        with backend.on_device(call.tensors) as dl:
            options = backend.options(num_threads=1, causal=True)
            cache = structure(KvCacheOptions, {"num_splits": splits})
            return backend.library.workspace_size(dl, options, cache)

    assert size(4000, 4) == size(400, 4)
    # Of a split, float32: heads, rows, columns and the LSE.
    partial = sequences * 4 * 8 * 2 * (64 + 1)
    growth = size(4000, 36) - size(4000, 4)
    assert 32 * partial <= growth <= 33 * partial + 1024
