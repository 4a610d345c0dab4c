"""Calls of anyflash.jax with context_axis, on eight devices that share sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_calls import floats_of
from calls.sharded import random

BATCH, LENGTH, HEADS, HEADS_K, DIM = 2, 256, 4, 2, 8
ROWS = P(None, "cp")
METHODS = ("ring", "gather", "all_to_all")
ENDS = np.array([0, 40, 40, 43, LENGTH], np.int32)  # of packed sequences
shard_map: Any = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map


def ranges(heads: int) -> Any:
    first = np.random.default_rng(1).integers(-20, LENGTH, (1, heads, LENGTH, 1))
    return np.concatenate([first, first + 60], -1).astype(np.int32)


ARRAYS: dict[str, Callable[[], Any]] = {
    "alibi_slopes": lambda: np.abs(random(HEADS)),
    "slopes of each": lambda: np.abs(random(BATCH, HEADS)),
    "sinks": lambda: random(HEADS),
    "bias": lambda: random(1, HEADS, LENGTH, LENGTH),
    "bias of one head": lambda: random(BATCH, 1, LENGTH, LENGTH),
    "bias of one row": lambda: random(1, HEADS, 1, LENGTH),
    "bias of one key": lambda: random(BATCH, HEADS, LENGTH, 1),
    "mask": lambda: random(1, 1, LENGTH, LENGTH) > -0.5,
    "block_mask": lambda: random(BATCH, HEADS, LENGTH // 64, LENGTH // 64) > -0.3,
    "key_ranges": lambda: ranges(HEADS_K),
    "ranges of all heads": lambda: ranges(1),
    "seqused_k": lambda: np.array([50, LENGTH], np.int32),
}
NAMES = {"slopes": "alibi_slopes", "bias": "bias", "mask": "bias", "ranges": "key_ranges"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1), "softcap": 2.0, "softmax_scale": 0.5},
    "left": {"window_size": (17, 0), "arrays": ("slopes of each", "sinks")},
    "bias": {"causal": True, "arrays": ("bias", "sinks")},
    "one-head": {"arrays": ("bias of one head", "alibi_slopes")},
    "one-row": {"causal": True, "arrays": ("bias of one row",)},
    "one-key": {"arrays": ("bias of one key",)},
    "more-keys": {"causal": True, "keys": 2 * LENGTH},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 11},
    "seqused": {"causal": True, "arrays": ("seqused_k", "alibi_slopes")},
    "blocks": {"block_size": (64, 64), "arrays": ("block_mask",)},
    "ranges": {"arrays": ("key_ranges",)},
    "all": {
        "window_size": (90, 30),
        "softcap": 3.0,
        "dropout_p": 0.2,
        "rng_state": (5, 9),
        "block_size": (64, 64),
        "arrays": (
            *("alibi_slopes", "sinks", "mask", "block_mask", "ranges of all heads", "seqused_k"),
        ),
    },
}


def mesh_of(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("cp",))


def inputs(packed: bool, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays, and what is no array."""
    options = dict(options)
    keys = options.pop("keys", LENGTH)
    given = {
        "q": random(BATCH, LENGTH, HEADS, DIM),
        "k": random(BATCH, keys, HEADS_K, DIM) + 0.1,
        "v": random(BATCH, keys, HEADS_K, DIM + 4),
    }
    for name in options.pop("arrays", ()):
        given[NAMES.get(name.split()[0], name)] = ARRAYS[name]()
    if packed:
        unbatched = {"q", "k", "v", "key_ranges"}
        given = {name: x[0] if name in unbatched else x for name, x in given.items()}
    return given, options


def shared(
    method: str,
    layout: str,
    size: int,
    packed: bool = False,
    mesh: Mesh | None = None,
    **others: Any,
) -> Any:
    """Attention of whole arrays in their own order; devices get them in the layout's. ``others``:
    what is no array."""
    rows = 0 if packed else 1
    axes = {"q": rows, "k": rows, "v": rows, "out": rows, "lse": rows + 1, "bias": 2}
    batch = "data" if mesh is not None else None

    def order(length: int) -> Any:
        return anyflash.jax.zigzag_order(length, size if layout == "zigzag" else 1)

    def spec(name: str, x: Any) -> Any:
        if name not in axes or x.shape[axes[name]] == 1:
            return P()
        first = (batch,) if batch and name != "bias" else (None,)
        return P(*first, *(None,) * (axes[name] - 1), "cp") if axes[name] else P("cp")

    def local(arrays: Any) -> Any:
        options = others | {"context_axis": "cp", "method": method, "layout": layout}
        if packed:
            ends = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
            longest = {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH}
            options |= ends | longest
            return anyflash.jax.attention_varlen(**arrays, **options, return_lse=True)
        return anyflash.jax.attention(**arrays, **options, return_lse=True)

    def whole(arrays: Any) -> Any:
        specs = {name: spec(name, x) for name, x in arrays.items()}
        given = {
            name: jnp.take(x, order(x.shape[axes[name]]), axes[name]) if "cp" in specs[name] else x
            for name, x in arrays.items()
        }
        out_specs = tuple(
            spec(name, arrays["q"]) if name == "out" else P(*(batch,) * (1 - packed), None, "cp")
            for name in ("out", "lse")
        )
        mapped = shard_map(
            local, mesh=mesh or mesh_of(size), in_specs=(specs,), out_specs=out_specs
        )
        out, lse = mapped(given)
        back = np.argsort(order(LENGTH))
        return jnp.take(out, back, axes["out"]), jnp.take(lse, back, axes["lse"])

    return whole


def results_and_gradients(attend: Any, arrays: dict[str, Any], given: Any) -> Any:
    floats = floats_of(arrays)

    def f(floats: Any) -> Any:
        results, pull = jax.vjp(lambda floats: attend(arrays | floats), floats)
        return results, pull(given)[0]

    return jax.jit(f)(floats)


def two_axes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "cp"))
