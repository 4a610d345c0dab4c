"""The speed of training by model, length and attention: FlashAttention-2's last table.

Each cell is a process of its own. One that fails, for lack of memory say, is a result as well.
What the file of --json has already is kept, and only the other cells are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import time
import traceback
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
# How PyTorch's allocators, NVIDIA's libraries and XLA say so.
NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "RESOURCE_EXHAUSTED")
LR = 1e-4
# Options of all cells: a file has those of one choice.
COMMON = ("framework", "device", "recompute", "compile", "tokens", "warmup", "steps")


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


def times(trainer: Any, batch: np.ndarray, warmup: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of the first step, in which a model is compiled, and of each that counts. A step
    waits for its loss, and so for the step before it to end."""
    ends = [time.perf_counter()]
    for _ in range(warmup + steps):
        trainer.step(batch, LR)
        ends.append(time.perf_counter())
    return ends[1] - ends[0], np.diff(ends[warmup:]).tolist()


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
        first, seconds = times(trainer, batch, options.warmup, options.steps)
    except Exception as error:  # each one is a result
        return {"device": facts, "result": failed(error)}
    mean = sum(seconds) / len(seconds)
    peak = peak_tflops(facts["gpu"])
    result = {
        "batch_size": batch_size,
        "parameters": trainer.parameters,
        **dataclasses.asdict(speed(config, trainer.parameters, (batch_size, mean), peak)),
        "peak_memory_bytes": gpt.peak_memory(options.device),
        "seconds_of_first_step": first,
        "seconds_of_steps": seconds,
    }
    return {"device": facts, "result": result}


def failed(error: Exception) -> dict[str, str]:
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        return {"failure": OUT_OF_MEMORY}
    why = " ".join(text.split())[:200]
    trace = "".join(traceback.format_exception(error))[-4000:]
    return {"failure": f"{type(error).__name__}: {why}", "traceback": trace}


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Of a cell's process, which may have been killed, or have failed when it ended."""
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            printed: dict[str, Any] = json.loads(line)
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


def begun(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """The document: the one that an earlier run of the same left, or a new one."""
    common = {name: getattr(options, name) for name in COMMON}
    document = {"about": about.run(["benchmark.py", *arguments]), "options": common, "cells": []}
    if not options.json or not options.json.exists():
        return document
    found: dict[str, Any] = json.loads(options.json.read_text())
    same = found.get("options") == common
    if not same or found["about"]["commit"] != document["about"]["commit"]:
        raise SystemExit(
            f"{options.json} is of other options or of another commit; choose another --json, or "
            "delete the file"
        )
    return found


def add(document: dict[str, Any], cell: Cell, measured: dict[str, Any]) -> None:
    device, facts = measured["device"] or {}, document["about"]
    if any(facts.get(name, fact) != fact for name, fact in device.items()):
        raise SystemExit("the file of --json is of another GPU, or of other versions; delete it")
    facts |= device
    document["cells"].append(dataclasses.asdict(cell) | measured["result"])


def save(file: Path, document: dict[str, Any]) -> None:
    """Writes beside `file`, then puts it in its place: whoever ends this leaves a whole one."""
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    beside.replace(file)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if memory alone was lacking, where anything was."""
    options = parse(arguments)
    cells = [Cell(*cell) for cell in product(options.models, options.seqlens, options.attention)]
    if options.cell:
        print(json.dumps(measure(options, cells[0])))
        return 0
    document = begun(options, sys.argv[1:] if arguments is None else arguments)
    done = {(cell["model"], cell["seqlen"], cell["attention"]) for cell in document["cells"]}
    for cell in cells:
        if dataclasses.astuple(cell) in done:
            continue
        measured = in_a_process(options, cell)
        add(document, cell, measured)
        print(*dataclasses.astuple(cell), words(measured["result"]), flush=True)
        if options.json:
            save(options.json, document)
    show(document)
    failures = {cell.get("failure", OUT_OF_MEMORY) for cell in document["cells"]}
    return int(failures != {OUT_OF_MEMORY})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
