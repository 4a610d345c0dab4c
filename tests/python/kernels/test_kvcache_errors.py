"""Wrong calls say which argument is wrong, and write nothing; C++ tests have them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.abi import KvCacheOptions, structure
from backends.capi import INVALID_TYPE, INVALID_VALUE, Backend, CallError
from backends.tensors import place
from cases.cache_case import Append, CacheCall, CacheCase
from run.forward import bits

BASE = CacheCase("errors", lengths=(20, 33), sq=2, page=16, append=Append(3, 32))
FLAT = replace(BASE, page=0, batch_idx=True)
INT8 = replace(BASE, cache_dtype="int8", scales="slot", append=Append(3))


def floats(*shape: int) -> Any:
    return place(np.zeros(shape, np.float32), axes="bshd"[: len(shape)])


def cut(name: str, *index: slice) -> Callable[[CacheCall], CacheCall]:
    """A tensor of the cache's options, cut."""

    def change(call: CacheCall) -> CacheCall:
        view = np.ascontiguousarray(call.cache[name].view[index])
        cut_out = place(view, axes="bshd"[: view.ndim])
        return call._replace(cache=call.cache | {name: cut_out})

    return change


def cache(**fields: Any) -> Callable[[CacheCall], CacheCall]:
    return lambda call: call._replace(cache=call.cache | fields)


def option(**fields: Any) -> Callable[[CacheCall], CacheCall]:
    return lambda call: call._replace(options=call.options | fields)


def element(name: str, index: Any, value: int) -> Callable[[CacheCall], CacheCall]:
    def change(call: CacheCall) -> CacheCall:
        call.cache[name].view[index] = value
        return call

    return change


ALL = slice(None)
WRONG: dict[str, tuple[CacheCase, Callable[[CacheCall], CacheCall], str]] = {
    "k-alone": (BASE, cache(v_new=None), r"k_new is given without v_new"),
    "no-lengths": (BASE, cache(cache_seqlens=None), r"k_new is given without cache_seqlens"),
    "cos-alone": (BASE, cache(rotary_sin=None), r"rotary_cos is given without rotary_sin"),
    "cos-no-keys": (BASE, cache(k_new=None, v_new=None), r"rotary_cos is given without k_new"),
    "new-heads": (BASE, cut("k_new", ALL, ALL, slice(1)), r"k_new has shape \(2, 3, 1, 64\)"),
    "new-v": (BASE, cut("v_new", ALL, slice(2)), r"v_new has shape \(2, 2, 2, 64\)"),
    "table-batch": (BASE, cut("block_table", slice(1)), r"block_table has shape \(1, 3\)"),
    "table-short": (BASE, cut("block_table", ALL, slice(2)), r"cache_seqlens\[1\] is 33; 0 to 29"),
    "scale-16-bit": (BASE, cache(k_scale=floats(2)), r"k_scale .* float16"),
    "scale-shape": (INT8, cache(v_scale=floats(3)), r"v_scale has shape \(3\b"),
    "both-splits": (
        BASE,
        cache(num_splits=2, split_size=64),
        r"split_size .*num_splits|num_splits",
    ),
    "split-size": (BASE, cache(split_size=96), r"split_size is 96"),
    "splits-negative": (BASE, cache(num_splits=-1), r"num_splits is -1"),
    "splits-many": (BASE, cache(num_splits=65536), r"num_splits is 65536"),
    "bias": (BASE, option(bias=floats(2, 4, 2, 36)), r"bias is given"),
    "dropout": (BASE, option(dropout_p=0.1), r"dropout_p is given"),
    "max-logits": (BASE, option(max_logits=floats(2, 4)), r"max_logits is given"),
    "page-24": (replace(BASE, page=24), option(), r"page_size 24"),
    "length": (BASE, element("cache_seqlens", 1, 46), r"cache_seqlens\[1\] is 46; 0 to 45"),
    "length-negative": (BASE, element("cache_seqlens", 0, -1), r"cache_seqlens\[0\] is -1"),
    "page": (BASE, element("block_table", (1, 2), -7), r"block_table\[1, 2\] is -7"),
    "place": (FLAT, element("cache_batch_idx", 1, 5), r"cache_batch_idx\[1\] is 5; 0 to 4"),
    "place-and-table": (BASE, cache(cache_batch_idx=floats(2)), r"cache_batch_idx .*block_table"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(backend: Backend, name: str) -> None:
    case, change, message = WRONG[name]
    call, before = change(case.call()), change(case.call())
    with pytest.raises(CallError, match=message) as error:
        backend.forward_with_kvcache(
            *call.tensors, cache=call.cache, **call.options | {"validate": 1}
        )
    assert error.value.status in (INVALID_VALUE, INVALID_TYPE)
    for a, b in zip(call.tensors, before.tensors, strict=True):
        assert bits(a.storage) == bits(b.storage), "written to"


def test_types(backend: Backend) -> None:
    call = BASE.call()
    wrong = place(np.zeros(call.k_cache.shape, np.int8))
    for k, v, message in (
        (call.k_cache, wrong, r"v_cache is int8, but k_cache is float16"),
        (wrong, call.v_cache, r"v_cache is float16, but k_cache is int8"),
        (floats(*call.k_cache.shape), call.v_cache, r"k_cache is float32, but q is float16"),
    ):
        with pytest.raises(CallError, match=message) as error:
            backend.forward_with_kvcache(call.q, k, v, call.out, call.lse, cache=call.cache)
        assert error.value.status == INVALID_TYPE


def test_workspace_that_is_too_small(backend: Backend) -> None:
    case = CacheCase("workspace", lengths=(64, 64), seqlens=False)
    call = case.call()
    with backend.on_device(call.tensors) as dl:
        # More splits than a cluster can join, so that a workspace is needed.
        options = backend.options(), structure(KvCacheOptions, {"num_splits": 9})
        size = backend.library.workspace_size(dl, *options)
        assert size > 1
        with pytest.raises(CallError, match=rf"{size - 1} bytes.*{size}|{size}.*{size - 1}"):
            backend.library.forward_with_kvcache(dl, options, 256, size - 1)
    assert bits(call.out.storage) == bits(case.call().out.storage)
