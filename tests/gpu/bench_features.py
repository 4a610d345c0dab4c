"""Each forward feature against the plain kernel, and against PyTorch where it has the feature.

bfloat16, standard normal values, 16384 tokens and a hidden size of 2048. Contenders of a row take
turns within one process; a figure is the median over the rounds, by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_forward import HIDDEN, ROUNDS, TOKENS, Call, facts, time_interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import anyflash

SEQLEN = 4096
HEAD_DIMS = (64, 128)
WINDOW = 512
BLOCK = 128
SOFTCAP = 50.0
DROPOUT = 0.1


class Problem:
    def __init__(self, head_dim: int) -> None:
        torch.manual_seed(0)
        self.batch, self.heads, self.head_dim = TOKENS // SEQLEN, HIDDEN // head_dim, head_dim
        shape = (self.batch, SEQLEN, self.heads, head_dim)
        self.q, self.k, self.v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self.out = torch.empty_like(self.q)
        self.slopes = torch.exp2(-8 * torch.arange(1, self.heads + 1, device="cuda") / self.heads)
        self.bias = torch.randn(
            (1, self.heads, SEQLEN, SEQLEN), device="cuda", dtype=torch.bfloat16
        )
        self.keep = torch.rand((1, 1, SEQLEN, SEQLEN), device="cuda") < 0.5
        blocks = SEQLEN // BLOCK
        self.blocks = torch.rand((1, 1, blocks, blocks), device="cuda") < 0.5
        self.blocks |= torch.eye(blocks, device="cuda", dtype=torch.bool)
        self.sinks = torch.randn(self.heads, device="cuda")
        self.swapped = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        self.compiled = torch.compile(flex_attention, dynamic=False)

    def ours(self, **options: Any) -> Call:
        return lambda: anyflash.attention(self.q, self.k, self.v, out=self.out, **options)

    def packed(self) -> Call:
        q, k, v, out = (x.flatten(0, 1) for x in (self.q, self.k, self.v, self.out))
        starts = torch.arange(0, TOKENS + 1, SEQLEN, device="cuda", dtype=torch.int32)
        return lambda: anyflash.attention_varlen(
            q, k, v, starts, starts, SEQLEN, SEQLEN, out=out
        ).view(self.out.shape)

    def torchs(self, backend: SDPBackend, **options: Any) -> Call:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*self.swapped, **options).transpose(1, 2)

        return call

    def flex(self, score_mod: Any = None, mask_mod: Any = None) -> Call:
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")
        return lambda: self.compiled(*self.swapped, score_mod=score_mod, block_mask=mask).transpose(
            1, 2
        )


def rows(p: Problem) -> Iterator[tuple[str, Call, dict[str, Call]]]:
    """Feature, our call, and other people's calls of the same function."""
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    slopes, blocks = p.slopes, p.blocks[0, 0]

    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - slopes[h] * torch.abs(i - j)

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= WINDOW) & (i >= j)

    def block(b: Any, h: Any, i: Any, j: Any) -> Any:
        return blocks[i // BLOCK, j // BLOCK]

    yield "plain", p.ours(), {"flash": p.torchs(flash)}
    yield "causal", p.ours(causal=True), {"flash": p.torchs(flash, is_causal=True)}
    yield f"window {WINDOW}", p.ours(window_size=(WINDOW, 0)), {"flex": p.flex(mask_mod=window)}
    yield "packed", p.packed(), {}
    yield "sinks", p.ours(sinks=p.sinks), {}
    yield "max_logits", p.ours(return_max_logits=True), {}
    yield "softcap", p.ours(softcap=SOFTCAP), {"flex": p.flex(softcap)}
    yield "alibi", p.ours(alibi_slopes=p.slopes), {"flex": p.flex(alibi)}
    masks = {"efficient": p.torchs(efficient, attn_mask=p.bias.expand(p.batch, -1, -1, -1))}
    yield "bias bf16", p.ours(bias=p.bias), masks
    keep = p.keep.expand(p.batch, p.heads, -1, -1)
    yield "bias bool", p.ours(bias=p.keep), {"efficient": p.torchs(efficient, attn_mask=keep)}
    kept = p.ours(block_mask=p.blocks, block_size=(BLOCK, BLOCK))
    yield "block mask, half", kept, {"flex": p.flex(mask_mod=block)}
    dropped = p.ours(dropout_p=DROPOUT, seed=1)
    yield "dropout", dropped, {"flash": p.torchs(flash, dropout_p=DROPOUT)}
    everything = p.ours(
        window_size=(WINDOW, WINDOW), softcap=SOFTCAP, alibi_slopes=p.slopes, bias=p.bias,
        sinks=p.sinks, dropout_p=DROPOUT, seed=1,
    )  # fmt: skip
    yield "everything, window 512 both ways", everything, {}


def tensor_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def usable(feature: str, ours: Call, others: dict[str, Call]) -> dict[str, Call]:
    """Those that run here and agree."""
    calls = {"anyflash": ours}
    for name, call in others.items():
        try:
            result = call()
        except Exception as error:  # whatever a compiler raises: the row does without
            print(f"{feature}: {name} cannot run: {error}".splitlines()[0], file=sys.stderr)
            continue
        if feature != "dropout":
            torch.testing.assert_close(tensor_of(ours()), result, rtol=0.03, atol=0.03)
        calls[name] = call
    return calls


def measure(head_dim: int, rounds: int) -> list[dict[str, Any]]:
    problem = Problem(head_dim)
    cells: list[dict[str, Any]] = []
    for feature, ours, others in rows(problem):
        calls: dict[str, Callable[[], Any]] = {
            "plain": problem.ours(),
            **usable(feature, ours, others),
        }
        samples = time_interleaved(calls, rounds)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        cells.append({"feature": feature, "head_dim": head_dim, "milliseconds": medians})
    return cells


def markdown(about: dict[str, str], cells: list[dict[str, Any]]) -> str:
    lines = [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- batch * seqlen {TOKENS}, seqlen {SEQLEN}, heads * head dim {HIDDEN}", ""]
    lines += ["| feature | head dim | plain ms | feature ms | ratio | PyTorch ms |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
    for cell in cells:
        times = dict(cell["milliseconds"])
        plain, own = times.pop("plain"), times.pop("anyflash")
        others = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items()) or "-"
        lines.append(
            f"| {cell['feature']} | {cell['head_dim']} | {plain:.2f} | {own:.2f} "
            f"| {own / plain:.2f} | {others} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()

    about = facts()
    cells = [cell for head_dim in HEAD_DIMS for cell in measure(head_dim, arguments.rounds)]
    table = markdown(about, cells)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
