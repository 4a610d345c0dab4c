"""What times.py and times_backward.py share: measuring, printing and the program.

The FlashAttention-2 paper's grid: 16384 tokens, hidden size 2048.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from isolated import isolated
from library import Problem

try:
    from flash_attn_interface import flash_attn_func
except ImportError:
    flash_attn_func = None
try:
    import pynvml
except ImportError:  # the clock is a remark only
    pynvml = None

ROUNDS = 5
LIMIT_S = 25.0  # of a library, head dim and mask
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
HIDDEN = 2048

Launches = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Operation:
    """What is timed. `ours` gets a library's path, both get the problem and further inputs."""

    prefix: str  # of a library's file, before the head dim
    dims: tuple[int, ...]  # where the command names none
    inputs: int  # tensors like q, which come first, with k and v
    products: int  # of matrices, each of 2 * seqlen^2 * head dim operations a head
    guess: float  # operations a second, for the number of repeats
    most_repeats: int
    skip_broken: bool  # a library that failed with one mask is not tried with the next
    ours: Callable[..., Launches]
    peers: Callable[..., Launches]


def clock() -> int:
    """MHz, 0 where nobody tells."""
    if pynvml is None:
        return 0
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))


def milliseconds(launch: Callable[[], Any], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def name_of(path: pathlib.Path) -> str:
    """A library's name in the tables."""
    return path.stem.split("_", 1)[1]


def measure(
    operation: Operation, path: pathlib.Path | None, d: int, causal: bool
) -> list[dict[str, Any]]:
    """One row a sequence length, of one library, or of its peers."""
    rows = []
    for seqlen in SEQLENS:
        heads, batch = HIDDEN // d, TOKENS // seqlen
        q, k, v, *others = (
            torch.randn(batch, seqlen, heads, d, device="cuda").to(torch.bfloat16)
            for _ in range(operation.inputs)
        )
        p = Problem(q, k, v, -1, 0 if causal else -1)
        launches = operation.peers(p, *others) if path is None else operation.ours(path, p, *others)
        flops = 2.0 * operation.products * seqlen * seqlen * d * heads * batch
        flops /= 2 if causal else 1
        repeats = int(8.0 / (flops / operation.guess * 1e3))
        repeats = max(3, min(operation.most_repeats, repeats))
        times: dict[str, list[float]] = {name: [] for name in launches}
        for launch in launches.values():
            milliseconds(launch, 2)
        clocks = []
        for _ in range(ROUNDS):
            for name, launch in launches.items():
                times[name].append(milliseconds(launch, repeats))
                clocks.append(clock())
        tflops = {name: flops / statistics.median(of) * 1e-9 for name, of in times.items()}
        rows.append({"d": d, "seqlen": seqlen, "causal": causal,
                     "clock": statistics.median(clocks), "tflops": tflops})  # fmt: skip
    return rows


def gemm() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    milliseconds(lambda: a @ b, 3)
    times = [milliseconds(lambda: a @ b, 5) for _ in range(5)]
    return 2 * 8192.0**3 / statistics.median(times) * 1e-9


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        numbers = "  ".join(f"{n} {t:.0f}" for n, t in row["tflops"].items())
        kind = "causal" if row["causal"] else "full"
        print(
            f"d{row['d']} {kind} {row['seqlen']}: {numbers}  ({row['clock']:.0f} MHz)", flush=True
        )


def run_times(operation: Operation) -> None:
    """The program: every library and its peers, each in a process of its own."""
    folder, target = sys.argv[1:3]
    dims = [int(d) for d in sys.argv[3:]] or operation.dims
    rows: list[dict[str, Any]] = []
    print("gemm", *isolated(LIMIT_S, gemm), "TFLOP/s", flush=True)
    broken: set[pathlib.Path] = set()
    for d in dims:
        for causal in (False, True):
            paths = sorted(pathlib.Path(folder).glob(f"{operation.prefix}{d}_*.so"))
            for path in (None, *paths):
                if path in broken:
                    continue
                result, problem = isolated(LIMIT_S, measure, operation, path, d, causal)
                if result is None:
                    print(f"d{d} {'peers' if path is None else path.stem}: {problem}", flush=True)
                    if path is not None and operation.skip_broken:
                        broken.add(path)
                    continue
                show(result)
                rows += result
                pathlib.Path(target).write_text(json.dumps(rows, indent=1))
    print("gemm", *isolated(LIMIT_S, gemm), "TFLOP/s", flush=True)
