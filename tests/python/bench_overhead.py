"""What a call costs beside its arithmetic: tiny inputs on the CPU, in microseconds.

    python tests/python/bench_overhead.py [--rounds 30]

One query, one key, one head; one thread. A cell is the median over rounds of the mean over calls;
all calls take turns. Frameworks that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

import anyflash

CALLS = 200
SHAPE = (1, 1, 1, 8)
Row = tuple[str, Callable[[], object]]


def numpy_rows() -> Iterator[Row]:
    q = np.ones(SHAPE, np.float32)
    cache = np.ones((1, 4, 1, 8), np.float32)
    yield "NumPy: anyflash.attention", lambda: anyflash.attention(q, q, q)
    yield (
        "NumPy: anyflash.attention_with_kvcache",
        lambda: anyflash.attention_with_kvcache(q, cache, cache, cache_seqlens=3),
    )


def torch_rows() -> Iterator[Row]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import anyflash.flash_attn
    import anyflash.torch

    torch.set_num_threads(1)
    q = torch.ones(SHAPE)
    heads_first = q.transpose(1, 2)
    cache = torch.ones(1, 4, 1, 8)
    yield "torch: torch's SDPA", lambda: scaled_dot_product_attention(*[heads_first] * 3)
    yield (
        "torch: anyflash.torch's SDPA",
        lambda: anyflash.torch.scaled_dot_product_attention(*[heads_first] * 3),
    )
    yield "torch: anyflash.attention", lambda: anyflash.attention(q, q, q)
    yield "torch: anyflash.torch.attention", lambda: anyflash.torch.attention(q, q, q)
    yield "torch: flash_attn_func", lambda: anyflash.flash_attn.flash_attn_func(q, q, q)
    yield (
        "torch: anyflash.torch.attention_with_kvcache",
        lambda: anyflash.torch.attention_with_kvcache(q, cache, cache, cache_seqlens=3),
    )
    leaf = torch.ones(SHAPE, requires_grad=True)
    leaf_heads_first = leaf.transpose(1, 2)
    yield (
        "torch, recorded: torch's SDPA",
        lambda: scaled_dot_product_attention(*[leaf_heads_first] * 3),
    )
    yield (
        "torch, recorded: anyflash.torch.attention",
        lambda: anyflash.torch.attention(leaf, leaf, leaf),
    )
    yield (
        "torch, and backward: torch's SDPA",
        lambda: torch.autograd.grad(
            scaled_dot_product_attention(*[leaf_heads_first] * 3), leaf, heads_first
        ),
    )
    yield (
        "torch, and backward: anyflash.torch.attention",
        lambda: torch.autograd.grad(anyflash.torch.attention(leaf, leaf, leaf), leaf, q),
    )


def jax_rows() -> Iterator[Row]:
    import jax

    import anyflash.jax

    q = jax.numpy.ones(SHAPE, device=jax.devices("cpu")[0])
    theirs, ours = jax.jit(jax.nn.dot_product_attention), jax.jit(anyflash.jax.attention)
    yield "JAX, jit: jax.nn.dot_product_attention", lambda: theirs(q, q, q).block_until_ready()
    yield "JAX, jit: anyflash.jax.attention", lambda: ours(q, q, q).block_until_ready()
    yield "JAX: anyflash.attention", lambda: anyflash.attention(q, q, q).block_until_ready()


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    rows = list(numpy_rows())
    for name, more in (("torch", torch_rows), ("jax", jax_rows)):
        if importlib.util.find_spec(name):
            rows += more()
    for _, call in rows:
        microseconds(call)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(args.rounds):
        for column, (_, call) in zip(times, rows, strict=True):
            column.append(microseconds(call))
    print("| call | us |\n|---|---|")
    for (name, _), column in zip(rows, times, strict=True):
        print(f"| {name} | {statistics.median(column):.1f} |")


if __name__ == "__main__":
    main()
