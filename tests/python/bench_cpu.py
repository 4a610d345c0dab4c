"""Forward speed on the CPU, beside PyTorch's scaled_dot_product_attention in the same process.

    python tests/python/bench_cpu.py [--dtype float32] [--rounds 15]

Batch 2, 8 heads, 2048 tokens; both use the same number of threads and take turns; a cell is the
median over the rounds in GFLOP/s. A causal mask counts half of the arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import anyflash

BATCH, HEADS, SEQLEN = 2, 8, 2048


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    cpu = anyflash.build_info()["cpu"]
    torch.set_num_threads(cpu["threads"])
    print(
        f"{args.dtype}, batch {BATCH}, {HEADS} heads, {SEQLEN} tokens, {cpu['threads']} threads, "
        f"{cpu['isa']}, torch {torch.__version__}\n\n"
        "| head dim | mask | anyflash GFLOP/s | torch GFLOP/s | ratio |\n|---|---|---|---|---|"
    )
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        shape = (BATCH, SEQLEN, HEADS, head_dim)
        q, k, v = (torch.randn(shape).to(getattr(torch, args.dtype)) for _ in range(3))
        swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

        def ours(q=q, k=k, v=v, causal=causal) -> object:
            return anyflash.attention(q, k, v, causal=causal)

        def theirs(swapped=swapped, causal=causal) -> object:
            return scaled_dot_product_attention(*swapped, is_causal=causal)

        times = [(seconds(ours), seconds(theirs)) for _ in range(args.rounds + 2)][2:]
        flop = 4 * BATCH * HEADS * SEQLEN**2 * head_dim * (0.5 if causal else 1)
        speeds = [flop / statistics.median(column) / 1e9 for column in zip(*times, strict=True)]
        ratio = statistics.median(theirs / ours for ours, theirs in times)
        mask = "causal" if causal else "full"
        print(f"| {head_dim} | {mask} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
