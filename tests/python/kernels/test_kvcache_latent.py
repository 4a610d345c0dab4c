"""Latent attention through the C ABI, on every backend, beside the table's cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends import capi
from backends.capi import INVALID_VALUE, Backend
from backends.tensors import place
from cases.cache_case import Append, CacheCall, CacheCase
from oracle.kvcache import answer
from run.forward import bits
from run.kvcache import check_call, run_cache, supports_cache

pytestmark = pytest.mark.hopper

# Head dims of a kernel that every build has, and that TMA takes of 8 bits, too.
SMALL = CacheCase(
    "latent-small", "bf16", (70, 0, 150, 1), 3, 8, 1, 64, 48, latent=True, causal=True, page=16
)
MLA = CacheCase("latent-mla", lengths=(90, 41), heads=16, heads_k=1, d=576, dv=512, latent=True)


def with_tensors(call: CacheCall) -> CacheCall:
    """The same call with values that are a tensor of their own."""
    cache = {name: x for name, x in call.cache.items() if name != "head_dim_v"}
    columns = call.out.shape[-1]
    if "k_scale" in cache:
        cache["v_scale"] = cache["k_scale"]
    if "k_new" in cache:
        cache["v_new"] = place(cache["k_new"].view[..., :columns].copy())
    return call._replace(v_cache=place(call.k_cache.view[..., :columns].copy()), cache=cache)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page": 0, "splits": 3},
        {"page": 1, "append": Append(3)},
        {"cache_dtype": "int8", "scales": "slot", "append": Append(3)},
        {"cache_dtype": "e4m3", "scales": "head", "sinks": True},
        {"tree": "b", "append": Append(3), "out_dtype": "fp32"},
    ],
    ids=str,
)
def test_as_with_values_of_their_own(backend: Backend, changes: dict[str, object]) -> None:
    """To the bit; and so where both are views of one memory."""
    case = replace(SMALL, **changes)
    found = run_cache(backend, case.call())
    right = run_cache(backend, with_tensors(case.call()))
    assert bits(found.k_cache.storage) == bits(right.k_cache.storage)
    for name in ("out", "lse"):
        assert bits(getattr(found, name).view) == bits(getattr(right, name).view), name
    if case.append is None:
        call = with_tensors(case.call())
        columns = replace(call.k_cache, shape=(*call.k_cache.shape[:3], call.out.shape[-1]))
        alias = run_cache(backend, call._replace(v_cache=columns))
        assert bits(alias.out.view) == bits(found.out.view)


@pytest.mark.parametrize("base", [SMALL, MLA], ids=lambda case: case.id)
@pytest.mark.parametrize("cache_dtype", ["", "e4m3", "e5m2"])
def test_rows_of_each_querys_own(backend: Backend, base: CacheCase, cache_dtype: str) -> None:
    """The best rows for each query token, of one pool: a token is a sequence, a row is a page.
    Queries share rows, and what lies behind a query's last one is no row."""
    scales = {"cache_dtype": cache_dtype, "scales": "head"} if cache_dtype else {}
    lengths = (40, 64, 1, 0, 17, 63)
    case = replace(base, id=f"rows-{base.id}", sq=1, page=1, causal=False, lengths=lengths)
    case = replace(case, poison=False, **scales)
    call = case.call()
    table = call.cache["block_table"].view
    random = np.random.default_rng(3)
    for row, length in zip(table, lengths, strict=True):
        row[:length] = random.choice(len(call.k_cache.view), length, replace=False)
        row[length:] = -1
    expected = answer(call.problem())
    before = case.call()
    before.cache["block_table"].view[...] = table
    check_call(run_cache(backend, call), before, expected)


def test_batch_does_not_change_bits(backend: Backend) -> None:
    case = MLA if supports_cache(backend.name, replace(MLA, smoke=True)) else SMALL
    whole = run_cache(backend, replace(case, splits=1).call())
    first = replace(case, splits=1).call()
    one = first._replace(
        q=place(first.q.view[:1]),
        out=place(first.out.view[:1]),
        lse=place(first.lse.view[:1], axes="bhs"),
        cache={
            name: place(x.view[:1].copy(), axes="bs"[: x.view.ndim])
            if name in ("cache_seqlens", "block_table")
            else x
            for name, x in first.cache.items()
        },
    )
    run_cache(backend, one)
    assert bits(one.out.view[0]) == bits(whole.out.view[0])


@pytest.mark.parametrize(
    ("head_dim_v", "message"),
    [
        (0, "v_cache is missing; it, or head_dim_v"),
        (65, "head_dim_v is 65; 1 to 64"),
        (-1, "head_dim_v is -1; 1 to 64"),
    ],
)
def test_refused(backend: Backend, head_dim_v: int, message: str) -> None:
    call = SMALL.call()
    before = SMALL.call()
    with pytest.raises(capi.CallError, match=message) as error:
        run_cache(backend, call, head_dim_v=head_dim_v)
    assert error.value.status == INVALID_VALUE
    given = with_tensors(SMALL.call())
    with pytest.raises(capi.CallError, match="v_cache is given with head_dim_v"):
        run_cache(backend, given, head_dim_v=40)
    for name in ("out", "lse", "k_cache"):
        assert bits(getattr(call, name).storage) == bits(getattr(before, name).storage), name
