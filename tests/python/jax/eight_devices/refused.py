"""What cannot stay where it is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.sharded import (
    BATCH,
    BATCHES,
    BOTH,
    COLUMNS,
    HEADS,
    ROWS,
    STAYS,
    alike,
    mesh,
    put,
    qkv,
    random,
    split,
)

__all__ = ["mesh"]

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": (qkv(), {"q": P(None, "x")}, rf"axis 1 of q is sharded over \('x',\).*{STAYS}"),
    "columns": (qkv(), {"k": P("x", "y")}, f"axis 1 of k.*{STAYS}"),
    "head-dim": (qkv(), {"v": P(None, None, None, "y")}, f"axis 3 of v.*{STAYS}"),
    "bias": (
        qkv() | {"bias": random(HEADS, 8, COLUMNS)[:, :1]},
        {"bias": P(None, None, "y")},
        f"axis 3 of bias.*{STAYS}",
    ),
    "key-heads": (qkv(8, 4), {"k": P(None, None, "y")}, "heads of k and v are sharded over"),
}


@pytest.mark.parametrize(("given", "specs", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(mesh: Mesh, given: dict[str, Any], specs: dict[str, Any], message: str) -> None:
    arrays, options = split(given)
    f = jax.jit(lambda arrays: anyflash.jax.attention(**arrays, **options))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        f(put(mesh, arrays, specs))


def test_parts_of_an_axis_are_refused(mesh: Mesh) -> None:
    """Four devices cannot have two key heads: the compiler would divide the head dim, too."""
    x, weights = random(BATCH, ROWS, 32), random(32, 2 * 16)
    weights = jax.device_put(weights, NamedSharding(mesh, P(None, "y")))

    def f(x: Any, weights: Any) -> Any:
        k = (x @ weights).reshape(BATCH, ROWS, 2, 16)
        return anyflash.jax.attention(k, k, k)

    with pytest.raises(jax.errors.JaxRuntimeError, match="sharded over parts of an axis"):
        jax.jit(f)(x, weights)


def test_packed_tokens_are_refused(mesh: Mesh) -> None:
    q, ends = random(20, 8, 16), np.array([0, 5, 20], np.int32)
    q = jax.device_put(q, NamedSharding(mesh, P("x")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="divided along its heads alone"):
        jax.jit(anyflash.jax.attention_varlen, static_argnums=(5, 6))(q, q, q, ends, ends, 15, 15)


@pytest.mark.parametrize("kind", ["shard_map", "mesh"])
def test_two_kinds_of_axes_are_refused(mesh: Mesh, kind: str) -> None:
    f = anyflash.jax.attention
    if kind == "shard_map":
        f = jax.shard_map(f, mesh=mesh, in_specs=BATCHES, out_specs=BATCHES, axis_names={"x"})
        message = "a jax.shard_map over all axes of the mesh is allowed"
    else:
        types = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
        mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
        message = "a mesh whose axes are all explicit, or all automatic, is allowed"
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(f)(*put(mesh, qkv(), alike(BOTH)).values())
