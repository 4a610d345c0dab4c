"""anyflash_forward_with_kvcache against float64, on every backend, and how calls relate."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from backends import capi
from backends.capi import Backend
from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS, Tensor, empty, place, sparse
from cases.cache_case import Append, CacheCall, CacheCase
from cases.random_kvcache import for_hopper, random_cache_cases
from oracle.attention import Array, check
from oracle.kvcache import answer
from run.forward import bits
from run.kvcache import check_call, run_cache, supports_cache, verify_cache

pytestmark = pytest.mark.hopper


def test_case(backend: Backend, cache_case: CacheCase) -> None:
    verify_cache(backend, cache_case)


def test_random(backend: Backend) -> None:
    examples = {"cuda": 400}.get(backend.name, 30 if backend.isa != "auto" else 60)
    cases = random_cache_cases(sorted({row.dtype for row in backend.rows("decode")}))
    if backend.before == "sm90":  # a GPU takes the others, too: by sm80's kernels
        hopper = cases.map(for_hopper)
        cases = hopper if backend.name.startswith("emulated") else cases | hopper

    @settings(max_examples=examples)
    @given(cases.filter(lambda case: supports_cache(backend.name, case)))
    def verify_one(case: CacheCase) -> None:
        verify_cache(backend, case)

    verify_one()


BASE = CacheCase("base", "bf16", (70, 0, 150, 1, 64), 3, causal=True, page=16, capacity=160)


def same_bits(a: CacheCall, b: CacheCall) -> None:
    assert bits(a.out.view) == bits(b.out.view), "out differs"
    assert bits(a.lse.view) == bits(b.lse.view), "lse differs"


def test_without_lse(backend: Backend) -> None:
    case = replace(BASE, splits=3)
    call = case.call()
    backend.forward_with_kvcache(*call.tensors[:4], None, cache=call.cache, **call.options)
    assert bits(call.out.view) == bits(run_cache(backend, case.call()).out.view)


def test_cache_without_pages(backend: Backend) -> None:
    """A map of no memory has an address all the same, which is a multiple of 16."""
    case = CacheCase("no-pages", lengths=(0, 0), page=16, small_layout="offset_1")
    call = case.call()
    nothing = place(call.k_cache.view[:0])
    run_cache(backend, call._replace(k_cache=nothing, v_cache=nothing))
    assert not call.out.view.any()
    assert np.isneginf(call.lse.view).all()


def test_null_options_and_compact_strides(backend: Backend) -> None:
    """Null strides are compact ones, and null options the defaults: all rows are keys."""
    case = CacheCase("defaults", lengths=(90, 90), sq=2, seqlens=False)
    call = case.call()
    with backend.memory.resident([t.storage for t in call.tensors]) as addresses:
        dl = [
            capi.dl_tensor(tensor, address, backend.device)
            for tensor, address in zip(call.tensors, addresses, strict=True)
        ]
        for tensor in dl:
            tensor.strides = None
        size = backend.library.workspace_size(dl, None, None)
        workspace = np.empty(max(size, 1), np.uint8)
        with backend.memory.resident([workspace]) as (address,):
            backend.library.forward_with_kvcache(dl, (None, None), address, size)
    check_call(call, case.call(), case.expected())


def one_sequence(call: CacheCall, index: int) -> CacheCall:
    """The same cache, and one of the sequences."""
    one = slice(index, index + 1)
    by_batch = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
    cache: dict[str, Any] = dict(call.cache)
    for name in by_batch:
        if name in cache:
            view = cache[name].view[one]
            cache[name] = place(np.ascontiguousarray(view), axes="bs"[: view.ndim])
    out, lse = call.out.view[one], call.lse.view[one]
    return call._replace(
        q=place(call.q.view[one]),
        out=empty(out.shape, out.dtype),
        lse=empty(lse.shape, lse.dtype, axes="bhs"),
        cache=cache,
    )


@pytest.mark.parametrize("how", [{"splits": 1}, {"split_size": 64}, {"split_size": 128}], ids=str)
@pytest.mark.parametrize("page", [0, 16])
def test_batch_invariance(backend: Backend, how: dict[str, int], page: int) -> None:
    """vllm 51902: a sequence has the same bits alone and beside others."""
    for window in ((None, None), (30, None)):
        case = replace(BASE, page=page, batch_idx=not page, window=window, **how)
        call = run_cache(backend, case.call())
        for index in range(case.batch):
            alone = run_cache(backend, one_sequence(case.call(), index))
            assert bits(alone.out.view[0]) == bits(call.out.view[index]), f"out {index} differs"
            assert bits(alone.lse.view[0]) == bits(call.lse.view[index]), f"lse {index} differs"


def test_repeats_have_the_same_bits(backend: Backend) -> None:
    case = replace(BASE, splits=3, append=Append(4, 32))
    first = run_cache(backend, case.call())
    for _ in range({"cuda": 250, "emulated-sm80": 3}.get(backend.name, 20)):
        again = run_cache(backend, case.call())
        same_bits(again, first)
        for a, b in zip(again[1:3], first[1:3], strict=True):
            assert bits(a.storage) == bits(b.storage), "the cache differs"


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_thread_count_invariance(cpu: Backend, dtype: str) -> None:
    for splits, cache_dtype in ((0, ""), (3, "int8")):
        case = replace(BASE, dtype=dtype, splits=splits, cache_dtype=cache_dtype, heads=8)
        one = run_cache(cpu, case.call(), num_threads=1)
        for num_threads in (2, 3, 64):
            same_bits(run_cache(cpu, case.call(), num_threads=num_threads), one)


def test_layout_does_not_change_bits(backend: Backend) -> None:
    case = replace(BASE, d=40, splits=2, append=Append(2))
    first = run_cache(backend, case.call())
    # Hopper's own kernels take what TMA can read.
    names = [x for x in WRITABLE_LAYOUTS if backend.before != "sm90" or LAYOUTS[x].is_aligned]
    for name in names:
        if not name.startswith("fused"):
            same_bits(run_cache(backend, replace(case, layout=name).call()), first)


def test_pages_do_not_change_bits(backend: Backend) -> None:
    """Where keys lie is nobody's affair: splits are of keys, not of pages."""
    case = replace(BASE, splits=2, capacity=256)
    flat = run_cache(backend, replace(case, page=0).call())
    for page in (8 if backend.before == "sm90" else 1, 16, 32, 256):
        same_bits(run_cache(backend, replace(case, page=page).call()), flat)


# ---- the block table ----


def before_a_hole(values: Array) -> Tensor:
    """A tensor after whose last element memory ends."""
    page = mmap.PAGESIZE
    size = -(-values.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    storage = np.frombuffer(memory, values.dtype, size // values.itemsize)
    storage[len(storage) - values.size :] = values.ravel()
    strides = [stride // values.itemsize for stride in values.strides]
    return Tensor(storage, values.shape, tuple(strides), len(storage) - values.size)


@pytest.mark.parametrize("sq", [1, 40])
def test_table_that_ends_with_the_last_page_in_use(backend: Backend, sq: int) -> None:
    """Upstream's kvcache_paged_block_table_bounds: what lies behind is no memory."""
    case = CacheCase("hole", lengths=(33, 20, 65), sq=sq, page=16, capacity=320, splits=2)
    call = case.call()
    table = call.cache["block_table"].view
    used = table.size - table.shape[1] + 5  # of the last sequence 5 pages
    hole = before_a_hole(np.ascontiguousarray(table.ravel()[:used]))
    hole.shape, hole.strides = table.shape, (table.shape[1], 1)
    backend.forward_with_kvcache(
        *call.tensors, cache=call.cache | {"block_table": hole}, **call.options
    )
    check(call.out.view, call.lse.view, case.expected().reference)


def test_sequences_may_share_pages(backend: Backend) -> None:
    """A prefix that all have; the pages after it are their own."""
    case = CacheCase("shared", lengths=(70, 90, 65), sq=2, page=16, poison=False)
    call = case.call()
    call.cache["block_table"].view[:, :4] = call.cache["block_table"].view[0, :4]
    expected = answer(call.problem())
    check_call(run_cache(backend, call), call, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_cascade(backend: Backend, dtype: str, causal: bool) -> None:
    """Attention over a prefix and over the rest, joined by merge_states, is attention over all."""
    if dtype not in {row.dtype for row in backend.rows("decode")}:
        dtype = "bf16"
    prefix, lengths = 64, (70, 130, 64 + 5)
    case = CacheCase("cascade", dtype, lengths, 4, page=16, causal=causal, out_dtype="fp32")
    whole = case.call()
    parts = []
    for first in (True, False):
        call = case.call()
        part = np.minimum(lengths, prefix) if first else np.subtract(lengths, prefix)
        call.cache["cache_seqlens"].view[:] = part
        if not first:
            table = np.ascontiguousarray(call.cache["block_table"].view[:, prefix // 16 :])
            call.cache["block_table"] = place(table, axes="bs")
        # The prefix is seen by all queries.
        changes = {"causal": False} if first else {}
        parts.append(run_cache(backend, call, **changes))
    merged, merged_lse = whole.out, whole.lse
    tensors = [x for part in parts for x in (part.out, part.lse)]
    backend.merge_states(*tensors, merged, merged_lse)
    expected = case.expected().reference
    # Weights are no more exact than the float32 LSEs that they are made of.
    v = case.problem().v_cache.astype(np.float64)
    weight = float(2 * np.finfo(np.float32).eps * np.abs(expected.lse).max())
    weight *= np.abs(v[np.isfinite(v)]).max()
    errors = expected.max_error + weight, expected.mean_error + weight
    expected = replace(expected, max_error=errors[0], mean_error=errors[1])
    check(merged.view, merged_lse.view, expected)


# ---- what a GPU clamps and a CPU refuses ----


def clamped(call: CacheCall, name: str, values: Any) -> CacheCall:
    call.cache[name].view[...] = values
    return call


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cache_seqlens", (-5, 1 << 30, 150, 161, -(1 << 31))),
        ("cache_leftpad", (-1, 71, 1 << 30, 150, 3)),
        ("cache_batch_idx", (-1, 8, 1 << 30, 0, -(1 << 31))),
        ("block_table", -1),
        ("block_table", 1 << 30),
    ],
)
@pytest.mark.parametrize("new", [0, 5])
def test_wrong_integers(backend: Backend, name: str, values: Any, new: int) -> None:
    """Nothing outside of the cache is touched; rows without a page count as zeros."""
    idx = name == "cache_batch_idx"
    case = replace(BASE, page=0 if idx else 16, batch_idx=idx, poison=False, d=64)
    if name == "cache_leftpad":
        case = replace(case, leftpad=(0,) * 5)
    if new:
        case = replace(case, append=Append(new, 32))
    call = clamped(case.call(), name, values)
    before = clamped(case.call(), name, values)
    if backend.is_cpu:
        with pytest.raises(capi.CallError, match=rf"{name}\["):
            run_cache(backend, call)
        for a, b in zip(call.tensors, before.tensors, strict=True):
            assert bits(a.storage) == bits(b.storage), "written to"
        return
    check_call(run_cache(backend, call), before, answer(before.problem()))
    with pytest.raises(capi.CallError, match=rf"{name}\["):
        run_cache(backend, call, validate=1)


# ---- large caches ----

FAR = (1 << 31) + 64


def far_apart(call: CacheCall, axis: int) -> CacheCall:
    strides = [4 * 128, 2 * 64, 64, 1]
    strides[axis] = FAR
    caches = [sparse(cache.view, tuple(strides)) for cache in (call.k_cache, call.v_cache)]
    return call._replace(k_cache=caches[0], v_cache=caches[1])


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("cache_dtype", ["", "int8"])
def test_bug_flashinfer_3136_pages_beyond_int32(
    backend: Backend, axis: int, cache_dtype: str
) -> None:
    """An element's place in the pool does not fit 32 bits (flashinfer 3230 too)."""
    case = CacheCase("far", lengths=(3,), sq=2, page=2, cache_dtype=cache_dtype, poison=False)
    call = far_apart(case.call(), axis)
    for cache in (call.k_cache, call.v_cache):
        cache.storage.flags.writeable = False  # not copied back from a GPU
    run_cache(backend, call)
    check(call.out.view, call.lse.view, case.expected().reference)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("cache_dtype", ["", "int8"])
def test_append_beyond_int32(backend: Backend, axis: int, cache_dtype: str) -> None:
    case = CacheCase("far-append", lengths=(1, 2), sq=2, cache_dtype=cache_dtype, poison=False)
    case = replace(case, append=Append(1))
    call = far_apart(case.call(), axis)
    run_cache(backend, call)
    expected = case.expected()
    for cache, rows in ((call.k_cache, expected.k), (call.v_cache, expected.v)):
        assert rows is not None
        assert bits(cache.view[rows.slots, rows.rows]) == bits(rows.value)
    check(call.out.view, call.lse.view, expected.reference)
