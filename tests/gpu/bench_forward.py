"""The forward table of FlashAttention-2's paper, beside PyTorch's own attention on the same GPU.

16384 tokens and a hidden size of 2048 in every cell: seqlen 512 to 16384, head dims 64 and 128,
with and without a causal mask, bfloat16, standard normal values. Contenders take turns within one
process, so that clocks and temperature are the same for all; a cell is the median over the rounds,
by CUDA events. A causal mask counts half of the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import anyflash

TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
RIVALS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS = 15
WARM_UP_ROUNDS = 3
ROUND_MS = 10.0  # enough calls in a round that their launches do not count

Call = Callable[[], torch.Tensor]


def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Call]:
    """Those that can run this. PyTorch gets its (batch, heads, seqlen, head_dim) as views."""
    out = torch.empty_like(q)
    calls: dict[str, Call] = {
        "anyflash": lambda: anyflash.attention(q, k, v, causal=causal, out=out)
    }
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    for name, backend in RIVALS.items():

        def call(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*swapped, is_causal=causal).transpose(1, 2)

        try:
            result = call()
        except RuntimeError as error:
            print(f"{name} cannot run: {error}".splitlines()[0], file=sys.stderr)
            continue
        torch.testing.assert_close(calls["anyflash"](), result, rtol=0.02, atol=0.02)
        calls[name] = call
    return calls


def milliseconds(call: Call, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def time_interleaved(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    repeats = {}
    for name, call in calls.items():
        milliseconds(call, 3)
        repeats[name] = max(1, round(ROUND_MS / milliseconds(call, 3)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP_ROUNDS + rounds):
        for name, call in calls.items():
            took = milliseconds(call, repeats[name])
            if turn >= WARM_UP_ROUNDS:
                samples[name].append(took)
    return samples


def measure(head_dim: int, causal: bool, seqlen: int, rounds: int) -> dict[str, Any]:
    batch, heads = TOKENS // seqlen, HIDDEN // head_dim
    torch.manual_seed(0)
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    samples = time_interleaved(contenders(q, k, v, causal), rounds)
    operations = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
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


def text_of(command: list[str]) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def facts() -> dict[str, str]:
    root = str(Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": text_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "anyflash": anyflash.__version__,
        "commit": text_of(["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40"]),
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "command": shlex.join(["python", *sys.argv]),
    }


def markdown(
    about: dict[str, str], cells: list[dict[str, Any]], own: Sequence[str] = ("anyflash",)
) -> str:
    names = [*own, *RIVALS]
    header = ["head dim", "causal", "seqlen", *names, *(f"/ {name}" for name in RIVALS)]
    rows = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for cell in cells:
        speed = cell["tflops"]
        mask = "yes" if cell["causal"] else "no"
        row = [str(cell["head_dim"]), mask, str(cell["seqlen"])]
        row += [f"{speed[name]:.0f}" if name in speed else "-" for name in names]
        row += [f"{speed[own[0]] / speed[name]:.2f}" if name in speed else "-" for name in RIVALS]
        rows.append(row)
    lines = [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "TFLOP/s; the last columns are anyflash's speed by PyTorch's.", ""]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every sample there")
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()

    about = facts()
    cells = [
        measure(head_dim, causal, seqlen, arguments.rounds)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for seqlen in SEQLENS
    ]
    table = markdown(about, cells)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
