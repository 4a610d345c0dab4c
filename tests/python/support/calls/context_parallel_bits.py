"""What is the same bit for bit: results of rows whose keys are in one chunk of whole tiles, and the
dropout mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import anyflash.torch
from anyflash.torch.distributed import ContextParallel
from calls.context_parallel import HEADS, LAYOUTS, METHODS, context_parallel, randn, ways

CASES: dict[str, Callable[[], None]] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": randn(HEADS).abs()},
    "sinks": {"sinks": randn(HEADS)},
}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[f"bits: {function.__name__}"] = function
    return function


def same_bits(method: str, layout: str, dtype: torch.dtype) -> None:
    """In a ring, of the first rank, which sees its own chunk alone."""
    rows = dist.get_world_size() * 2 * 64
    cp = ContextParallel(method=method, layout=layout, multiple=64)
    whole = [randn(1, rows, HEADS, 16).to(dtype) + i for i in range(3)]
    mine = [cp.shard(x) for x in whole]
    for name, options in OPTIONS.items():
        for causal in (True,) if method == "ring" else (True, False):
            out, lse = anyflash.torch.attention(*whole, **options, causal=causal, return_lse=True)
            found = cp.attention(*mine, **options, causal=causal, seqlen=rows, return_lse=True)
            if method == "ring" and dist.get_rank() > 0:
                continue
            assert torch.equal(found[0], cp.shard(out)), f"out, {name}, {causal}"
            assert torch.equal(found[1], cp.shard(lse, 2)), f"lse, {name}, {causal}"


def add_same_bits() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for method, layout, dtype in itertools.product(METHODS, LAYOUTS, dtypes):
        if method != "ring" or layout == "contiguous":

            def run(m: str = method, name: str = layout, dtype: torch.dtype = dtype) -> None:
                if m != "ulysses" or HEADS % dist.get_world_size() == 0:
                    same_bits(m, name, dtype)

            CASES[f"bits: {method}, {layout}, {dtype}"] = run


add_same_bits()


@case
def dropout_mask() -> None:
    """With the identity as values, the output's zeros are what is dropped. Lengths cut tiles."""
    rows, keys = 75, 150
    q, k = randn(2, rows, HEADS, 8), randn(2, keys, HEADS, 8)
    v = torch.eye(keys, dtype=torch.float64)[None, :, None].expand(2, keys, HEADS, keys)
    options = {"dropout_p": 0.4, "seed": 2**40 + 5}
    right = anyflash.torch.attention(q, k, v, **options, return_dropout_mask=True)
    kept = right.dropout_mask.transpose(1, 2)
    assert torch.equal(right.out != 0, kept)
    assert 0.55 < kept.double().mean() < 0.65
    for way in ways():
        cp = context_parallel(*way, 8)
        mine = cp.shard(q), cp.shard(k), cp.shard(v.contiguous())
        out = cp.attention(*mine, **options, seqlen=(rows, keys))
        assert torch.equal(out != 0, cp.shard(kept)), way


@case
def largest_scores() -> None:
    """The largest of all ranks, which all of them have."""
    q, k = randn(2, 90, HEADS, 8), randn(2, 150, HEADS // 2, 8)
    ends = [torch.tensor(x).int() for x in ((0, 20, 20, 90), (0, 9, 40, 150))]
    for window in ((20, 5), (-1, -1)):
        options = {"window_size": window, "return_max_logits": True}
        right = anyflash.torch.attention(q, k, k, **options)
        right_packed = anyflash.torch.attention_varlen(q[0], k[0], k[0], *ends, 70, 110, **options)
        for way in ways():
            cp = context_parallel(*way, 8)
            rows, keys = cp.shard(q), cp.shard(k)
            found = cp.attention(rows, keys, keys, **options)
            assert torch.equal(found.max_logits, right.max_logits), way
            found = cp.attention_varlen(rows[0], keys[0], keys[0], *ends, 70, 110, **options)
            assert torch.equal(found.max_logits, right_packed.max_logits), way
    assert right_packed.max_logits[1].isinf().all()  # no row sees a key
