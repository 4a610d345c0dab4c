"""The speed of training by model, length and attention: FlashAttention-2's last table.

Each cell is a process of its own. One that fails, for lack of memory say, is a result as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import about
import choices
import numpy as np
from config import CONFIGS
from speed import peak_tflops, speed

OUT_OF_MEMORY = "out of memory"
# How PyTorch's allocators and XLA say so.
NO_MEMORY = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")
LR = 1e-4


@dataclass(frozen=True)
class Cell:
    model: str
    seqlen: int
    attention: str


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    choices.add_to(parser)
    number = {"type": choices.positive}
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["1.3b", "2.7b"])
    parser.add_argument("--seqlens", nargs="+", **number, default=[2048, 8192])
    parser.add_argument(
        "--attention", nargs="+", choices=choices.ATTENTION, default=list(choices.ATTENTION)
    )
    parser.add_argument("--tokens", **number, default=16384, help="of a step, in all its sequences")
    parser.add_argument("--warmup", **number, default=10, help="steps that do not count")
    parser.add_argument("--steps", **number, default=20, help="steps that do")
    parser.add_argument("--timeout", **number, metavar="SECONDS", help="of a cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every cell")
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)  # in its process
    return parser.parse_args(arguments)


def times(trainer: Any, batch: np.ndarray, warmup: int, steps: int) -> list[float]:
    """Seconds of each step behind those that do not count. A step waits for its loss, and so for
    the step before it to end."""
    ends = []
    for _ in range(warmup + steps):
        trainer.step(batch, LR)
        ends.append(time.perf_counter())
    return np.diff(ends[warmup - 1 :]).tolist()


def measure(options: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    """In this process: what it runs on, and the figures or the failure."""
    gpt = choices.framework_module(options.framework, cell.attention, options.device)
    facts = about.device(gpt, options.device)
    setup = choices.setup_of(options, cell.model, cell.attention, cell.seqlen, seed=0)
    config = setup.config
    batch_size = max(1, options.tokens // cell.seqlen)
    shape = (batch_size, cell.seqlen + 1)
    batch = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    try:
        trainer = gpt.Trainer(setup)
        seconds = times(trainer, batch, options.warmup, options.steps)
    except Exception as error:  # each one is a result
        return {"device": facts, "result": {"failure": reason(error)}}
    mean = sum(seconds) / len(seconds)
    peak = peak_tflops(facts["gpu"])
    figures = dataclasses.asdict(speed(config, trainer.parameters, (batch_size, mean), peak))
    counts = {"batch_size": batch_size, "parameters": trainer.parameters}
    return {"device": facts, "result": counts | figures | {"seconds_of_steps": seconds}}


def reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0]}"


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Of a cell's process, which may have been killed."""
    if done.returncode == 0:
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed
    said = done.stderr.strip().splitlines() or ["it said nothing"]
    why = said[-1]
    if done.returncode < 0:
        why = f"ended by {signal.Signals(-done.returncode).name}"
    return {"device": None, "result": {"failure": why}}


def in_a_process(options: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    command = [
        *(sys.executable, __file__, "--cell"),
        *("--models", cell.model, "--seqlens", str(cell.seqlen), "--attention", cell.attention),
        *("--framework", options.framework, "--device", options.device),
        *("--tokens", str(options.tokens)),
        *("--warmup", str(options.warmup), "--steps", str(options.steps)),
        *(["--recompute"] * options.recompute),
        *(["--compile"] * options.compile),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"device": None, "result": {"failure": f"no end in {options.timeout} s"}}
    return outcome(done)


def words(result: dict[str, Any]) -> str:
    """A cell of the table."""
    if "failure" in result:
        return str(result["failure"])
    share = "" if result["mfu"] is None else f" ({result['mfu']:.0%})"
    return f"{result['tflops']:.3g}{share}"


def show(document: dict[str, Any]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise choices.missing(error, "torch") from None

    attention = dict.fromkeys(cell["attention"] for cell in document["cells"])
    found = {(c["model"], c["seqlen"], c["attention"]): words(c) for c in document["cells"]}
    title = "TFLOP/s of training, and the share of the device's peak where that is known"
    table = Table("model", "tokens", *attention, title=title)
    for model, seqlen in dict.fromkeys((c["model"], c["seqlen"]) for c in document["cells"]):
        row = [found.get((model, seqlen, name), "") for name in attention]
        table.add_row(model, f"{seqlen:,}", *row)
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if memory alone was lacking, where anything was."""
    options = parse(arguments)
    cells = [Cell(*cell) for cell in product(options.models, options.seqlens, options.attention)]
    if options.cell:
        print(json.dumps(measure(options, cells[0])))
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    document: dict[str, Any] = {"about": about.run(["benchmark.py", *given]), "cells": []}
    for cell in cells:
        measured = in_a_process(options, cell)
        device = measured["device"] or {}
        document["about"] |= device
        document["cells"].append(dataclasses.asdict(cell) | measured["result"])
        print(*dataclasses.astuple(cell), words(measured["result"]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    show(document)
    failures = {cell.get("failure", OUT_OF_MEMORY) for cell in document["cells"]}
    return int(failures != {OUT_OF_MEMORY})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
