"""Calls of anyflash.attention_with_kvcache in NumPy: how they are made, and what they must do."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import DTYPES, KINDS, Formula, Kind, bits, close, random
from oracle.attention import Array

Arguments = dict[str, Any]
LENGTHS = (5, 0, 9)  # filled rows of three sequences
NEW = 3
CAPACITY = 16
# Of frameworks whose arrays can be written to.
WRITABLE = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name != "jax"], ids=lambda kind: kind.name
)


def call(
    *,
    dtype: str = "float32",
    page_size: int = 0,
    new: int = NEW,
    cache_dtype: Any = None,
    heads: tuple[int, int] = (4, 2),
) -> Arguments:
    """Three sequences, two queries each, head dims 20 and 12. Rows that nobody fills are NaN, and
    the pages are handed out from the last one on, with one left over."""
    random = np.random.default_rng(page_size)
    of_q = DTYPES[dtype]
    kind = of_q if cache_dtype is None else cache_dtype
    count, filled = len(LENGTHS), np.array(LENGTHS, np.int32)
    pages = CAPACITY // page_size if page_size else 1
    slots = (count * pages + 1, page_size) if page_size else (count, CAPACITY)
    arguments: Arguments = {"q": random.standard_normal((count, 2, heads[0], 20)).astype(of_q)}
    for name, columns in (("k_cache", 20), ("v_cache", 12)):
        poison = np.nan if kind != np.int8 else 99
        arguments[name] = np.full((*slots, heads[1], columns), poison, kind)
    if new:
        arguments["k"] = random.standard_normal((count, new, heads[1], 20)).astype(of_q)
        arguments["v"] = random.standard_normal((count, new, heads[1], 12)).astype(of_q)
    arguments["cache_seqlens"] = filled
    if page_size:
        handed_out = np.arange(count * pages, 0, -1, np.int32)
        arguments["block_table"] = handed_out.reshape(pages, count).T.copy()
    for name in ("k_cache", "v_cache"):
        for b, length in enumerate(LENGTHS):
            for row in range(length):
                values = random.standard_normal(arguments[name].shape[2:])
                scaled = 40 * values if kind == np.int8 else values
                arguments[name][place(arguments, b, row)] = scaled.astype(kind)
    return arguments


def latent(**options: Any) -> Arguments:
    """The same, where the values are the first 12 columns of the keys."""
    arguments = call(**options)
    arguments.pop("v", None)
    return arguments | {"v_cache": None, "head_dim_v": 12}


def caches_of(arguments: Arguments) -> tuple[str, ...]:
    return tuple(name for name in ("k_cache", "v_cache") if arguments[name] is not None)


def with_tensors(arguments: Arguments) -> Arguments:
    """Of a latent call: the same one with values that are tensors of their own."""
    given = dict(arguments)
    columns = given.pop("head_dim_v")
    for keys, values in (("k", "v"), ("k_cache", "v_cache")):
        if keys in given:
            given[values] = given[keys][..., :columns].copy()
    if "k_scale" in given:
        given["v_scale"] = given["k_scale"]
    return given


def place(arguments: Arguments, sequence: int, row: int) -> tuple[int, int]:
    """Of a sequence's row, along the cache's first two axes."""
    if (table := arguments.get("block_table")) is not None:
        size = arguments["k_cache"].shape[1]
        return int(table[sequence, row // size]), row % size
    if (slots := arguments.get("cache_batch_idx")) is not None:
        return int(slots[sequence]), row
    return sequence, row


def angles(rows: int, pairs: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """rotary_cos and rotary_sin"""
    turns = np.arange(rows)[:, None] / 10.0 ** np.linspace(0, 2, pairs)
    return np.cos(turns).astype(dtype), np.sin(turns).astype(dtype)


def rotated(x: Array, arguments: Arguments, rows: Array) -> Array:
    """x (seqlen, heads, head_dim), its places' rows of rotary_cos and rotary_sin."""
    if "rotary_cos" not in arguments:
        return x
    cos, sin = (
        arguments[name][rows].astype(np.float64)[:, None] for name in ("rotary_cos", "rotary_sin")
    )
    pairs = cos.shape[-1]
    if arguments.get("rotary_interleaved", True):
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    result = x.astype(np.float64)
    a, b = result[..., first].copy(), result[..., second].copy()
    result[..., first], result[..., second] = a * cos - b * sin, a * sin + b * cos
    return result.astype(x.dtype)


def stored(x: Array, scale: Array | float, dtype: Any) -> Array:
    """x (heads, head_dim) as the cache holds it."""
    if np.dtype(dtype).itemsize > 1:
        return x
    values = x.astype(np.float32) / np.float32(scale)
    if dtype == np.int8:
        return np.clip(np.rint(values), -128, 127).astype(dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype)


class Expected(NamedTuple):
    out: Array
    lse: Array
    k_cache: Array
    v_cache: Array


def expected(arguments: Arguments) -> Expected:
    """By the definition, in float64, one sequence after the other."""
    q, k_cache = arguments["q"], arguments["k_cache"].copy()
    caches = {"k": k_cache}
    if columns := arguments.get("head_dim_v"):
        v_cache, scales = k_cache[..., :columns], ("k", "k")
    else:
        v_cache, scales = arguments["v_cache"].copy(), ("k", "v")
        caches["v"] = v_cache
    batch, rows, heads, _ = q.shape
    new = arguments["k"].shape[1] if "k" in arguments else 0
    capacity = k_cache.shape[1]
    if "block_table" in arguments:
        capacity *= arguments["block_table"].shape[1]
    filled = np.broadcast_to(arguments.get("cache_seqlens", capacity), batch)
    padded = np.broadcast_to(arguments.get("cache_leftpad", 0), batch)
    out = np.zeros((batch, rows, heads, v_cache.shape[-1]))
    lse = np.full((batch, heads, rows), -np.inf)
    aligned = bool(arguments.get("causal")) or max(window(arguments)) >= 0
    for b in range(batch):
        turn = int(arguments.get("rotary_seqlens", filled - padded)[b])
        for name, cache in caches.items():
            for t in range(new):
                at = place(arguments, b, int(filled[b]) + t)
                row = arguments[name][b, t : t + 1]
                if name == "k":
                    row = rotated(row, arguments, np.array([turn + t]))
                cache[at] = stored(row[0], scale_of(arguments, name, at), cache.dtype)
        places = [place(arguments, b, r) for r in range(int(padded[b]), int(filled[b]) + new)]
        keys, values = (
            np.array([scale_of(arguments, name, at) * cache[at].astype(float) for at in places])
            for name, cache in zip(scales, (k_cache, v_cache), strict=True)
        )
        if not places:
            if "sinks" in arguments:
                lse[b] = arguments["sinks"][:, None]
            continue
        turned = rotated(q[b], arguments, turn + np.arange(rows) * aligned)
        formula = Formula(turned[None], keys[None], values[None])
        change(formula, arguments, b)
        found = formula.result()
        out[b], lse[b] = found[0][0], found[1][0]
    return Expected(out, lse, k_cache, v_cache)


def window(arguments: Arguments) -> tuple[int, int]:
    left, right = arguments.get("window_size", (-1, -1))
    return left, 0 if arguments.get("causal") else right


def scale_of(arguments: Arguments, name: str, at: tuple[int, int]) -> Array | float:
    """A factor for each head of a row, (heads_k, 1)."""
    scale = arguments.get(f"{name}_scale")
    if scale is None:
        return 1.0
    chosen = scale[at[: scale.ndim - 1]]
    return np.asarray(chosen.astype(np.float64)[:, None])


def change(formula: Formula, arguments: Arguments, sequence: int) -> None:
    """What the options do to the scores of a sequence."""
    if cap := arguments.get("softcap"):
        formula.scores = cap * np.tanh(formula.scores / cap)
    if (slopes := arguments.get("alibi_slopes")) is not None:
        formula.scores = formula.scores - slopes[:, None, None] * abs(formula.distance)
    left, right = window(arguments)
    if left >= 0:
        formula.hide(formula.distance > left)
    if right >= 0:
        formula.hide(formula.distance < -right)
    if (tree := arguments.get("tree_mask")) is not None:
        rows = formula.scores.shape[-2]
        hidden = np.zeros(formula.scores.shape[-2:], bool)
        hidden[:, -rows:] = ~tree[min(sequence, len(tree) - 1)]
        formula.hide(hidden)
    formula.sinks = arguments.get("sinks")


# Calls --------------------------------------------------------------------------------------------


def attend(arguments: Arguments, kind: Kind = KINDS[0], **options: Any) -> tuple[Array, Array]:
    """out and lse; the caches in `arguments` are those that were written."""
    given = kind.give({**arguments, **options, "return_lse": True})
    out, lse = anyflash.attention_with_kvcache(**given)
    return kind.take(out), kind.take(lse)


def same_caches(arguments: Arguments, right: Expected) -> None:
    for name in caches_of(arguments):
        assert bits(arguments[name]) == bits(getattr(right, name)), name


def verify(arguments: Arguments, kind: Kind = KINDS[0]) -> None:
    """Caches are compared to the bit: what must not be written is still what it was."""
    right = expected(arguments)
    out, lse = attend(arguments, kind)
    close(out, right.out)
    close(lse, right.lse)
    same_caches(arguments, right)


def every_option() -> dict[str, Arguments]:
    """Calls that together use all options, with values that no other option has."""
    cos, sin = angles(CAPACITY, 10)
    order = np.array([2, 0, 1], np.int32)
    placed = call()
    for name in ("k_cache", "v_cache"):
        placed[name] = placed[name][np.argsort(order)]
    eight = {"k_scale": np.array([0.1, 0.2], np.float32), "v_scale": np.array([0.3, 0.4], "f4")}
    long = {"q": random(2, 1, 4, 16), "k_cache": random(2, 300, 2, 16)}
    long |= {"v_cache": random(2, 300, 2, 16) + 1, "cache_seqlens": np.array([9, 290], np.int32)}
    return {
        "scale": call() | {"softmax_scale": 0.3, "softcap": 0.7},
        "left": call() | {"window_size": (2, None)},
        "right": call(page_size=4) | {"window_size": (None, 0)},
        "arrays": call() | {"alibi_slopes": random(4), "sinks": random(4), "causal": True},
        "tree": call() | {"tree_mask": random(3, 2, 2) > 0},
        "slots": placed | {"cache_batch_idx": order},
        "leftpad": call() | {"cache_leftpad": np.array([2, 0, 8], np.int32)},
        "rotary": call()
        | {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "causal": True},
        "rotary-seqlens": call()
        | {"rotary_cos": cos, "rotary_sin": sin, "rotary_seqlens": np.array([13, 2, 7], np.int32)},
        "eight-bits": call(cache_dtype=np.int8) | eight,
        "splits": long | {"num_splits": 3},
        "split-size": long | {"split_size": 64},
        "out": call(dtype="bfloat16") | {"out_dtype": "float32"},
        "latent": latent(page_size=4) | {"causal": True},
        "latent-eight-bits": latent(cache_dtype=np.int8) | {"k_scale": eight["k_scale"]},
        "latent-read": latent(new=0) | {"sinks": random(4)},
    }
