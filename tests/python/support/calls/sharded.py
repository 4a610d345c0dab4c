"""Calls of anyflash.jax on arrays that are sharded over a mesh of eight devices."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_calls import floats_of, same

BATCH, ROWS, COLUMNS, HEADS = 4, 10, 12, 8
BATCHES, BOTH = P("x"), P("x", None, "y")
ALL_HEADS = P(None, None, ("x", "y"))
# Of the refusals.
STAYS = "a sequence stays on one device: shard those axes, or replicate this one"
GATHERS = re.compile(r"all-gather|all-to-all|collective-permute")


def random(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def qkv(heads: int = HEADS, heads_k: int = HEADS) -> dict[str, Any]:
    return {
        "q": random(BATCH, ROWS, heads, 16),
        "k": random(BATCH, COLUMNS, heads_k, 16),
        "v": random(BATCH, COLUMNS, heads_k, 8),
    }


def random_ranges(batch: int, heads_k: int) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    numbers = generator.integers(-2, ROWS + 2, (batch, heads_k, COLUMNS, 2), np.int32)
    return {"key_ranges": numbers}


def alike(spec: Any) -> dict[str, Any]:
    return dict.fromkeys(("q", "k", "v"), spec)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


@pytest.fixture
def explicit() -> Mesh:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


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
    "ranges": (
        qkv(8, 4) | random_ranges(BATCH, 4),
        alike(BOTH) | {"key_ranges": P("x", "y")},
        False,
    ),
    "ranges-whole": (qkv(8, 4) | random_ranges(BATCH, 4), {"q": BOTH}, True),
    "ranges-few": (
        qkv(8, 2) | random_ranges(1, 2),
        {"q": BOTH, "k": BATCHES, "v": BATCHES},
        True,
    ),
    "ranges-first": (
        qkv(8, 2) | random_ranges(1, 2),
        alike(P(None, None, "x")) | {"q": ALL_HEADS, "key_ranges": P(None, "x")},
        True,
    ),
    "ranges-one": (qkv(8, 4) | random_ranges(1, 1), alike(BOTH), False),
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
            **random_ranges(BATCH, HEADS),
            "causal": True,
        },
        alike(BOTH) | {"alibi_slopes": P("x", "y")},
        False,
    ),
}


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
