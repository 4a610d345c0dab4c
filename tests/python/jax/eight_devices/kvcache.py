"""Attention with a KV cache, sharded over the batch and the heads: the bits of one device."""

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
from calls.jax_calls import same
from calls.kvcache import angles
from calls.sharded import ALL_HEADS, BATCHES, BOTH, compiled, explicit, mesh, put, random

__all__ = ["explicit", "mesh"]

CACHES = ("k_cache", "v_cache")
BATCH, CAPACITY = 4, 16
# Where sequences lie, and what is split, do not depend on the devices then.
attend = functools.partial(
    anyflash.jax.attention_with_kvcache, split_size=64, causal=True, return_lse=True
)


def call(heads_k: int = 8, page_size: int = 0, new: int = 2) -> dict[str, Any]:
    """Four sequences, two queries each, of 8 heads."""
    given: dict[str, Any] = {"q": random(BATCH, 2, 8, 16)}
    places = (BATCH * CAPACITY // page_size + 1, page_size) if page_size else (BATCH, CAPACITY)
    for name, columns in (("k", 16), ("v", 8)):
        given[f"{name}_cache"] = random(*places, heads_k, columns)
        if new:
            given[name] = random(BATCH, new, heads_k, columns)
    given["cache_seqlens"] = np.array([5, 0, 9, 3], np.int32)
    if page_size:
        pages = np.arange(places[0] - 1, 0, -1, np.int32)
        given["block_table"] = pages.reshape(-1, BATCH).T.copy()
    return given


def alike(spec: Any, *, caches: Any = None) -> dict[str, Any]:
    placed = dict.fromkeys(("q", "k", "v"), spec)
    return placed | dict.fromkeys(CACHES, spec if caches is None else caches)


READ_PAGES = {name: x for name, x in call(page_size=4).items() if name not in ("k", "v")}
ROTARY = dict(zip(("rotary_cos", "rotary_sin"), angles(CAPACITY, 4), strict=True))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch": (call(), alike(BATCHES)),
    "heads": (call(), alike(ALL_HEADS)),
    "both": (call(), alike(BOTH)),
    "key-heads": (call(4), alike(BOTH)),
    "only-q": (call(), {"q": BOTH}),
    "only-caches": (call(), dict.fromkeys(CACHES, BOTH)),
    "one-key-head": (call(1), {"q": BOTH} | dict.fromkeys((*CACHES, "k", "v"), BATCHES)),
    "read": (call(new=0), alike(BOTH)),
    "pages": (call(page_size=4), alike(P(None, None, "y"))),
    "read-pages": (READ_PAGES, {"q": BOTH} | dict.fromkeys(CACHES, P(None, None, "y"))),
    "read-places": (
        call(new=0) | {"cache_batch_idx": np.array([2, 0, 3, 1], np.int32)},
        alike(BOTH, caches=P(None, None, "y")),
    ),
    "more-places": (
        call() | {name: random(BATCH + 1, CAPACITY, 8, 16) for name in CACHES} | {"v": call()["k"]},
        alike(P(None, None, "y")),
    ),
    "arrays": (
        call()
        | ROTARY
        | {
            "rotary_seqlens": np.array([3, 1, 4, 1], np.int32),
            "cache_leftpad": np.array([2, 0, 8, 1], np.int32),
            "alibi_slopes": random(BATCH, 8),
            "sinks": random(8),
            "tree_mask": random(BATCH, 2, 2) > 0,
        },
        alike(BOTH),
    ),
}
EIGHT_BITS = {name: (10 * call(4)[name]).astype(np.int8) for name in CACHES}
CASES["eight-bits"] = (
    call(4)
    | EIGHT_BITS
    | {"k_scale": np.linspace(0.1, 0.2, 4, dtype=np.float32), "v_scale": random(BATCH, 4) ** 2},
    alike(BOTH),
)
CASES["scales-by-row"] = (
    call(8, page_size=4)
    | {name: (10 * x).astype(np.int8) for name, x in call(8, page_size=4).items() if name in CACHES}
    | {"k_scale": random(17, 4, 8) ** 2 + 0.1, "v_scale": random(17, 4, 8) ** 2 + 0.1},
    alike(P(None, None, "y")),
)
CASES["scales-by-place-and-row"] = (
    call(4) | EIGHT_BITS | {"v_scale": random(BATCH, CAPACITY, 4) ** 2 + 0.1},
    alike(BOTH),
)


@pytest.mark.parametrize("name", CASES)
def test_sharded(mesh: Mesh, name: str) -> None:
    given, specs = CASES[name]
    f = functools.partial(lambda given: attend(**given))
    right = f(given)
    actual = compiled(f, put(mesh, given, specs), sums=False)
    if name == "one-key-head":  # a CPU computes the few rows that one device has one by one
        for x, y in zip(actual, right, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    else:
        same(actual, right)
    assert not actual[0].sharding.is_fully_replicated


@pytest.mark.parametrize("types", ["inferred", "explicit"])
@pytest.mark.parametrize("page_size", [0, 4])
def test_latent_rows(request: pytest.FixtureRequest, types: str, page_size: int) -> None:
    """One row for all heads: the heads' devices have it all, and each appends to its own copy."""
    mesh = request.getfixturevalue("mesh" if types == "inferred" else "explicit")
    given = {name: x for name, x in call(1, page_size).items() if name not in ("v", "v_cache")}
    placed = dict.fromkeys(("k", "k_cache"), P() if page_size else BATCHES)
    spread = put(mesh, given, {"q": P(None, None, "y") if page_size else BOTH} | placed)
    f = functools.partial(lambda given: attend(**given, v_cache=None, head_dim_v=8))
    actual, right = compiled(f, spread, sums=False), f(given)
    for x, y in zip(actual[:2], right[:2], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    same(actual[2:], right[2:])
    assert not actual[0].sharding.is_fully_replicated
    assert actual[2].sharding.is_equivalent_to(spread["k_cache"].sharding, 4)


@pytest.mark.parametrize("name", ["batch", "both", "key-heads", "pages"])
def test_explicit(explicit: Mesh, name: str) -> None:
    given, specs = CASES[name]
    f = functools.partial(lambda given: attend(**given))
    spread = put(explicit, given, specs)
    actual = compiled(f, spread, sums=False)
    same(actual, f(given))
    for x, cache in zip(actual[2:], CACHES, strict=True):
        assert x.sharding.is_equivalent_to(spread[cache].sharding, 4)


def test_donated_caches_stay(mesh: Mesh) -> None:
    given = call()
    spread = put(mesh, given, alike(BOTH))

    @functools.partial(jax.jit, donate_argnames=CACHES)
    def step(k_cache: Any, v_cache: Any, others: Any) -> Any:
        return attend(k_cache=k_cache, v_cache=v_cache, **others)

    # Memory of its own: NumPy's may be shared, which cannot be donated.
    caches = [jax.jit(jnp.copy)(spread.pop(name)) for name in CACHES]
    addresses = [[x.data.unsafe_buffer_pointer() for x in c.addressable_shards] for c in caches]
    found = step(*caches, spread)
    same(found, attend(**given))
    assert addresses == [
        [x.data.unsafe_buffer_pointer() for x in c.addressable_shards] for c in found[2:]
    ]


def test_generation_in_a_scan(mesh: Mesh) -> None:
    """The caches are the carry; nothing is gathered."""
    given = call(new=1)
    given["q"] = given["q"][:, :1]

    def generate(given: Any) -> Any:
        step = {name: x for name, x in given.items() if name not in (*CACHES, "cache_seqlens")}

        def one(caches: Any, i: Any) -> Any:
            lengths = given["cache_seqlens"] + i
            out, _, *caches = attend(
                **step, k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths
            )
            return tuple(caches), out

        return jax.lax.scan(one, tuple(given[x] for x in CACHES), jnp.arange(3))

    actual = compiled(generate, put(mesh, given, alike(BOTH)), sums=False)
    same(actual, jax.jit(generate)(given))
    assert actual[0][0].sharding.is_equivalent_to(NamedSharding(mesh, BOTH), 4)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": (call(), dict.fromkeys(CACHES, P(None, "x")), "axis 1 of k_cache is sharded over"),
    "key-heads": (call(4), {"q": BOTH}, "the 4 heads of the caches over"),
    "pages": (
        call(page_size=4),
        alike(BATCHES, caches=P()),
        "block_table is given, and so is k: devices would append to different places",
    ),
    "places": (
        call() | {"cache_batch_idx": np.array([2, 0, 3, 1], np.int32)},
        alike(BATCHES, caches=P()),
        "cache_batch_idx is given, and so is k",
    ),
    "more-places": (
        CASES["more-places"][0],
        {"q": BATCHES},
        "the caches have 5 places, and the batch is 4",
    ),
}


@pytest.mark.parametrize(("given", "specs", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(mesh: Mesh, given: dict[str, Any], specs: dict[str, Any], message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(lambda given: attend(**given))(put(mesh, given, specs))
