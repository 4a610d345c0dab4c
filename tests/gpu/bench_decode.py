"""Decoding: microseconds, bytes a second, and their share of what this GPU's memory gives.

A cell attends to a full cache of `context` keys with `q` new queries, bfloat16, with a contiguous
cache and with shuffled pages of 16. Caches smaller than TURNED bytes exist several times and take
turns, so that none is found in the L2 cache. Calls are replayed from a CUDA graph, as inference
engines do it; a cell is the median over the rounds. Bytes are those of K, V, Q and the output.
PyTorch's attention has the contiguous cache and no mask (its causal one is aligned otherwise).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_forward import RIVALS, facts
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import anyflash

SHAPES = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (8, 1, 128), (16, 16, 256))
CONTEXTS = (1024, 4096, 16384, 131072)
BATCHES = (1, 16, 128)
QUERIES = (1, 4)
PAGE_SIZE = 16
TURNED = 512 * 2**20
LARGEST = 24 * 2**30  # bytes of one cache
ROUNDS = 7
ROUND_MS = 4.0

Call = Callable[[int], torch.Tensor]  # given the number of the cache


def read_bandwidth() -> float:
    """Bytes a second that a reduction reads from memory: the best of a few."""
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(8 * 2**30 // dtype.itemsize, device="cuda", dtype=dtype)
        for reduction in (torch.sum, torch.amax):
            for _ in range(6):
                took = seconds(lambda f=reduction, x=x: f(x))
                best = max(best, x.nbytes / took)
    return best


def seconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(call: Call, turns: int) -> tuple[Callable[[], None], int]:
    """A graph of calls with one cache after the other, and how many they are."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(min(turns, 2)):
            call(turn)
    torch.cuda.synchronize()
    calls = turns * max(1, 20 // turns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % turns)
    return graph.replay, calls


def contenders(shape: Sequence[int], context: int, batch: int, queries: int) -> dict[str, Any]:
    heads, heads_k, head_dim = shape
    make = lambda *n: torch.randn(n, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    size = 2 * batch * context * heads_k * head_dim * 2
    turns = max(1, min(64, -(-TURNED // size)))
    q = make(batch, queries, heads, head_dim)
    k, v = (make(turns, batch, context, heads_k, head_dim) for _ in range(2))
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    pages = batch * context // PAGE_SIZE
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    paged = [x.view(turns, pages, PAGE_SIZE, heads_k, head_dim) for x in (k, v)]
    out = torch.empty_like(q)

    def own(turn: int) -> torch.Tensor:
        return anyflash.attention_with_kvcache(
            q, k[turn], v[turn], cache_seqlens=lengths, causal=True, out=out
        )

    def own_paged(turn: int) -> torch.Tensor:
        return anyflash.attention_with_kvcache(
            q, paged[0][turn], paged[1][turn], cache_seqlens=lengths, block_table=table,
            causal=True, out=out,
        )  # fmt: skip

    calls: dict[str, Call] = {"contiguous": own, "paged 16": own_paged}
    for name, backend in RIVALS.items():

        def rival(turn: int, backend: Any = backend) -> torch.Tensor:
            swapped = [x.transpose(1, 2) for x in (q, k[turn], v[turn])]
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*swapped, enable_gqa=heads != heads_k)

        try:
            result = rival(0)
        except RuntimeError as error:
            print(f"{name} cannot run: {error}".splitlines()[0], file=sys.stderr)
            continue
        if queries == 1:
            torch.testing.assert_close(own(0), result.transpose(1, 2), rtol=0.02, atol=0.02)
        calls[name] = rival
    bytes_moved = size + 2 * q.nbytes
    return {"calls": calls, "turns": turns, "bytes": bytes_moved}


def measure(
    shape: Sequence[int], context: int, batch: int, queries: int, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    made = contenders(shape, context, batch, queries)
    graphs = {}
    for name, call in made["calls"].items():
        try:
            graphs[name] = captured(call, made["turns"])
        except RuntimeError as error:
            print(f"{name} cannot be captured: {error}".splitlines()[0], file=sys.stderr)
            torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = {}
    for name, (replay, _) in graphs.items():
        replay()
        repeats[name] = max(1, round(ROUND_MS / 1e3 / seconds(replay)))
    for _ in range(rounds):
        for name, (replay, calls) in graphs.items():
            many = repeats[name]
            took = seconds(lambda replay=replay, many=many: [replay() for _ in range(many)])
            samples[name].append(took / many / calls * 1e6)
    return {
        "heads": shape[0],
        "heads_k": shape[1],
        "head_dim": shape[2],
        "context": context,
        "batch": batch,
        "q": queries,
        "bytes": made["bytes"],
        "microseconds": {name: statistics.median(times) for name, times in samples.items()},
        "samples": samples,
    }


def markdown(about: dict[str, str], bandwidth: float, cells: list[dict[str, Any]]) -> str:
    own = ("contiguous", "paged 16")
    header = ["Hq/Hkv", "d", "context", "batch", "q", "MB"]
    header += [f"{name} {unit}" for name in own for unit in ("us", "GB/s", "share")]
    header += [f"{name} us" for name in RIVALS]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for cell in cells:
        row = [f"{cell['heads']}/{cell['heads_k']}", str(cell["head_dim"]), str(cell["context"])]
        row += [str(cell["batch"]), str(cell["q"]), f"{cell['bytes'] / 1e6:.0f}"]
        for name in own:
            us = cell["microseconds"][name]
            speed = cell["bytes"] / us * 1e6
            row += [f"{us:.1f}", f"{speed / 1e9:.0f}", f"{speed / bandwidth:.2f}"]
        for name in RIVALS:
            us = cell["microseconds"].get(name)
            row.append("-" if us is None else f"{us:.1f}")
        rows.append(row)
    lines = [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- read bandwidth: {bandwidth / 1e9:.0f} GB/s (the best of four reductions)", ""]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every sample there")
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--queries", type=int, nargs="+", default=QUERIES)
    arguments = parser.parse_args()

    about = facts()
    bandwidth = read_bandwidth()
    cells = []
    for shape in SHAPES:
        for context in arguments.contexts:
            for batch in arguments.batches:
                if 4 * batch * context * shape[1] * shape[2] > LARGEST:
                    continue
                for queries in arguments.queries:
                    cells.append(measure(shape, context, batch, queries, arguments.rounds))
                    torch.cuda.empty_cache()
    table = markdown(about, bandwidth, cells)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    if arguments.json:
        result = {"about": about, "bandwidth": bandwidth, "cells": cells}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
