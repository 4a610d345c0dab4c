"""Running a case with a cache on a backend, and what must hold after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from backends import capi
from backends.capi import Backend
from backends.tensors import LAYOUTS, Tensor
from cases.cache_case import EMULATED_TILES, TOGETHER, CacheCall, CacheCase
from cases.case import is_sampled
from oracle.attention import Array, check
from oracle.kvcache import Answer, Written, attention, check_written
from run.forward import LEAST_SCALE, bits

HEAD_DIMS = (64, 128, 256, 512)  # of the GPU's kernels: others are rounded up


def run_cache(backend: Backend, call: CacheCall, **changes: Any) -> CacheCall:
    """`changes` are options of either kind."""
    of_cache = {name for name, _ in capi.KvCacheOptions._fields_}
    cache = call.cache | {name: x for name, x in changes.items() if name in of_cache}
    options = call.options | {name: x for name, x in changes.items() if name not in of_cache}
    call = call._replace(cache=cache, options=options)
    backend.forward_with_kvcache(*call.tensors, cache=call.cache, **call.options)
    return call


def expected_kernel(backend: Backend, case: CacheCase) -> str:
    """The name of the kernel that must take it."""
    if backend.expected:
        return backend.expected
    kind = case.dtype.replace("fp", "f")
    if backend.is_cpu:
        return next(row.name for row in backend.rows("decode") if row.dtype == case.dtype)
    rows = case.heads // case.heads_k * case.sq
    hopper = hopper_kernel(case, rows) if backend.before == "sm90" else None
    if hopper is not None:
        return hopper
    dims = next((str(d) for d in HEAD_DIMS if d >= max(case.d, case.head_dim_v)), "576_512")
    tile = next((m for m in (16, 32) if rows <= m), 64)
    if dims == "512" and case.latent:  # it loads fewer columns
        dims = "576_512"
    if dims == "512" and tile == 64:  # for which it has no such tile
        tile = 32
    name = f"{backend.arch}_decode_{kind}_d{dims}_m{tile}"
    return f"{name}_8bit" if case.eight_bit else name


def hopper_kernel(case: CacheCase, rows: int) -> str | None:
    columns = max(case.d, case.head_dim_v)
    separate = (64, 128, 256) if case.latent else (64, 128, 256, 512)
    dims = next((str(d) for d in separate if d >= columns), "576_512")
    if not hopper_takes(case) or (dims == "576_512" and not case.latent):
        return None
    tile = next((m for m in (16, 32) if rows <= m), 64)
    name = f"sm90_decode_{case.dtype.replace('fp', 'f')}_d{dims}_m{tile}"
    return f"{name}_8bit" if case.eight_bit else name


def hopper_takes(case: CacheCase) -> bool:
    """Its kernels load boxes of at least eight rows of a page, by TMA."""
    in_boxes = not case.page or (case.page >= 8 and not case.leftpad)
    vector = 16 if case.eight_bit else 8
    vectors = case.d % vector == 0 and (case.latent or case.head_dim_v % vector == 0)
    aligned = case.layout in TOGETHER or LAYOUTS[case.layout].is_aligned
    positive_scale = case.scale is None or case.scale >= LEAST_SCALE
    plain = not case.softcap and not case.alibi
    return plain and in_boxes and vectors and aligned and positive_scale


def supports_cache(name: str, case: CacheCase) -> bool:
    """Whether the backend can run the case, and should: `cpu` runs all, and others a part."""
    if name == "cpu":
        return True
    some = is_sampled(case, 6)
    if name.startswith("cpu"):
        return some
    if case.cpu_only:
        return False
    if name == "cuda":
        return True
    try:
        rows = {row.name for row in capi.backend(name).rows("decode")}
    except capi.Unavailable:
        return True  # the test then fails and says what to do
    kernel = expected_kernel(capi.backend(name), case)
    here = name != "emulated-sm90" or kernel.startswith("sm90")  # the rest is emulated-sm80's
    return here and kernel in rows and case.tiles <= EMULATED_TILES


def verify_cache(backend: Backend, case: CacheCase) -> None:
    old = backend.library.launches()
    call = run_cache(backend, case.call())
    launched = {n: c - old[n] for n, c in backend.library.launches().items() if c != old[n]}
    assert launched == ({} if case.empty else {expected_kernel(backend, case): 1})
    check_call(call, case.call(), case.expected())


def check_call(call: CacheCall, before: CacheCall, expected: Answer) -> None:
    """`before` is the same call, not run."""
    for name, tensor in call.inputs().items():
        same = bits(tensor.storage) == bits(before.inputs()[name].storage)
        assert same, f"{name} was written to"
    for name in ("out", "lse"):
        getattr(call, name).check_canaries(name)
    _check_rest_of_cache(call, before, expected)
    reference = expected.reference
    if expected.k:
        check_written("k_cache", call.k_cache.view, expected.k)
        if expected.v:
            check_written("v_cache", call.values, expected.v)
        if not _as_expected(call, expected):
            # Elements that lie between two numbers: what attention sees is what was written.
            reference = attention(before.problem(), call.k_cache.view, call.values)
    check(call.out.view, call.lse.view, reference)


def _as_expected(call: CacheCall, expected: Answer) -> bool:
    pairs = ((call.k_cache.view, expected.k), (call.values, expected.v))
    return all(bits(x[rows.slots, rows.rows]) == bits(rows.value) for x, rows in pairs if rows)


def _mark(tensor: Tensor, rows: Written | None, marks: Array) -> None:
    if rows is not None:
        tensor.strided(marks)[rows.slots, rows.rows] = True


def _check_rest_of_cache(call: CacheCall, before: CacheCall, expected: Answer) -> None:
    """No bit has changed outside of the new rows."""
    marks: dict[int, Array] = {}
    for tensor, rows in ((call.k_cache, expected.k), (call.v_cache, expected.v)):
        if tensor is None:
            continue
        mark = marks.setdefault(id(tensor.storage), np.zeros(len(tensor.storage), bool))
        _mark(tensor, rows, mark)
    for name in ("k_cache", "v_cache"):
        tensor, old = getattr(call, name), getattr(before, name)
        if tensor is None:
            continue
        itemsize = tensor.storage.itemsize
        now, then = (x.storage.view(np.uint8).reshape(-1, itemsize) for x in (tensor, old))
        changed = np.nonzero((now != then).any(1) & ~marks[id(tensor.storage)])[0]
        assert not changed.size, (
            f"{name}: {changed.size} elements outside of the new rows were written, the first "
            f"{changed[0] - tensor.offset} after element 0"
        )
