"""Arrays whose types are sharded."""

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
    BATCHES,
    BOTH,
    DENSE,
    DROP_IN,
    STAYS,
    alike,
    attend,
    attend_both,
    check,
    compiled,
    explicit,
    put,
    qkv,
    random,
    results_and_gradients,
    split,
)

__all__ = ["explicit"]

EXPLICIT = (
    "batch",
    "both",
    "key-heads",
    "key-heads-first",
    "bias",
    "bias-batch",
    "bias-both",
    "masks",
)


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit(explicit: Mesh, name: str) -> None:
    given, specs, sums = DENSE[name]
    arrays, options = split(given)
    f = functools.partial(results_and_gradients, functools.partial(attend, options))
    given = cotangents(*attend(options, **arrays))
    spread = put(explicit, arrays, specs)
    results = attend(options, **spread)
    given = tuple(jax.device_put(x, y.sharding) for x, y in zip(given, results, strict=True))
    actual = compiled(f, spread, given, sums=sums)
    check(actual, f(arrays, jax.tree.map(np.asarray, given)))
    assert actual[0][0].sharding.is_equivalent_to(spread["q"].sharding, 4)
    for key, x in actual[1].items():
        assert x.sharding.is_equivalent_to(spread[key].sharding, x.ndim), key


@pytest.mark.parametrize("axis", [0, 1])
def test_explicit_vmap(explicit: Mesh, axis: int) -> None:
    """The mapped axis is sharded, or the batch."""
    arrays = {name: np.stack([x] * 2, axis) for name, x in qkv().items()}
    f = jax.vmap(anyflash.jax.attention, in_axes=axis, out_axes=axis)
    out = compiled(f, *put(explicit, arrays, alike(P("x", None, None, "y"))).values())
    same(out, f(*arrays.values()))
    assert not out.sharding.is_fully_replicated


def test_explicit_packed(explicit: Mesh) -> None:
    """The gradient goes through the LSE alone: zeros stand for dout."""
    q, ends = random(20, 8, 16), np.array([0, 5, 20], np.int32)

    def loss(q: Any) -> Any:
        packed = (ends, ends, 15, 15)
        return (anyflash.jax.attention_varlen(q, q, q, *packed, return_lse=True)[1] ** 2).sum()

    f = jax.grad(loss)
    spread = put(explicit, {"q": q}, {"q": P(None, ("x", "y"))})["q"]
    actual = compiled(f, spread)
    same(actual, f(q))
    assert actual.sharding.is_equivalent_to(spread.sharding, 3)


def test_explicit_refused(explicit: Mesh) -> None:
    """When the call is traced."""
    refused = {"q": P(None, "x")}, {"k": P("x", None, "y")}, {"q": P("x"), "k": P("y")}
    messages = STAYS, "heads of k and v are sharded over", "are sharded differently, over"
    for specs, message in zip(refused, messages, strict=True):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(attend_both, **put(explicit, qkv(8, 4), specs))
    with pytest.raises(ValueError, match=r"[kv] is sharded by its type as P.*: reshard it"):
        attend_both(**put(explicit, qkv(), {"q": BATCHES}))


@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_explicit_drop_in(explicit: Mesh, name: str) -> None:
    arrays, options = split(DROP_IN[name])
    f = functools.partial(anyflash.jax.dot_product_attention, **options)
    heads = qkv(8, 4)
    spread = put(explicit, heads, alike(BOTH))
    out = compiled(lambda heads, arrays: f(*heads, **arrays), tuple(spread.values()), arrays)
    same(out, f(*heads.values(), **arrays))
    assert out.sharding.is_equivalent_to(spread["q"].sharding, 4)
