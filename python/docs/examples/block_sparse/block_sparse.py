"""Block-sparse attention at growing lengths: its time and memory beside dense attention's
(README.md says more)."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # svg.py, which the guide's plots share
sys.path.append(str(Path(__file__).parents[1] / "train"))  # about.py

import about

try:
    import plot
    import torch
    from patterns import BLOCK, KINDS, Attention, attention
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    name = str(error.name).partition(".")[0]
    packages = "." if name == "anyflash" else "torch rich matplotlib"
    raise SystemExit(
        f"the package {name} is missing; in the repository's root run: pip install {packages}"
    ) from None


@dataclass(frozen=True)
class Problem:
    kind: str
    length: int
    heads: int
    head_dim: int
    device: str
    repeats: int
    matrix_mib: int


@dataclass(frozen=True)
class Cell:
    """What was measured; None: standard attention was left out, or its memory did not suffice."""

    kind: str
    length: int
    kept: float  # share of the scores
    forward_s: float | None
    both_s: float | None  # forward and backward
    memory_bytes: int | None  # of inputs, results, gradients, and all between


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument(
        "--matrix-mib", type=int, default=512, help="standard attention's scores, at most"
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="writes block_sparse.svg there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="shows what --json printed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU; leave the option out")
    return options


def peak_of_memory(device: str) -> int:
    """In bytes, of this process until now."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def seconds(call: Callable[[], Any], problem: Problem) -> float:
    """Of the fastest of several calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(problem.repeats):
        if problem.device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if problem.device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken)


def run(problem: Problem, length: int, attend: Attention) -> tuple[float, float]:
    """Seconds of the forward, and of forward and backward."""
    dtype = torch.float32 if problem.device == "cpu" else torch.bfloat16
    shape = (1, length, problem.heads, problem.head_dim)
    *inputs, dout = torch.randn(4, *shape, device=problem.device, dtype=dtype)
    with torch.no_grad():
        forward = seconds(lambda: attend(*inputs), problem)
    for x in inputs:
        x.requires_grad_()
    return forward, seconds(lambda: torch.autograd.grad(attend(*inputs), inputs, dout), problem)


def measure(problem: Problem) -> Cell:
    """In a process of its own, whose peak of memory is that of the problem."""
    kind, length, device = problem.kind, problem.length, problem.device
    matrix = problem.heads * length**2 * (4 if device == "cpu" else 2)
    if kind == "standard" and matrix > problem.matrix_mib << 20:
        return Cell(kind, length, 1.0, None, None, None)
    attend, kept = attention(kind, length, device)
    run(problem, BLOCK, attention(kind, BLOCK, device)[0])  # what is done once does not count
    before = peak_of_memory(device)
    try:
        forward, both = run(problem, length, attend)
    except torch.OutOfMemoryError:
        return Cell(kind, length, kept, None, None, None)
    return Cell(kind, length, kept, forward, both, peak_of_memory(device) - before)


def measured(options: argparse.Namespace) -> list[Cell]:
    problems = [
        Problem(
            kind, length, options.heads, options.head_dim, options.device, options.repeats,
            options.matrix_mib,
        )
        for length in options.lengths
        for kind in KINDS
    ]  # fmt: skip
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "patterns"])  # once, not in every process
    cells = []
    for problem in problems:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            cells.append(process.submit(measure, problem).result())
    return cells


def table(cells: list[dict[str, Any]]) -> Table:
    columns = ("length", "attention", "kept", "forward, ms", "both, ms", "MiB", "speed")
    caption = "both: forward and backward; speed: theirs, dense attention's being 1"
    shown = Table(*columns, caption=caption)
    dense = {cell["length"]: cell["both_s"] for cell in cells if cell["kind"] == "dense"}
    for cell in cells:
        row = [f"{cell['length']:,}", cell["kind"], f"{cell['kept']:.1%}"]
        if cell["both_s"] is None:
            row += ["-"] * 4
        else:
            row += [f"{1e3 * cell['forward_s']:,.1f}", f"{1e3 * cell['both_s']:,.1f}"]
            row += [f"{cell['memory_bytes'] / 2**20:,.0f}"]
            row += [f"{dense[cell['length']] / cell['both_s']:.2f}"]
        shown.add_row(*row, end_section=cell["kind"] == KINDS[-1])
    return shown


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.read:
        document = json.loads(options.read.read_text())
    else:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        facts = about.run(["block_sparse.py", *(arguments or sys.argv[1:])])
        facts |= about.hardware(gpu, {})
        document = {"about": facts, "cells": [asdict(cell) for cell in measured(options)]}
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
        for name, drawn in plot.drawings(document["cells"]).items():
            (options.plot / name).write_text(drawn)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        Console().print(table(document["cells"]))


if __name__ == "__main__":
    main()
