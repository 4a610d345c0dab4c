"""The compiler propagates shardings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_calls import cotangents, same
from calls.sharded import (
    BATCH,
    BATCHES,
    BOTH,
    COLUMNS,
    DENSE,
    DROP_IN,
    HEADS,
    ROWS,
    alike,
    attend,
    attend_both,
    check,
    compiled,
    mesh,
    put,
    qkv,
    random,
    results_and_gradients,
    split,
)

__all__ = ["mesh"]


@pytest.mark.parametrize(("given", "specs", "sums"), DENSE.values(), ids=DENSE)
def test_dense(mesh: Mesh, given: dict[str, Any], specs: dict[str, Any], sums: bool) -> None:
    arrays, options = split(given)
    f = functools.partial(results_and_gradients, functools.partial(attend, options))
    given = cotangents(*attend(options, **arrays))
    actual = compiled(f, put(mesh, arrays, specs), given, sums=sums)
    check(actual, f(arrays, given))
    assert not actual[0][0].sharding.is_fully_replicated


def test_bfloat16(mesh: Mesh) -> None:
    """What is summed over devices has not been rounded to bfloat16 before."""
    arrays = {name: x.astype(jnp.bfloat16) for name, x in qkv(8, 1).items()}
    arrays["bias"] = random(HEADS, ROWS, COLUMNS).astype(jnp.bfloat16)
    f = functools.partial(results_and_gradients, attend_both)
    given = cotangents(*attend_both(**arrays))
    right = f(arrays, given)
    specs = {"q": BOTH, "k": BATCHES, "v": BATCHES, "bias": P("y")}
    actual = compiled(f, put(mesh, arrays, specs), given, sums=True)
    same(actual[0], right[0])
    for name, x in right[1].items():
        off = np.asarray(actual[1][name] != x).mean()
        assert off < 0.01, f"{name}: {off:.0%} of the elements are rounded otherwise"


def test_other_results(mesh: Mesh) -> None:
    arrays = qkv()

    def f(arrays: Any) -> Any:
        return anyflash.jax.attention(**arrays, return_max_logits=True).max_logits

    actual = compiled(f, put(mesh, arrays, alike(BOTH)), sums=False)
    same(actual, f(arrays))
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)


def test_mesh_of_the_context(mesh: Mesh) -> None:
    """No argument has it."""

    def f(q: Any, k: Any, v: Any) -> Any:
        q = jax.lax.with_sharding_constraint(q, BOTH)
        return anyflash.jax.attention(q, k, v)

    right = anyflash.jax.attention(**qkv())
    modern: Any = getattr(jax, "set_mesh", None)
    with modern(mesh) if modern else jax.sharding.use_mesh(mesh):
        out = compiled(f, *qkv().values())
    same(out, right)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, BOTH), 4)


def test_layers(mesh: Mesh) -> None:
    """With tensor parallelism, scanned and recomputed: the weights say where the heads are. Of the
    two key heads every device keeps a copy."""
    x = random(BATCH, ROWS, 32)
    weights = {"q": random(3, 32, HEADS * 16), "kv": random(3, 32, 2 * 2 * 16)}
    weights["out"] = random(3, HEADS * 16, 32)
    weights = {name: w / 8 for name, w in weights.items()}

    @jax.checkpoint
    def layer(x: Any, weights: Any) -> Any:
        q = (x @ weights["q"]).reshape(BATCH, ROWS, HEADS, 16)
        k, v = jnp.moveaxis((x @ weights["kv"]).reshape(BATCH, ROWS, 2, 2, 16), 2, 0)
        out = anyflash.jax.attention(q, k, v, causal=True)
        return x + out.reshape(BATCH, ROWS, -1) @ weights["out"], None

    def loss(weights: Any, x: Any) -> Any:
        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    f = jax.value_and_grad(loss, argnums=(0, 1))
    spread = put(mesh, weights, {"q": P(None, None, "y"), "out": P(None, "y")})
    actual = compiled(f, spread, put(mesh, {"x": x}, {"x": P("x")})["x"], sums=True)
    right = f(weights, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_gradients_of_gradients(mesh: Mesh) -> None:
    """Of JAX's own operations, which the compiler divides likewise."""

    def loss(arrays: Any) -> Any:
        gradients = jax.grad(lambda x: (anyflash.jax.attention(**x) ** 2).sum())(arrays)
        return sum((x**2).sum() for x in gradients.values())

    arrays = qkv()
    actual = compiled(jax.grad(loss), put(mesh, arrays, alike(BOTH)))
    for name, x in jax.grad(loss)(arrays).items():
        bound = 1e-4 * np.abs(x).max()
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=bound, err_msg=name)


def test_results_elsewhere(mesh: Mesh) -> None:
    """Who wants the result in parts of the sequence has it moved, and its cotangent back."""
    arrays, options = qkv(), {"causal": True}
    f = functools.partial(results_and_gradients, functools.partial(attend, options))
    given = cotangents(*attend(options, **arrays))
    elsewhere = NamedSharding(mesh, P("y", "x")), NamedSharding(mesh, P())
    moved = jax.jit(f, in_shardings=(None, elsewhere), out_shardings=(elsewhere, None))
    check(moved(put(mesh, arrays, alike(BOTH)), given), f(arrays, given))


def test_cotangents_are_followed(mesh: Mesh) -> None:
    """Where the arguments are whole, the gradients are divided as dout is."""
    arrays = qkv()
    f = functools.partial(results_and_gradients, attend_both)
    out, lse = cotangents(*attend_both(**arrays))
    spread = put(mesh, {"out": out}, {"out": BOTH})["out"]
    check(compiled(f, put(mesh, arrays, {}), (spread, lse)), f(arrays, (out, lse)))


def test_cotangents_by_parts_of_an_axis(mesh: Mesh) -> None:
    """Two heads of 8 on four devices: dout is moved to where the arguments are."""
    arrays, weights = qkv(2, 2), random(2 * 8, 24)

    def loss(arrays: Any, weights: Any) -> Any:
        out = anyflash.jax.attention(**arrays)
        return ((out.reshape(BATCH, ROWS, -1) @ weights) ** 2).mean()

    f = jax.grad(loss)
    actual = jax.jit(f)(put(mesh, arrays, {}), put(mesh, {"w": weights}, {"w": P("y")})["w"])
    for name, x in f(arrays, weights).items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=1e-5 * np.abs(x).max())


# Packed sequences ---------------------------------------------------------------------------------

PACKED = {
    "all": (alike(P(None, "y")), False),
    "key-heads": (alike(P(None, ("x", "y"))) | {"k": P(), "v": P()}, True),
}


@pytest.mark.parametrize(("specs", "sums"), PACKED.values(), ids=PACKED)
def test_packed(mesh: Mesh, specs: dict[str, Any], sums: bool) -> None:
    ends = np.array([0, 5, 5, 20], np.int32)
    arrays = {
        "q": random(20, 8, 16),
        "k": random(20, 4, 16),
        "v": random(20, 4, 16),
        "bias": random(3, 8, 15, 15),
        "alibi_slopes": random(3, 8),
        "sinks": random(8),
        "seqused_k": np.array([4, 0, 15], np.int32),
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
    }

    attend = functools.partial(
        anyflash.jax.attention_varlen,
        max_seqlen_q=15,
        max_seqlen_k=15,
        causal=True,
        return_lse=True,
    )
    f = functools.partial(results_and_gradients, attend)
    given = cotangents(*attend(**arrays))
    actual = compiled(f, put(mesh, arrays, specs), given, sums=sums)
    check(actual, f(arrays, given))
    assert not actual[0][0].sharding.is_fully_replicated


# jax.vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("x"), P(None, "x", None, "y"), P("x", "y")])
def test_vmap(mesh: Mesh, spec: Any) -> None:
    """The mapped axis, the batch and the heads stay where they are."""
    arrays = {name: np.stack([x, 2 * x]) for name, x in qkv().items()}
    shared = arrays.pop("k")[0]

    def attend(**mapped: Any) -> Any:
        return jax.vmap(lambda mapped: attend_both(**mapped, k=shared))(mapped)

    f = functools.partial(results_and_gradients, attend)
    given = cotangents(*attend(**arrays))
    actual = compiled(f, put(mesh, arrays, {"q": spec, "v": spec}), given)
    check(actual, f(arrays, given))
    assert not actual[0][0].sharding.is_fully_replicated


# jax.nn.dot_product_attention's place -------------------------------------------------------------


@pytest.mark.parametrize("given", DROP_IN.values(), ids=DROP_IN)
def test_drop_in(mesh: Mesh, given: dict[str, Any]) -> None:
    arrays, options = split(given)

    def f(qkv: Any, arrays: Any) -> Any:
        def loss(qkv: Any) -> Any:
            out = anyflash.jax.dot_product_attention(*qkv, **arrays, **options)
            return (out**2).sum(), out

        gradients, out = jax.grad(loss, has_aux=True)(qkv)
        return out, dict(zip("qkv", gradients, strict=True))

    heads = qkv(8, 4)
    spread = tuple(put(mesh, heads, alike(BOTH)).values())
    check(compiled(f, spread, arrays), f(tuple(heads.values()), arrays))
