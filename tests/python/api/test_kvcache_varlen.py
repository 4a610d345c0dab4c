"""attention_varlen_with_kvcache of each front end, beside each sequence by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import anyflash
import anyflash.jax
import anyflash.torch
from calls.frameworks import EVERY_KIND, Kind

QUERIES, FILLED = (5, 0, 1, 3), (0, 4, 9, 2)
ENDS = np.cumsum([0, *QUERIES]).astype(np.int32)
TOTAL, CAPACITY = sum(QUERIES), 16


def arguments(seed: int = 0, page_size: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    given = {
        "q": normal(TOTAL, 4, 8),
        "k": normal(TOTAL, 2, 8),
        "v": normal(TOTAL, 2, 8),
        "cu_seqlens_q": ENDS,
        "cache_seqlens": np.array(FILLED, np.int32),
    }
    pages = len(QUERIES) * CAPACITY // page_size
    given["k_cache"], given["v_cache"] = normal(2, pages, page_size, 2, 8)
    table = rng.permutation(pages).reshape(len(QUERIES), -1)
    return given | {"block_table": table.astype(np.int32)}


def one_by_one(given: dict[str, Any], **options: Any) -> tuple[Any, Any, Any, Any]:
    """(out, lse, k_cache, v_cache) of NumPy's arrays."""
    caches = [given[name].copy() for name in ("k_cache", "v_cache")]
    outs, lses = [], []
    for b in range(len(QUERIES)):
        rows = slice(ENDS[b], ENDS[b + 1])
        out, lse = anyflash.attention_with_kvcache(
            given["q"][None, rows],
            *caches,
            given["k"][None, rows],
            given["v"][None, rows],
            cache_seqlens=given["cache_seqlens"][b : b + 1],
            block_table=given["block_table"][b : b + 1],
            return_lse=True,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return np.concatenate(outs), np.concatenate(lses, 1), *caches


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def verify(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for x, wanted in zip(found, expected, strict=True):
        close(np.asarray(x), wanted)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
def test_numpy(options: dict[str, Any]) -> None:
    given = arguments()
    expected = one_by_one(given, **options)
    out, lse = anyflash.attention_varlen_with_kvcache(**given, return_lse=True, **options)
    verify((out, lse, given["k_cache"], given["v_cache"]), expected)


@EVERY_KIND
def test_without_new_keys(kind: Kind) -> None:
    given = arguments()
    del given["k"], given["v"]
    given["cache_seqlens"] += np.array(QUERIES, np.int32)
    right = anyflash.attention_varlen_with_kvcache(**given, causal=True)
    moved = {name: kind.give(x) for name, x in given.items()}
    found = anyflash.attention_varlen_with_kvcache(**moved, causal=True)
    close(kind.take(found), right)


def test_int_lengths_outputs_and_workspace() -> None:
    given = arguments() | {"cache_seqlens": 7, "num_splits": 3}
    lengths = given | {"cache_seqlens": np.full(len(QUERIES), 7, np.int32)}
    right = anyflash.attention_varlen_with_kvcache(**lengths, causal=True)
    size = anyflash.kvcache_workspace_size(**given, causal=True)
    out = np.empty_like(right)
    anyflash.attention_varlen_with_kvcache(
        **given, causal=True, out=out, workspace=np.empty(max(size, 1), np.uint8), max_seqlen_q=5
    )
    assert (out == right).all()


def test_other_new_keys() -> None:
    """As many keys as the cache lacks, whatever the queries are."""
    given = arguments()
    ends = np.array([0, 2, 3, 9, 9], np.int32)
    alone = {n: x.copy() for n, x in given.items()}
    out = anyflash.attention_varlen_with_kvcache(**given, cu_seqlens_k_new=ends, causal=True)
    for b in range(len(QUERIES)):
        rows, new = slice(ENDS[b], ENDS[b + 1]), slice(ends[b], ends[b + 1])
        right = anyflash.attention_with_kvcache(
            alone["q"][None, rows],
            alone["k_cache"],
            alone["v_cache"],
            alone["k"][None, new],
            alone["v"][None, new],
            cache_seqlens=alone["cache_seqlens"][b : b + 1],
            block_table=alone["block_table"][b : b + 1],
            causal=True,
        )
        close(out[rows], right[0])
    assert (given["k_cache"] == alone["k_cache"]).all()


def test_tree() -> None:
    """Guesses see their ancestors; a prompt beside them sees all before it."""
    given = arguments()
    tree = np.tril(np.ones((5, 5), bool))
    tree[4] = [True, False, False, False, True]
    packed = np.concatenate(
        [tree, np.tril(np.ones((5, 5), bool))[:1], np.tril(np.ones((3, 5), bool))]
    )
    out = anyflash.attention_varlen_with_kvcache(
        **{n: x.copy() for n, x in given.items()}, tree_mask=packed
    )
    causal = anyflash.attention_varlen_with_kvcache(**given, causal=True)
    same = [i for i in range(TOTAL) if i != 4]
    close(out[same], causal[same])
    assert np.abs(out[4] - causal[4]).max() > 1e-3


def test_torch() -> None:
    given = arguments()
    expected = one_by_one(given, causal=True)
    moved = {name: torch.from_numpy(x.copy()) for name, x in given.items()}
    out, lse = anyflash.torch.attention_varlen_with_kvcache(**moved, causal=True, return_lse=True)
    verify((out, lse, moved["k_cache"], moved["v_cache"]), expected)


def test_torch_compiled() -> None:
    given = arguments()
    expected = one_by_one(given, causal=True)
    moved = {name: torch.from_numpy(x.copy()) for name, x in given.items()}

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(**tensors: Any) -> Any:
        return anyflash.torch.attention_varlen_with_kvcache(
            **tensors, causal=True, max_seqlen_q=5, return_lse=True
        )

    out, lse = step(**moved)
    verify((out, lse, moved["k_cache"], moved["v_cache"]), expected)
    with pytest.raises(NotImplementedError, match="attention_varlen_with_kvcache: q requires grad"):
        anyflash.torch.attention_varlen_with_kvcache(**moved | {"q": moved["q"].requires_grad_()})


def test_jax() -> None:
    """Under jit, with the lengths traced; the caches are returned."""
    given = arguments()
    expected = one_by_one(given, causal=True)

    @jax.jit
    def step(arrays: Any) -> Any:
        return anyflash.jax.attention_varlen_with_kvcache(
            **arrays, causal=True, return_lse=True, max_seqlen_q=5
        )

    verify(step({name: jnp.asarray(x) for name, x in given.items()}), expected)
    lengths = given | {"cache_seqlens": 3, "k": None, "v": None}
    right = anyflash.attention_varlen_with_kvcache(**lengths)
    close(anyflash.jax.attention_varlen_with_kvcache(**lengths), right)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": (
        {"q": np.ones((1, TOTAL, 4, 8), np.float32)},
        ValueError,
        "q has 4 dimensions, .*total_q",
    ),
    "no ends": ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is None; an array of int32"),
    "ends-rank": ({"cu_seqlens_q": ENDS[None]}, ValueError, r"cu_seqlens_q has shape \(1, 5\)"),
    "ends-dtype": ({"cu_seqlens_q": ENDS.astype(float)}, TypeError, "cu_seqlens_q is float64"),
    "ends": ({"cu_seqlens_q": ENDS[:-1]}, ValueError, "block_table has shape"),
    "last": ({"cu_seqlens_q": ENDS - (ENDS == TOTAL)}, ValueError, ".*number of rows of q, 9"),
    "longest": ({"max_seqlen_q": 4}, ValueError, "sequence 0 of cu_seqlens_q has length 5; max_s"),
    "longest-type": ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q is float; an int is allowed"),
    "rows": (
        dict.fromkeys("kv", np.ones((4, 2, 8), np.float32)),
        ValueError,
        "k has 4 rows, but q",
    ),
    "new": ({"cu_seqlens_k_new": ENDS[:-1]}, ValueError, "cu_seqlens_k_new has shape"),
    "new-last": ({"cu_seqlens_k_new": ENDS // 2}, ValueError, "cu_seqlens_k_new.4. is 4; it must"),
    "room": (
        {"cache_seqlens": np.full(4, 12, np.int32)},
        ValueError,
        "cache_seqlens.0. is 12; 0 to",
    ),
    "tree": ({"tree_mask": np.ones((3, 3), bool)}, ValueError, r"tree_mask has shape \(3, 3\)"),
    "validate": ({"validate": 2}, ValueError, "validate is 2; True, False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, kind, message = WRONG[name]
    given = arguments()
    before = given["k_cache"].copy()
    with pytest.raises(kind, match=f"anyflash.attention_varlen_with_kvcache: {message}"):
        anyflash.attention_varlen_with_kvcache(**given | changes)
    assert (given["k_cache"] == before).all()
