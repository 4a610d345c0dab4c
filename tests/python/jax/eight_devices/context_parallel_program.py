"""attention(context_axis=...): what travels, what is launched, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import anyflash.jax
from calls.jax_context_parallel import (
    BATCH,
    DIM,
    HEADS,
    METHODS,
    OPTIONS,
    inputs,
    mesh_of,
    shard_map,
    shared,
    two_axes,
)
from calls.sharded import random

# Of a forward and its backward, which exchanges anew; (all_gather, reduce_scatter, all_to_all,
# collective_permute).
MESSAGES = {
    "ring": (0, 0, 0, 3 + 3 + 4),
    "gather": (2, 1, 0, 0),
    "all_to_all": (0, 0, (3 + 2) + (3 + 4 + 3), 0),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_travels(method: str) -> None:
    arrays, options = inputs(False, OPTIONS["causal"])
    attend = shared(method, "contiguous", 4, mesh=two_axes(), **options)

    def loss(arrays: Any) -> Any:
        out, lse = attend(arrays)
        return out.sum() + lse.sum()

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "collective_permute")
    found = [re.findall(rf'"stablehlo\.{kind}"\(.*', text) for kind in kinds]
    assert tuple(map(len, found)) == MESSAGES[method]
    assert "all_reduce" not in text
    for line in (line for lines in found[:3] for line in lines):
        assert "replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>" in line


def forwards(method: str, layout: str, **options: Any) -> int:
    arrays, options = inputs(False, options)
    text = jax.jit(shared(method, layout, 4, **options)).lower(arrays).as_text()
    return text.count("@anyflash_forward")


def test_launches() -> None:
    """In the text both sides of a branch: a hop of a causal zigzag launches once."""
    assert forwards("ring", "zigzag", causal=True) == 1 + 3 * 2
    assert forwards("ring", "zigzag", window_size=(20, 0)) == 4 * 4
    assert forwards("gather", "zigzag", causal=True) == 2
    assert forwards("all_to_all", "zigzag", causal=True) == 1
    assert forwards("all_to_all", "zigzag", causal=True, dropout_p=0.5, seed=1) == 4


def test_no_gradients_that_nobody_wants() -> None:
    arrays, options = inputs(False, OPTIONS["bias"])
    attend = shared("gather", "contiguous", 2, **options)

    def text(names: Any) -> str:
        floats = {name: arrays[name] for name in names}
        gradient = jax.grad(lambda floats: attend(arrays | floats)[0].sum())
        return jax.jit(gradient).lower(floats).as_text()

    assert "dq dk dv dbias" in text(("q", "bias"))
    assert "dbias" not in text(("q", "sinks"))


def error_of(
    size: int = 2, kind: Any = ValueError, packed: bool = False, rows: int = 72, **options: Any
) -> str:
    name = "attention_varlen" if packed else "attention"
    ends = (np.array([0, 72], np.int32),) * 2 + (72, 72) if packed else ()

    def attend(q: Any) -> Any:
        given = {"context_axis": "cp"} | options
        return getattr(anyflash.jax, name)(q, q, q, *ends, **given)

    spec = P("cp") if packed else P(None, "cp")
    mapped = shard_map(attend, mesh=mesh_of(size), in_specs=spec, out_specs=spec)
    with pytest.raises(kind, match=rf"^anyflash\.jax\.{name}: ") as error:
        mapped(random(*(rows, 6, DIM) if packed else (BATCH, rows, 6, DIM)))
    return str(error.value)


def test_errors() -> None:
    assert "layout is 'striped'; contiguous, zigzag are allowed" in error_of(layout="striped")
    assert "method is 'ulysses'; ring, gather, all_to_all are" in error_of(method="ulysses")
    assert "context_axis is int; a str is allowed" in error_of(kind=TypeError, context_axis=1)
    assert "context_axis is 'x'; the name of an axis" in error_of(kind=NameError, context_axis="x")
    assert "context_axis is not given" in error_of(context_axis=None, layout="zigzag")
    assert "q has 9 rows on each device; an even number is" in error_of(8, layout="zigzag")
    assert "at least one row" in error_of(rows=0)
    wrong = error_of(8, dropout_p=0.1, seed=1)
    assert "dropout_p is 0.1, and chunks have 9 keys; with dropout a multiple of 8" in wrong
    bias = error_of(bias=np.zeros((36, 36), np.float32))
    assert "bias has shape (1, 1, 36, 36); expected" in bias
    ranges = error_of(key_ranges=np.zeros((1, 1, 36, 2), np.int32))
    assert "key_ranges has shape (1, 1, 36, 2); expected" in ranges
    blocks = np.ones((1, 1, 2, 2), bool)
    small = error_of(block_mask=blocks, block_size=(64, 64))
    assert "block_size is (64, 64), and chunks have 36 rows and 36 keys; whole blocks" in small
    heads = error_of(4, method="all_to_all")
    assert "q has 6 heads, which 4 devices do not divide; method ring or gather is" in heads
    mask = error_of(kind=NotImplementedError, return_dropout_mask=True)
    assert "return_dropout_mask is set, which is not supported with context_axis" in mask


def test_errors_with_packed_sequences() -> None:
    refused = {"kind": NotImplementedError, "packed": True}
    assert "bias is given, which is not supported with packed" in error_of(
        **refused, bias=np.zeros((72, 72), np.float32)
    )
    assert "sequences are packed; method gather" in error_of(**refused, dropout_p=0.1, seed=1)


@pytest.mark.parametrize("method", METHODS)
def test_errors_of_transforms(method: str) -> None:
    def attend(q: Any) -> Any:
        return anyflash.jax.attention(q, q, q, context_axis="cp", method=method)

    rows, q = P(None, "cp"), random(BATCH, 72, HEADS, DIM)
    mapped = shard_map(attend, mesh=mesh_of(2), in_specs=rows, out_specs=rows)
    with pytest.raises(NotImplementedError, match=r"^anyflash\.jax\.attention: jax\.vmap maps a"):
        jax.vmap(mapped)(q[None])
    first = jax.grad(lambda q: (mapped(q) ** 2).sum())
    with pytest.raises(NotImplementedError, match="gradients of gradients are asked for"):
        jax.grad(lambda q: (first(q) ** 2).sum())(q)


def test_axes_of_the_compiler_are_refused() -> None:
    rows = P(None, "cp")

    def attend(q: Any) -> Any:
        return anyflash.jax.attention(q, q, q, context_axis="cp")

    f = jax.shard_map(attend, mesh=two_axes(), in_specs=rows, out_specs=rows, axis_names={"cp"})
    with pytest.raises(NotImplementedError, match="over all axes of the mesh is allowed"):
        jax.jit(f)(random(BATCH, 72, HEADS, DIM))


def test_errors_of_zigzag_order() -> None:
    with pytest.raises(ValueError, match="length is 12; a multiple of 16, twice the number of"):
        anyflash.jax.zigzag_order(12, 8)
