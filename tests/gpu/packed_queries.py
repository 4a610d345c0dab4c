"""Times attention_varlen_with_kvcache beside the calls that it replaces, on a GPU.

    python tests/gpu/packed_queries.py [--page ROWS] [--json RESULTS.json]

A prompt and single tokens, and chunks of prompts, over pages of 64 rows: bfloat16, 32 query heads
on 8. Microseconds: medians of replays of CUDA graphs, taken in turns. What is "by sm80" runs on
mma.sync where Hopper has kernels of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import anyflash
from anyflash import _core

HEADS, HEADS_K, ROUNDS, REPLAYS = 32, 8, 15, 5
PROMPTS = ((127, 8192), (127, 512), (63, 2048), (128, 0), (16, 0))  # single tokens, one prompt
CHUNKS = ((1, 40), (1, 128), (1, 512), (16, 40), (16, 64), (16, 100), (16, 128), (64, 128))
Calls = dict[str, Callable[[], Any]]


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def times(calls: Calls) -> dict[str, float]:
    graphs = {name: graph_of(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    other = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.zero_()  # the GPU is busy until the host has launched all
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / REPLAYS * 1e3)
    return {name: statistics.median(x) for name, x in samples.items()}


class Batch:
    """Sequences of `counts` queries, each with `context` keys in pages."""

    page = 64  # its rows

    def __init__(self, counts: list[int], context: int, head_dim: int) -> None:
        pages = len(counts) * context // self.page
        shape = (pages, self.page, HEADS_K, head_dim)
        self.caches = [self.random(*shape) for _ in range(2)]
        self.q = self.random(sum(counts), HEADS, head_dim)
        table = torch.randperm(pages, device="cuda", dtype=torch.int32)
        self.table = table.view(len(counts), -1)
        self.lengths = torch.full((len(counts),), context, device="cuda", dtype=torch.int32)
        ends = torch.tensor([0, *counts]).cumsum(0)
        self.ends = ends.to("cuda", torch.int32)

    @staticmethod
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def packed(self, first: int = 0, count: int | None = None, **options: Any) -> Any:
        """The sequences [first, first + count) in one call; the first one's rows come first."""
        end = None if count is None else first + count
        rows = int(self.ends[end]) if end is not None else len(self.q)
        ends = self.ends[: None if end is None else end + 1]
        q, lengths, table = self.q[:rows], self.lengths[first:end], self.table[first:end]

        def call() -> Any:
            return anyflash.attention_varlen_with_kvcache(
                q,
                *self.caches,
                ends,
                cache_seqlens=lengths,
                block_table=table,
                causal=True,
                **options,
            )

        return call

    def singles(self, first: int, begin: int) -> Any:
        """The sequences from `first` on, whose single queries are the rows from `begin` on."""
        q = self.q[begin:, None]
        lengths, table = self.lengths[first:], self.table[first:]

        def call() -> Any:
            return anyflash.attention_with_kvcache(
                q, *self.caches, cache_seqlens=lengths, block_table=table, causal=True
            )

        return call


def dense(q: torch.Tensor, context: int) -> Callable[[], Any]:
    """The prompt alone by anyflash.attention, over keys that are not in pages."""
    k, v = (Batch.random(1, context, HEADS_K, q.shape[-1]) for _ in range(2))
    return lambda: anyflash.attention(q[None], k, v, causal=True)


def prompt_and_singles(head_dim: int, singles: int, prompt: int) -> dict[str, float]:
    context, first = 8192, int(prompt > 0)
    batch = Batch([prompt] * first + [1] * singles, context, head_dim)
    calls: Calls = {"packed": batch.packed(), "singles": batch.singles(first, prompt)}
    if not prompt:
        return times(calls | {"packed, max_seqlen_q=1": batch.packed(max_seqlen_q=1)})
    attention = dense(batch.q[:prompt], context)
    alone = batch.packed(0, 1)
    found = times(calls | {"prompt, packed": alone, "prompt, attention": attention})
    wide = "_wide" if head_dim == 128 else ""
    for name, call, kernel in (
        ("prompt, attention by sm80", attention, f"forward_bf16_d{head_dim}{wide}"),
        ("prompt, packed by sm80", alone, f"prefill_bf16_d{head_dim}"),
    ):
        _core.prefer_kernel(f"sm80_{kernel}")
        found[name] = times({"x": call})["x"]
        _core.prefer_kernel(None)
    return found


def chunks(head_dim: int, context: int, count: int, queries: int) -> dict[str, float]:
    call = Batch([queries] * count, context, head_dim).packed()
    found = times({"packed": call})
    _core.prefer_kernel(f"sm80_decode_bf16_d{head_dim}_m64")
    found["all by decoding's kernel"] = times({"x": call})["x"]
    _core.prefer_kernel(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=int, default=Batch.page, metavar="ROWS")
    parser.add_argument("--json", type=Path, metavar="RESULTS.json")
    arguments = parser.parse_args()
    Batch.page = arguments.page
    torch.manual_seed(0)
    results = {}
    for head_dim in (64, 128):
        for singles, prompt in PROMPTS:
            name = f"d{head_dim}, {singles} single tokens, prompt of {prompt}"
            results[name] = prompt_and_singles(head_dim, singles, prompt)
        for context in (1024, 8192):
            for count, queries in CHUNKS:
                name = f"d{head_dim}, context {context}, {count} x {queries}"
                results[name] = chunks(head_dim, context, count, queries)
    for name, found in results.items():
        print(name, {key: round(x, 1) for key, x in found.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
