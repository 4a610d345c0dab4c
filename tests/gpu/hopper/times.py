"""Times libraries built from forward.cu, cuDNN and FlashAttention-3, each in a process of its own.

times.py FOLDER RESULT.json [HEAD_DIM...]

FOLDER holds d<head dim>_<name>.so. The FlashAttention-2 paper's grid: 16384 tokens, hidden size
2048.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from isolated import isolated
from library import Library, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

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


def peers(p: Problem) -> dict[str, Callable[[], Any]]:
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    causal = p.right == 0

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    result: dict[str, Callable[[], Any]] = {"cudnn": cudnn}
    if flash_attn_func is not None:
        result["fa3"] = lambda: flash_attn_func(p.q, p.k, p.v, causal=causal)
    return result


def ours(path: pathlib.Path, p: Problem) -> dict[str, Callable[[], Any]]:
    library = Library(str(path))
    out = torch.empty_like(p.q)
    lse = torch.empty(p.q.shape[0], p.q.shape[2], p.q.shape[1], device="cuda")
    name = path.stem.split("_", 1)[1]
    return {name: library.call(p, out, lse)}


def measure(path: pathlib.Path | None, d: int, causal: bool) -> list[dict[str, Any]]:
    """One row a sequence length, of one library, or of its peers."""
    rows = []
    for seqlen in SEQLENS:
        heads, batch = HIDDEN // d, TOKENS // seqlen
        q, k, v = (
            torch.randn(batch, seqlen, heads, d, device="cuda").to(torch.bfloat16) for _ in range(3)
        )
        p = Problem(q, k, v, -1, 0 if causal else -1)
        launches = peers(p) if path is None else ours(path, p)
        flops = 4.0 * seqlen * seqlen * d * heads * batch / (2 if causal else 1)
        repeats = max(3, min(20, int(8.0 / (flops / 600e12 * 1e3))))
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


def main() -> None:
    folder, target = sys.argv[1:3]
    dims = [int(d) for d in sys.argv[3:]] or [128, 64, 256]
    rows: list[dict[str, Any]] = []
    print("gemm", *isolated(LIMIT_S, gemm), "TFLOP/s", flush=True)
    broken: set[pathlib.Path] = set()
    for d in dims:
        for causal in (False, True):
            paths = sorted(pathlib.Path(folder).glob(f"d{d}_*.so"))
            for path in (None, *paths):
                if path in broken:
                    continue
                result, problem = isolated(LIMIT_S, measure, path, d, causal)
                if result is None:
                    print(f"d{d} {'peers' if path is None else path.stem}: {problem}", flush=True)
                    if path is not None:
                        broken.add(path)
                    continue
                show(result)
                rows += result
                pathlib.Path(target).write_text(json.dumps(rows, indent=1))
    print("gemm", *isolated(LIMIT_S, gemm), "TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
