"""How far results are from exact ones: writes the tables of the guide's page on errors.

    python python/docs/tools/error_study.py [--write]
    python python/docs/tools/error_study.py --device cuda --commit HASH --json FILE

Inputs are standard normal and rounded to the dtype; the exact results are of the same formula in
float64, with gradients by PyTorch's autograd. An error is the root of the differences' mean square,
divided by that of the exact values. The first command measures on the CPU; the page's rows of a GPU
are those of guide/errors_gpu.json, which the second one writes on a machine that has one.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from error_formulas import (
    BATCH,
    DTYPES,
    HEADS,
    HEADS_K,
    PROBLEMS,
    ROUNDINGS,
    Problem,
    error,
    exact,
    flash,
    plain,
    results,
)

import anyflash.torch
from anyflash import build_info

PAGE = Path(__file__).resolve().parents[1] / "guide/errors.md"
GPU = PAGE.with_name("errors_gpu.json")
Found = dict[str, list[float] | None]  # of out, dq, dk and dv, by who computed them
LABELS = {
    "anyflash": "anyflash",
    "fused": "PyTorch, fused",
    "plain": "PyTorch, step by step",
    "flash": "PyTorch's flash",
    "cudnn": "cuDNN",
}
OF_GPU = ("anyflash", "flash", "cudnn")
HEAD = "| problem | | out | dq | dk | dv |\n|---|---|---:|---:|---:|---:|"
# What the roundings cost: these problems, with all of them and without one of each kind.
ROUNDED_PROBLEMS = {
    *("128 queries and keys", "1024 queries and keys", "causal", "1 key", "head dim 128"),
    "16384 keys",
}
WITHOUT: dict[str, set[str]] = {
    "P, dS and delta rounded": set(),
    "delta in float64": {"delta"},
    "P not rounded": {"P"},
    "dS not rounded": {"dS"},
    "none of them": ROUNDINGS,
}


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    out: torch.Tensor = anyflash.torch.attention(q, k, v, **options)
    return out


def sdpa(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """One of PyTorch's backends, where it takes the problem."""
    if options.keys() - {"causal"}:
        raise NotImplementedError("an option that it has not, or has with other random numbers")
    kind = getattr(torch.nn.attention.SDPBackend, backend)
    with torch.nn.attention.sdpa_kernel(kind):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal="causal" in options,
            enable_gqa=True,
        ).transpose(1, 2)


Function = Callable[..., torch.Tensor]


def functions(device: str) -> dict[str, Function]:
    flash_attention = functools.partial(sdpa, "FLASH_ATTENTION")
    if device == "cpu":
        return {"anyflash": ours, "fused": flash_attention, "plain": plain}
    cudnn = functools.partial(sdpa, "CUDNN_ATTENTION")
    return {"anyflash": ours, "flash": flash_attention, "cudnn": cudnn}


def errors(problem: Problem, dtype: torch.dtype, device: str = "cpu") -> Found:
    x, options = problem.tensors(dtype, device)
    true = exact(x, options)
    found: Found = {}
    for name, function in functions(device).items():
        # A build of few kernels lacks some, and peers refuse some problems in ways of their own.
        refusals = (NotImplementedError,) if name == "anyflash" else (RuntimeError,)
        try:
            measured = results(function, x, options)
        except refusals as reason:
            found[name] = None
            if device != "cpu":
                print(f"{problem.name}, {dtype}: {name}: {reason}", file=sys.stderr)
            continue
        found[name] = [error(a, b) for a, b in zip(measured, true, strict=True)]
    return found


def of_gpu(commit: str) -> dict[str, Any]:
    """What the second command writes: the kernels' dtypes are those of tensor cores."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "commit": commit,
        "errors": {
            dtype: {problem.name: errors(problem, DTYPES[dtype], "cuda") for problem in PROBLEMS}
            for dtype in ("bfloat16", "float16")
        },
    }


def row(first: str, label: str, values: list[float], digits: int = 1) -> str:
    cells = " | ".join(f"{value:.{digits}e}" if value else "0" for value in values)
    return f"| {first} | {label} | {cells} |"


def table(dtype: str, gpu: dict[str, Any] | None) -> str:
    lines = [f"## {dtype}\n", HEAD]
    for problem in PROBLEMS:
        found = {LABELS[name]: x for name, x in errors(problem, DTYPES[dtype]).items()}
        if gpu is not None:
            there = gpu["errors"].get(dtype, {}).get(problem.name, {})
            where = gpu["gpu"].removeprefix("NVIDIA ").split()[0]
            found |= {f"{LABELS[name]}, {where}": there.get(name) for name in OF_GPU}
        rows = [(label, values) for label, values in found.items() if values is not None]
        for number, (label, values) in enumerate(rows):
            lines.append(row("" if number else problem.name, label, values))
    return "\n".join(lines)


def rounding_errors(problem: Problem, dtype: torch.dtype) -> dict[str, list[float]]:
    """Of FlashAttention's formula in float32 with its roundings, and without some of them."""
    x, options = problem.tensors(dtype, "cpu")
    true = exact(x, options)
    return {
        name: [error(a, b) for a, b in zip(flash(x, options, ROUNDINGS - left), true, strict=True)]
        for name, left in WITHOUT.items()
    }


def table_of_roundings(dtype: str) -> str:
    lines = [f"## What roundings cost in {dtype}\n", HEAD]
    for problem in PROBLEMS:
        if problem.name not in ROUNDED_PROBLEMS:
            continue
        found = rounding_errors(problem, DTYPES[dtype])
        for number, (name, values) in enumerate(found.items()):
            lines.append(row("" if number else problem.name, name, values, digits=2))
    return "\n".join(lines)


def tables(gpu: dict[str, Any] | None) -> str:
    isa = build_info()["cpu"]["isa"]
    head = (
        f"CPU kernels for {isa}, {platform.machine()}; PyTorch {torch.__version__}; batch {BATCH}, "
        f"{HEADS} query heads on {HEADS_K}, head dim 64 where no other is named."
    )
    if gpu is not None:
        head += f" GPU: {gpu['gpu']}, PyTorch {gpu['torch']}, at commit {gpu['commit']}."
    parts = [table(dtype, gpu) for dtype in DTYPES]
    parts += [table_of_roundings(dtype) for dtype in ("bfloat16", "float16")]
    return "\n\n".join([head, *parts])


def write(text: str) -> None:
    page = PAGE.read_text()
    begin, end = "<!-- error_study.py -->\n", "\n<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: begin + "\n" + text + "\n" + end, page))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--commit", default="", help="of the kernels on the GPU")
    parser.add_argument("--json", type=Path, default=GPU, help="what --device cuda writes")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        arguments.json.write_text(json.dumps(of_gpu(arguments.commit), indent=1) + "\n")
        return
    torch.set_num_threads(1)
    text = tables(json.loads(GPU.read_text()) if GPU.exists() else None)
    if arguments.write:
        write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
