"""Dropout of sharded arrays drops what it drops of the whole, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_calls import cotangents, same
from calls.sharded import (
    BOTH,
    DENSE,
    alike,
    check,
    compiled,
    explicit,
    mesh,
    put,
    qkv,
    random,
    results_and_gradients,
    split,
)

__all__ = ["explicit", "mesh"]

DROPOUT = {"dropout_p": 0.5, "seed": 2**63 + 1}
AUTOMATIC = (
    "batch",
    "heads",
    "both",
    "only-v",
    "key-heads",
    "key-heads-few",
    "key-heads-apart",
    "bias-batch",
    "masks",
)


def attend(options: dict[str, Any], **arrays: Any) -> Any:
    return anyflash.jax.attention(**arrays, **options, **DROPOUT, return_lse=True)


def mask_of(arrays: Any) -> Any:
    result = anyflash.jax.attention(**arrays, **DROPOUT, return_dropout_mask=True)
    return result.dropout_mask


def test_the_mask(mesh: Mesh) -> None:
    arrays = qkv()
    right = mask_of(arrays)
    assert 0.4 < right.mean() < 0.6
    for spec in (P("x"), P("y"), BOTH, P("y", None, "x"), P(None, None, ("y", "x"))):
        same(compiled(mask_of, put(mesh, arrays, alike(spec)), sums=False), right)
    same(compiled(mask_of, put(mesh, arrays, {}), sums=False), right)


@pytest.mark.parametrize("name", AUTOMATIC)
def test_dense(mesh: Mesh, name: str) -> None:
    given, specs, sums = DENSE[name]
    compare(*split(given), lambda arrays: put(mesh, arrays, specs), sums)


@pytest.mark.parametrize("name", ["both", "key-heads", "bias-batch"])
def test_explicit(explicit: Mesh, name: str) -> None:
    given, specs, sums = DENSE[name]
    compare(*split(given), lambda arrays: put(explicit, arrays, specs), sums)


def compare(arrays: Any, options: Any, spread: Any, sums: bool) -> None:
    f = functools.partial(results_and_gradients, functools.partial(attend, options))
    given = cotangents(*attend(options, **arrays))
    right = f(arrays, given)
    placed = spread(arrays)
    results = attend(options, **placed)
    cotangent = tuple(jax.device_put(x, y.sharding) for x, y in zip(given, results, strict=True))
    actual = compiled(f, placed, cotangent, sums=sums)
    check(actual, right)
    assert not actual[0][0].sharding.is_fully_replicated
    if not sums:
        same(actual[1], right[1])


def test_cotangents_are_followed(mesh: Mesh) -> None:
    """Where the arguments are whole, the gradients are divided as dout is."""
    arrays = qkv()
    f = functools.partial(results_and_gradients, functools.partial(attend, {}))
    out, lse = cotangents(*attend({}, **arrays))
    spread = put(mesh, {"out": out}, {"out": BOTH})["out"]
    check(compiled(f, put(mesh, arrays, {}), (spread, lse)), f(arrays, (out, lse)))


@pytest.mark.parametrize("heads", [4, 8])
def test_packed(mesh: Mesh, heads: int) -> None:
    arrays = {"q": random(20, 8, 16), "k": random(20, heads, 16), "v": random(20, heads, 16)}
    ends = np.array([0, 5, 5, 20], np.int32)

    options = {"max_seqlen_q": 15, "max_seqlen_k": 15, "return_lse": True}
    attend = functools.partial(
        anyflash.jax.attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends, **DROPOUT, **options
    )
    f = functools.partial(results_and_gradients, attend)
    given = cotangents(*attend(**arrays))
    right = f(arrays, given)
    actual = compiled(f, put(mesh, arrays, alike(P(None, "y"))), given, sums=False)
    same(actual, right)


def test_a_traced_seed_and_vmap(mesh: Mesh) -> None:
    """Every part of the mapped axis drops what it would drop alone."""
    arrays = {name: np.stack([x, 2 * x]) for name, x in qkv().items()}

    def f(arrays: Any, seed: Any) -> Any:
        return jax.vmap(lambda x: anyflash.jax.attention(**x, dropout_p=0.5, seed=seed))(arrays)

    seed = np.uint32(7)
    spread = put(mesh, arrays, alike(P(None, "x", None, "y")))
    same(compiled(f, spread, seed), f(arrays, seed))


def test_gradients_of_gradients(mesh: Mesh) -> None:
    def loss(arrays: Any) -> Any:
        gradients = jax.grad(lambda x: (attend({}, **x)[0] ** 2).sum())(arrays)
        return sum((x**2).sum() for x in gradients.values())

    arrays = qkv()
    actual = jax.jit(jax.grad(loss))(put(mesh, arrays, alike(BOTH)))
    for name, x in jax.grad(loss)(arrays).items():
        bound = 1e-4 * np.abs(x).max()
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=bound, err_msg=name)
