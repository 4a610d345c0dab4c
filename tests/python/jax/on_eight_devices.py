"""anyflash.jax on arrays that are sharded over a mesh. test_sharding.py runs these tests, in a
process of their own with eight devices."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_calls import cotangents, floats_of, same

BATCH, ROWS, COLUMNS, HEADS = 4, 10, 12, 8
BATCHES, BOTH = P("x"), P("x", None, "y")
ALL_HEADS = P(None, None, ("x", "y"))
GATHERS = re.compile(r"all-gather|all-to-all|collective-permute")


def random(*shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)
    return values.astype(np.float32)


def qkv(heads: int = HEADS, heads_k: int = HEADS) -> dict[str, Any]:
    return {
        "q": random(BATCH, ROWS, heads, 16),
        "k": random(BATCH, COLUMNS, heads_k, 16),
        "v": random(BATCH, COLUMNS, heads_k, 8),
    }


def alike(spec: Any) -> dict[str, Any]:
    return dict.fromkeys(("q", "k", "v"), spec)


# Arguments, their shardings (what is not named is on every device), and whether gradients are
# summed over devices.
DENSE: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "batch": (qkv(), alike(BATCHES), False),
    "heads": (qkv(), alike(ALL_HEADS), False),
    "both": (qkv(), alike(BOTH), False),
    "only-q": (qkv(), {"q": BOTH}, False),
    "only-v": (qkv(), {"v": BATCHES}, False),
    "key-heads": (qkv(8, 4), alike(BOTH), False),
    "key-heads-whole": (qkv(8, 4), {"q": BOTH}, True),
    "key-heads-few": (qkv(8, 2), {"q": BOTH, "k": BATCHES, "v": BATCHES}, True),
    "key-heads-one": (qkv(8, 1), {"q": ALL_HEADS}, True),
    "key-heads-apart": (qkv(12, 6), {"q": BOTH, "k": BATCHES, "v": BATCHES}, True),
    "key-heads-first": (qkv(8, 2), alike(P(None, None, "x")) | {"q": ALL_HEADS}, True),
    "bias": (
        qkv() | {"bias": random(BATCH, HEADS, ROWS, COLUMNS)},
        alike(BOTH) | {"bias": P("x", "y")},
        False,
    ),
    "bias-batch": (
        qkv() | {"bias": random(1, HEADS, ROWS, COLUMNS)},
        alike(BOTH) | {"bias": P(None, "y")},
        True,
    ),
    "bias-heads": (qkv() | {"bias": random(BATCH, 1, 1, COLUMNS)}, alike(BOTH), True),
    "bias-both": (qkv() | {"bias": random(ROWS, COLUMNS)}, alike(BOTH), True),
    "slopes-sinks": (
        qkv() | {"alibi_slopes": random(HEADS), "sinks": random(HEADS)},
        alike(BOTH) | {"sinks": P("y")},
        True,
    ),
    "masks": (
        qkv()
        | {
            "alibi_slopes": random(BATCH, HEADS),
            "seqused_k": np.array([7, 12, 0, 3], np.int32),
            "block_mask": np.ones((BATCH, HEADS, 1, 1), bool),
            "bias": random(HEADS, ROWS, COLUMNS) > 0,
            "causal": True,
        },
        alike(BOTH) | {"alibi_slopes": P("x", "y")},
        False,
    ),
}


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


def put(mesh: Mesh, given: dict[str, Any], specs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in given.items()
    }


def split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    return arrays, {name: x for name, x in given.items() if name not in arrays}


def attend(options: dict[str, Any], **arrays: Any) -> Any:
    return anyflash.jax.attention(**arrays, **options, return_lse=True)


attend_both = functools.partial(attend, {})


def results_and_gradients(attend: Any, arrays: Any, given: Any) -> Any:
    """``given``: the cotangents of out and lse."""
    floats = floats_of(arrays)
    results, pull = jax.vjp(lambda floats: attend(**arrays | floats), floats)
    return results, pull(given)[0]


def check(actual: Any, right: Any) -> None:
    """The same bits of results, and gradients up to the order of sums."""
    same(actual[0], right[0])
    assert actual[1].keys() == right[1].keys()
    for name, x in right[1].items():
        bound = 1e-5 * np.abs(np.asarray(x, np.float32)).max()
        assert actual[1][name].dtype == x.dtype
        np.testing.assert_allclose(actual[1][name], x, rtol=1e-5, atol=bound, err_msg=name)


def compiled(f: Any, *arguments: Any, sums: bool | None = None) -> Any:
    """What ``f`` gives, computed where the arguments are."""
    program = jax.jit(f).lower(*arguments).compile()
    text = program.as_text()
    assert not GATHERS.search(text), text
    if sums is not None:
        assert ("all-reduce" in text) == sums, text
    return program(*arguments)


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


def test_layer(mesh: Mesh) -> None:
    """With tensor parallelism, the weights say where the heads are."""
    x, wide, high = random(BATCH, ROWS, 32), random(32, HEADS * 16), random(HEADS * 16, 32)

    def loss(weights: Any, x: Any) -> Any:
        q, k, v = ((x @ w).reshape(BATCH, ROWS, HEADS, 16) for w in weights[:3])
        out = anyflash.jax.attention(q, k, v, causal=True)
        return ((out.reshape(BATCH, ROWS, -1) @ weights[3]) ** 2).mean()

    f = jax.value_and_grad(loss, argnums=(0, 1))
    weights = (wide, wide / 2, wide / 4, high)
    specs = dict.fromkeys(range(3), P(None, "y")) | {3: P("y")}
    spread = tuple(put(mesh, dict(enumerate(weights)), specs).values())
    actual = compiled(f, spread, put(mesh, {"x": x}, {"x": P("x")})["x"], sums=True)
    right = f(weights, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


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


# Meshes whose axes are explicit -------------------------------------------------------------------

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


@pytest.fixture
def explicit() -> Mesh:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


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


def test_explicit_refused(explicit: Mesh) -> None:
    """When the call is traced."""
    refused = {"q": P(None, "x")}, {"k": P("x", None, "y")}, {"q": P("x"), "k": P("y")}
    messages = STAYS, "heads of k and v are sharded over", "are sharded differently, over"
    for specs, message in zip(refused, messages, strict=True):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(attend_both, **put(explicit, qkv(8, 4), specs))
    with pytest.raises(ValueError, match=r"[kv] is sharded by its type as P.*: reshard it"):
        attend_both(**put(explicit, qkv(), {"q": BATCHES}))


# jax.nn.dot_product_attention's place -------------------------------------------------------------

DROP_IN: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True, "local_window_size": (3, 0)},
    "bias-mask": {
        "bias": random(1, HEADS, ROWS, COLUMNS),
        "mask": random(BATCH, 1, ROWS, COLUMNS) > 0,
    },
    "lengths": {
        "query_seq_lengths": np.array([4, 10, 0, 3], np.int32),
        "key_value_seq_lengths": np.array([7, 12, 1, 3], np.int32),
        "is_causal": True,
    },
}


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


@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_explicit_drop_in(explicit: Mesh, name: str) -> None:
    arrays, options = split(DROP_IN[name])
    f = functools.partial(anyflash.jax.dot_product_attention, **options)
    heads = qkv(8, 4)
    spread = put(explicit, heads, alike(BOTH))
    out = compiled(lambda heads, arrays: f(*heads, **arrays), tuple(spread.values()), arrays)
    same(out, f(*heads.values(), **arrays))
    assert out.sharding.is_equivalent_to(spread["q"].sharding, 4)


# Refusals -----------------------------------------------------------------------------------------

STAYS = "a sequence stays on one device: shard those axes, or replicate this one"
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
    "dropout": (
        qkv() | {"dropout_p": 0.5, "seed": 1},
        alike(BATCHES),
        "a device cannot count those of others",
    ),
}


@pytest.mark.parametrize(("given", "specs", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(mesh: Mesh, given: dict[str, Any], specs: dict[str, Any], message: str) -> None:
    arrays, options = split(given)
    f = jax.jit(lambda arrays: anyflash.jax.attention(**arrays, **options))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        f(put(mesh, arrays, specs))


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


def test_dropout_of_what_is_whole(mesh: Mesh) -> None:
    """Every device draws what one alone would."""
    f = jax.jit(lambda arrays: anyflash.jax.attention(**arrays, dropout_p=0.5, seed=1))
    same(f(put(mesh, qkv(), {})), f(qkv()))
