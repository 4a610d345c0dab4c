"""Latent attention (MLA): attention_with_kvcache with values that are columns of the keys."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import EVERY_DTYPE, EVERY_KIND, Formula, Kind, bits, close, random
from calls.kvcache import (
    WRITABLE,
    Arguments,
    angles,
    attend,
    expected,
    latent,
    verify,
    with_tensors,
)

PAGED = pytest.mark.parametrize("page_size", [0, 1, 4])
COS, SIN = angles(16, 5)
OPTIONS: dict[str, Arguments] = {
    "plain": {},
    "causal": {"causal": True},
    "rotary": {"rotary_cos": COS, "rotary_sin": SIN, "rotary_interleaved": False, "causal": True},
    "sinks": {"sinks": random(4), "window_size": (3, 0)},
    "leftpad": {"cache_leftpad": np.array([2, 0, 8], np.int32)},
    "tree": {"tree_mask": random(3, 2, 2) > 0},
    "splits": {"num_splits": 3},
    "out": {"out_dtype": "float32"},
}


@WRITABLE
@PAGED
def test_append(kind: Kind, page_size: int) -> None:
    verify(latent(page_size=page_size) | {"causal": True}, kind)


@EVERY_KIND
@PAGED
def test_without_new_keys(kind: Kind, page_size: int) -> None:
    verify(latent(page_size=page_size, new=0), kind)


def same_as_with_tensors(arguments: Arguments) -> None:
    """To the bit, and the values' tensor is the cache's columns afterwards, too."""
    given = with_tensors(arguments)
    right = attend(given)
    found = attend(arguments)
    for x, y in zip(found, right, strict=True):
        assert bits(x) == bits(y)
    assert bits(arguments["k_cache"]) == bits(given["k_cache"])


@EVERY_DTYPE
@PAGED
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)])
def test_dtypes(dtype: str, page_size: int, heads: tuple[int, int]) -> None:
    same_as_with_tensors(latent(dtype=dtype, page_size=page_size, heads=heads) | {"causal": True})


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    arguments = latent(page_size=4) | OPTIONS[name]
    if name == "rotary":  # what is rotated of a key is so of a value
        right = expected(arguments)
        out, lse = attend(arguments)
        close(out, right.out)
        close(lse, right.lse)
    else:
        same_as_with_tensors(arguments)


@pytest.mark.parametrize("scale", [(2,), (13, 2)], ids=["head", "slot"])
@pytest.mark.parametrize("cache_dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "float8"])
def test_eight_bits(cache_dtype: Any, scale: tuple[int, ...]) -> None:
    arguments = latent(page_size=4, cache_dtype=cache_dtype)
    arguments["k_scale"] = np.linspace(0.02, 0.05, np.prod(scale), dtype=np.float32).reshape(scale)
    same_as_with_tensors(arguments)


def test_views_that_alias() -> None:
    """Columns of the keys that are given as a tensor are computed like any two."""
    arguments = latent(new=0)
    given = with_tensors(arguments) | {"v_cache": arguments["k_cache"][..., :12]}
    assert bits(attend(given)[0]) == bits(attend(arguments)[0])


@pytest.mark.parametrize("columns", [1, 20])
def test_all_columns_and_one(columns: int) -> None:
    arguments = latent() | {"head_dim_v": columns}
    same_as_with_tensors(arguments)


def test_workspace_size() -> None:
    arguments = latent(new=0) | {"num_splits": 4}
    arguments["k_cache"] = random(3, 400, 2, 20)
    size = anyflash.kvcache_workspace_size(**arguments)
    assert size == anyflash.kvcache_workspace_size(**with_tensors(arguments))
    right = attend(arguments)[0]
    out, _ = attend(arguments, workspace=np.full(size, 0xFF, np.uint8))
    assert bits(out) == bits(right)


@EVERY_KIND
def test_rows_of_each_querys_own(kind: Kind) -> None:
    """Each query token is a sequence, and its rows are pages of one row; -1 behind the last."""
    batch, rows, heads, top = 2, 3, 4, 7
    cache, q = random(5, 8, 1, 20), random(batch, rows, heads, 20)
    choice = np.random.default_rng(0)
    seen = np.array(
        [choice.permutation(5 * 8)[:top] for _ in range(batch * rows)], np.int32
    ).reshape(batch, rows, top)
    count = np.array([[7, 1, 4], [0, 7, 6]], np.int32)
    seen[np.arange(top) >= count[..., None]] = -1
    arguments = {
        "q": q.reshape(batch * rows, 1, heads, 20),
        "k_cache": cache.reshape(5 * 8, 1, 1, 20),
        "v_cache": None,
        "head_dim_v": 12,
        "cache_seqlens": count.reshape(-1),
        "block_table": seen.reshape(batch * rows, top),
    }
    out, lse = attend(arguments, kind)
    for i, (x, chosen, n) in enumerate(
        zip(arguments["q"], arguments["block_table"], count.reshape(-1), strict=True)
    ):
        if n == 0:
            assert (out[i] == 0).all()
            assert (lse[i] == -np.inf).all()
            continue
        keys = cache.reshape(1, -1, 1, 20)[:, chosen[:n]].astype(np.float64)
        right = Formula(x[None], keys, keys[..., :12]).result()
        close(out[i], right[0][0])
        close(lse[i], right[1][0])
