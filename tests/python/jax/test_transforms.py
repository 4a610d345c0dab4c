"""anyflash.jax within JAX's transformations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import anyflash.jax
from calls.frameworks import random
from calls.jax_calls import arrays, floats_of, narrow, same

__all__ = ["narrow"]

SIZE = 3
RANGES = np.random.default_rng(1).integers(-5, 40, (2, 2, 50, 2), np.int32)
# Which operands are mapped, the options, and whether one call of the core does it all.
MAPPED: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "all": (("q", "k", "v"), {"causal": True}, True),
    "q": (("q",), {"window_size": (3, 2)}, True),
    "k": (("k",), {"seqused_k": np.array([7, 50], np.int32)}, True),
    "bias": (("bias", "v"), {"bias": random(2, 1, 30, 50)}, True),
    "bias-shared": (("q",), {"bias": random(4, 1, 50)}, True),
    "slopes": (("alibi_slopes",), {"alibi_slopes": random(4)}, True),
    "slopes-batch": (("q",), {"alibi_slopes": random(2, 4)}, True),
    "lengths": (("seqused_k",), {"seqused_k": np.array([7, 50], np.int32)}, True),
    "blocks": (("block_mask",), {"block_mask": np.ones((2, 1, 1, 1), bool)}, True),
    "ranges": (("key_ranges",), {"key_ranges": RANGES}, True),
    "ranges-shared": (("q",), {"key_ranges": RANGES[:1, :1]}, True),
    "sinks-shared": (("q",), {"sinks": random(4)}, True),
    "sinks": (("sinks",), {"sinks": random(4)}, False),
    "dropout": (("q",), {"dropout_p": 0.5, "seed": 3}, False),
}


def parts(x: Any) -> Any:
    """As many different ones of the same shape."""
    if x.dtype == bool:
        return np.stack([x, ~x, x])
    if x.dtype == np.int32:
        return np.stack([x, x // 2, x - 1])
    return np.stack([x, x * 2, x - 1])


def launches(op: str) -> int:
    return sum(row["launches"] for row in anyflash.build_info()["kernels"] if row["op"] == op)


def take(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


@pytest.mark.parametrize(("names", "options", "folds"), MAPPED.values(), ids=MAPPED)
def test_vmap(names: tuple[str, ...], options: Any, folds: bool) -> None:
    """What the parts give one by one: results, and gradients of what is mapped and of q."""
    given = arrays() | options
    mapped = {name: parts(given.pop(name)) for name in names}

    def attend(mapped: Any) -> Any:
        return anyflash.jax.attention(**given, **mapped, return_lse=True)

    before = launches("forward")
    results = jax.vmap(attend)(mapped)
    assert launches("forward") - before == (1 if folds else SIZE)
    for i in range(SIZE):
        same(take(results, i), attend(take(mapped, i)))


@pytest.mark.parametrize("name", ["bias", "bias-batch", "slopes", "sinks", "dropout"])
def test_vmap_of_gradients(name: str) -> None:
    options = {
        "bias": {"bias": random(2, 1, 30, 50)},
        "bias-batch": {"bias": random(1, 4, 1, 50)},
        "slopes": {"alibi_slopes": random(4)},
        "sinks": {"sinks": random(4)},
        "dropout": {"dropout_p": 0.5, "seed": 3},
    }[name]
    given = arrays() | options
    floats = floats_of(given)
    others = {key: x for key, x in given.items() if key not in floats}
    q = parts(floats.pop("q"))

    def loss(q: Any, floats: Any) -> Any:
        return (anyflash.jax.attention(q, **floats, **others) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    batched = jax.vmap(gradients, in_axes=(0, None))(q, floats)
    for i in range(SIZE):
        same(take(batched, i), gradients(q[i], floats))
    summed = jax.grad(lambda q, x: jax.vmap(loss, (0, None))(q, x).sum(), argnums=1)(q, floats)
    for key, x in summed.items():
        right = batched[1][key].sum(0)
        np.testing.assert_allclose(x, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "seed": 3}], ids=str)
def test_vmap_of_nothing(options: dict[str, Any]) -> None:
    """An axis of size 0, folded or looped over, with arrays that are not mapped."""
    given = arrays()
    q = jnp.zeros((0, *given["q"].shape))

    def loss(q: Any, k: Any) -> Any:
        return anyflash.jax.attention(q, k, given["v"], **options).sum()

    out = jax.vmap(lambda q: anyflash.jax.attention(q, given["k"], given["v"], **options))(q)
    assert out.shape == (*q.shape[:-1], given["v"].shape[-1])
    dq, dk = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(q, given["k"])
    assert (dq.shape, dk.shape) == (q.shape, (0, *given["k"].shape))


def test_nested_vmap() -> None:
    given = arrays()
    q = np.stack([parts(given["q"]), parts(given["q"] + 1)], 2)  # (parts, batch, 2, ...)
    once = jax.vmap(anyflash.jax.attention, in_axes=(1, None, None), out_axes=2)
    out = jax.vmap(once, in_axes=(0, None, None))(q, given["k"], given["v"])
    for i in range(SIZE):
        for j in range(2):
            right = anyflash.jax.attention(q[i, :, j], given["k"], given["v"])
            same(out[i, :, :, j], right)


def test_vmap_packed() -> None:
    given = {name: parts(x[0]) for name, x in arrays().items()}
    ends = jnp.array([[0, 9, 30], [0, 30, 30], [0, 1, 30]], jnp.int32)
    keys = jnp.array([0, 20, 50], jnp.int32)

    def attend(given: Any, ends: Any) -> Any:
        packed = {"cu_seqlens_q": ends, "max_seqlen_q": 30}
        packed |= {"cu_seqlens_k": keys, "max_seqlen_k": 30}
        return anyflash.jax.attention_varlen(**given, **packed, causal=True)

    out = jax.vmap(attend)(given, ends)
    for i in range(SIZE):
        same(out[i], attend(take(given, i), ends[i]))


def test_mapped_keys_of_jax_random() -> None:
    given = arrays()
    keys = jax.random.split(jax.random.key(0), SIZE)

    def attend(key: Any) -> Any:
        return anyflash.jax.attention(**given, dropout_p=0.5, seed=key)

    out = jax.vmap(attend)(keys)
    for i in range(SIZE):
        same(out[i], attend(keys[i]))


def test_scan_and_checkpoint() -> None:
    given = arrays()
    k, v = given["k"], given["v"][..., [*range(12), *range(8)]]

    def layer(q: Any, scale: Any) -> Any:
        return q + anyflash.jax.attention(q * scale, k, v, causal=True), None

    scales = jnp.array([0.5, 1.0, 2.0])

    def loss(q: Any, layer: Any) -> Any:
        return (jax.lax.scan(layer, q, scales)[0] ** 2).sum()

    def unrolled(q: Any) -> Any:
        for scale in scales:
            q, _ = layer(q, scale)
        return (q**2).sum()

    right = jax.grad(unrolled)(given["q"])
    for one in (layer, jax.checkpoint(layer)):
        gradient = jax.grad(loss)(given["q"], one)
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())


def test_checkpoint_computes_again() -> None:
    given = arrays()

    def loss(given: Any) -> Any:
        return anyflash.jax.attention(**given).sum()

    right = jax.jit(jax.grad(loss))(given)
    before = launches("forward")
    same(jax.jit(jax.grad(jax.checkpoint(loss)))(given), right)
    assert launches("forward") == before + 1


def test_eval_shape() -> None:
    given = arrays("bfloat16")
    result = jax.eval_shape(
        lambda x: anyflash.jax.attention(**x, return_lse=True, return_max_logits=True), given
    )
    assert (result.out.shape, result.out.dtype) == ((2, 30, 4, 12), jnp.bfloat16)
    assert (result.lse.shape, result.lse.dtype) == ((2, 4, 30), jnp.float32)
    assert result.max_logits.shape == (2, 4)
    assert result.rng_state is None


def test_export() -> None:
    """Also of gradients, for any batch, and for a machine that is not this one."""
    given = arrays()
    (batch,) = export.symbolic_shape("batch")
    allowed = [
        export.DisabledSafetyCheck.custom_call(f"anyflash_{name}")
        for name in ("forward", "backward")
    ]
    shapes = {
        name: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for name, x in given.items()
    }
    gradients = jax.jit(jax.grad(lambda x: anyflash.jax.attention(**x, causal=True).sum()))
    exported = export.export(gradients, disabled_checks=allowed)(shapes)
    same(exported.call(given), gradients(given))
    exported = export.export(gradients, disabled_checks=allowed, platforms=["cuda"])(shapes)
    assert exported.platforms == ("cuda",)


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import anyflash.jax
jax.config.update("jax_num_cpu_devices", 4)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
random = np.random.default_rng(0)
make = lambda *shape: random.standard_normal(shape, np.float32)
given = {
    "q": make(4, 9, 4, 8), "k": make(4, 9, 2, 8), "v": make(4, 9, 2, 8),
    "bias": make(1, 4, 9, 9), "sinks": make(4), "alibi_slopes": make(4, 4),
}
rows = P("batch", None, "heads")
specs = {
    "q": rows, "k": rows, "v": rows,
    "bias": P(None, "heads"), "sinks": P("heads"), "alibi_slopes": P("batch", "heads"),
}
def attend(given):
    return anyflash.jax.attention(**given, causal=True, return_lse=True)
sharded = jax.shard_map(
    attend, mesh=mesh, in_specs=(specs,), out_specs=(rows, P("batch", "heads"))
)
def loss(attend):
    return lambda given: sum((x**2).sum() for x in attend(given))
right = attend(given)
for f in (sharded, jax.jit(sharded)):
    for x, y in zip(f(given), right):
        assert (x == y).all()
apart = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in given.items()}
for x, y in zip(jax.jit(attend)(apart), right):
    assert (x == y).all()
right = jax.grad(loss(attend))(given)
for f in (jax.grad(loss(sharded)), jax.jit(jax.grad(loss(sharded)))):
    for name, x in f(given).items():
        np.testing.assert_allclose(x, right[name], rtol=1e-4, atol=1e-4)
part = {"k": given["k"]}  # no gradient of the bias
gradient = jax.grad(lambda part: loss(sharded)(given | part))(part)["k"]
np.testing.assert_allclose(gradient, right["k"], rtol=1e-4, atol=1e-4)
print("sharded")
"""


def test_shard_map() -> None:
    """Over batch and heads; the bias, which all sequences share, has one gradient."""
    package = Path(anyflash.__file__).parents[1]
    paths = os.pathsep.join([str(package), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout == "sharded\n", done.stderr
