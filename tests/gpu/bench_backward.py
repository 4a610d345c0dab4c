"""The backward table of FlashAttention-2's paper, beside PyTorch's own attention on the same GPU.

Sizes, values and timing as in bench_forward.py; the arithmetic of a backward is 2.5 times that of a
forward. PyTorch's part is torch.autograd.grad of the three inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_forward import (
    HEAD_DIMS,
    HIDDEN,
    RIVALS,
    ROUNDS,
    SEQLENS,
    TOKENS,
    facts,
    markdown,
    time_interleaved,
)
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import anyflash

Gradients = tuple[torch.Tensor, ...]


def contenders(inputs: Gradients, causal: bool, modes: list[str]) -> dict[str, Callable[[], Any]]:
    """Those that can run this. PyTorch gets its (batch, heads, seqlen, head_dim) as views."""
    dout, q, k, v = inputs
    out, lse = anyflash.attention(q, k, v, causal=causal, return_lse=True)
    into = dict(zip(("dq", "dk", "dv"), (torch.empty_like(x) for x in (q, k, v)), strict=True))
    calls: dict[str, Callable[[], Any]] = {}
    for mode in modes:

        def own(deterministic: bool = mode == "deterministic") -> Gradients:
            return anyflash.attention_backward(
                *inputs, out, lse, causal=causal, deterministic=deterministic, **into
            )[:3]

        calls[mode] = own
    for name, backend in RIVALS.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        try:
            with sdpa_kernel(backend):
                swapped = [x.transpose(1, 2) for x in leaves]
                result = scaled_dot_product_attention(*swapped, is_causal=causal).transpose(1, 2)
        except RuntimeError as error:
            print(f"{name} cannot run: {error}".splitlines()[0], file=sys.stderr)
            continue

        def rival(result: torch.Tensor = result, leaves: Any = leaves) -> Gradients:
            return torch.autograd.grad(result, leaves, dout, retain_graph=True)

        for mode in modes:
            for own_gradient, gradient in zip(calls[mode](), rival(), strict=True):
                torch.testing.assert_close(own_gradient, gradient, rtol=0.05, atol=0.05)
        calls[name] = rival
    return calls


def measure(head_dim: int, causal: bool, seqlen: int, arguments: Any) -> dict[str, Any]:
    batch, heads = TOKENS // seqlen, HIDDEN // head_dim
    torch.manual_seed(0)
    shape = (batch, seqlen, heads, head_dim)
    inputs = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    samples = time_interleaved(contenders(inputs, causal, arguments.modes), arguments.rounds)
    operations = 10 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "head_dim": head_dim,
        "causal": causal,
        "seqlen": seqlen,
        "batch": batch,
        "heads": heads,
        "milliseconds": samples,
        "tflops": {name: operations / ms / 1e9 for name, ms in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every sample there")
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--modes", nargs="+", default=["anyflash"], help="anyflash, deterministic")
    arguments = parser.parse_args()

    about = facts()
    cells = [
        measure(head_dim, causal, seqlen, arguments)
        for head_dim in arguments.head_dims
        for causal in (False, True)
        for seqlen in SEQLENS
    ]
    table = markdown(about, cells, arguments.modes)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
