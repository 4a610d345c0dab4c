"""Running a case of packed queries and a cache on a backend, and what must hold after it."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace

from backends import capi
from backends.capi import Backend
from cases.cache_case import CacheCall, CacheCase
from cases.packed_cache import PackedCall, PackedCase
from oracle.attention import check
from oracle.kvcache import check_written
from run.forward import bits
from run.kvcache import expected_kernel, hopper_takes, run_cache

PREFILL_QUERIES = 64  # from here on
PREFILL_HEAD_DIMS = (64, 128, 256)


def prefill_kernel(backend: Backend, case: CacheCase) -> str | None:
    """For long sequences, where it takes the cache as it is."""
    columns = max(case.d, case.head_dim_v)
    vectors = case.d % 8 == case.head_dim_v % 8 == 0
    if case.eight_bit or case.latent or case.tree or not vectors or columns > 256:
        return None
    d = next(d for d in PREFILL_HEAD_DIMS if d >= columns)
    scored = "_scored" if case.softcap or case.alibi else ""
    arch = "sm90" if backend.before == "sm90" and hopper_takes(case) else backend.arch
    return f"{arch}_prefill_{case.dtype.replace('fp', 'f')}_d{d}{scored}"


def kernels_of(backend: Backend, case: PackedCase) -> Counter[str]:
    """How often each is launched: for sequences that fit the tile of one query, for longer ones,
    and for those that prefill takes."""
    if sum(row.queries for row in case.rows) == 0:
        return Counter()
    if backend.is_cpu:
        return Counter([expected_kernel(backend, case.base)])
    short = expected_kernel(backend, replace(case.base, sq=1))
    tile = int(short.split("_m")[1].split("_")[0])  # rows
    most = tile // (case.base.heads // case.base.heads_k)
    names = Counter([short] if most else [])
    longest = case.max_seqlen or sum(row.queries for row in case.rows)
    if longest <= most:
        return names
    prefill = prefill_kernel(backend, case.base)
    least = max(most + 1, PREFILL_QUERIES)
    if prefill is None or most + 1 < least:
        names[expected_kernel(backend, replace(case.base, sq=1000))] += 1
    if prefill is not None and longest >= least:
        names[prefill] += 1
    return names


def supports_packed(name: str, case: PackedCase) -> bool:
    if name == "cpu":
        return True
    if name.startswith("cpu"):
        return zlib.crc32(case.id.encode()) % 6 == 0
    if name == "cuda" or case.base.cpu_only:
        return not case.base.cpu_only
    try:
        backend = capi.backend(name)
        rows = {row.name for row in backend.library.rows}
        names = {expected_kernel(backend, case.base), *kernels_of(backend, case)}
        here = name != "emulated-sm90" or any(kernel.startswith("sm90") for kernel in names)
        return names <= rows and here  # what Hopper has no kernel for is emulated-sm80's
    except capi.Unavailable:
        return True  # the test then fails and says what to do


def verify_packed(backend: Backend, case: PackedCase) -> None:
    old = backend.library.launches()
    packed = case.call()
    call = run_cache(backend, packed.call)
    launched = {n: c - old[n] for n, c in backend.library.launches().items() if c != old[n]}
    assert launched == kernels_of(backend, case)
    before = case.call().call
    for name, tensor in call.inputs().items():
        assert bits(tensor.storage) == bits(before.inputs()[name].storage), f"{name} was written to"
    for name in ("out", "lse"):
        getattr(call, name).check_canaries(name)
    for i, answer in enumerate(packed.answers):
        rows = slice(packed.ends[i], packed.ends[i + 1])
        check(call.out.view[None, rows], call.lse.view[None, :, rows], answer.reference)
    _check_caches(packed, call, before)


def _check_caches(packed: PackedCall, call: CacheCall, before: CacheCall) -> None:
    """New rows are where they belong, and no other bit has changed."""
    for name, field in (("k_cache", "k"), ("v_cache", "v")):
        if getattr(call, name) is None:
            continue
        cache, expected = getattr(call, name).view, getattr(before, name).view.copy()
        for i, answer in enumerate(packed.answers):
            written = getattr(answer, field)
            if written is None:
                continue
            places = slice(packed.slots[i], packed.slots[i + 1])
            check_written(name, cache[places], written)
            where = (written.slots, written.rows)
            expected[places][where] = cache[places][where]
        assert bits(cache) == bits(expected), f"{name} was written outside of the new rows"
