"""How far results are from exact ones: writes the tables of the guide's page on errors.

    python python/docs/tools/error_study.py [--write]

Inputs are standard normal and rounded to the dtype; the exact results are of the same formula in
float64, with gradients by PyTorch's autograd. What is measured runs on the CPU. An error is the
root of the differences' mean square, divided by that of the exact values.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import anyflash.torch
from anyflash import build_info

PAGE = Path(__file__).resolve().parents[1] / "guide/errors.md"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BATCH, HEADS, HEADS_K, HEAD_DIM = 1, 4, 2, 64
NAMES = ("out", "dq", "dk", "dv")
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Problem:
    name: str
    rows: int = 1024
    keys: int = 1024
    options: tuple[str, ...] = ()

    def arguments(self, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        made: dict[str, Callable[[], dict[str, Any]]] = {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window_size": (128, 0)},
            "softcap": lambda: {"softcap": 20.0},
            "alibi": lambda: {"alibi_slopes": 2.0 ** -torch.arange(1.0, HEADS + 1)},
            "bias": lambda: {"bias": normal(1, HEADS, self.rows, self.keys)},
            "sinks": lambda: {"sinks": normal(HEADS).float()},
        }
        return {name: value for option in self.options for name, value in made[option]().items()}


PROBLEMS = (
    Problem("128 queries and keys", 128, 128),
    Problem("1024 queries and keys"),
    Problem("4096 keys", 256, 4096),
    Problem("causal", options=("causal",)),
    Problem("window of 128 keys, causal", options=("causal", "window")),
    Problem("softcap 20", options=("softcap",)),
    Problem("ALiBi", options=("alibi",)),
    Problem("bias", options=("bias",)),
    Problem("sinks", options=("sinks",)),
    Problem("1 key", 128, 1),
)


def scores_of(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The guide's order of a score; all in q's dtype."""
    s = q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3) / math.sqrt(HEAD_DIM)
    rows, keys = s.shape[2:]
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + options["bias"].to(s.dtype)
    if "alibi_slopes" in options:
        s = s - options["alibi_slopes"].to(s.dtype)[:, None, None] * distance.abs()
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if "causal" in options:
        hidden |= distance < 0
    if "window_size" in options:
        hidden |= distance > options["window_size"][0]
    return s.masked_fill(hidden, -math.inf)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The formula, step by step in q's dtype."""
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 2) for x in (k, v))
    s = scores_of(q, k, options)
    if "sinks" in options:
        sink = options["sinks"].to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        p = torch.softmax(torch.cat((s, sink), -1), -1)[..., :-1]
    else:
        p = torch.softmax(s, -1)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    out: torch.Tensor = anyflash.torch.attention(q, k, v, **options)
    return out


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """PyTorch's flash attention for CPUs, where it has one."""
    if options.keys() - {"causal"}:
        raise NotImplementedError
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal="causal" in options,
            enable_gqa=True,
        ).transpose(1, 2)


def results(function: Callable[..., torch.Tensor], x: Tensors, options: dict[str, Any]) -> Tensors:
    """out, dq, dk and dv in float64."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = function(q, k, v, options)
    gradients = torch.autograd.grad(out, (q, k, v), x[3])
    return [t.detach().double() for t in (out, *gradients)]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Absolute where the exact values are 0."""
    size = exact.square().mean().sqrt().item()
    difference = (found - exact).square().mean().sqrt().item()
    return difference / size if size > 1e-12 else difference


def errors(problem: Problem, dtype: torch.dtype) -> dict[str, list[float] | None]:
    generator = torch.Generator().manual_seed(1)

    def normal(length: int, heads: int) -> torch.Tensor:
        return torch.randn(BATCH, length, heads, HEAD_DIM, generator=generator).to(dtype)

    x = [normal(problem.rows, HEADS), normal(problem.keys, HEADS_K), normal(problem.keys, HEADS_K)]
    x.append(normal(problem.rows, HEADS))
    options = problem.arguments(dtype, generator)
    exact = results(plain, [t.double() for t in x], options)
    found: dict[str, list[float] | None] = {}
    for name, function in (("anyflash", ours), ("fused", fused), ("plain", plain)):
        try:
            measured = results(function, x, options)
        except (NotImplementedError, RuntimeError):
            found[name] = None
            continue
        found[name] = [error(a, b) for a, b in zip(measured, exact, strict=True)]
    return found


def table(dtype: str) -> str:
    lines = [
        f"## {dtype}\n",
        "| problem | | out | dq | dk | dv |",
        "|---|---|---|---|---|---|",
    ]
    labels = {"anyflash": "anyflash", "fused": "PyTorch, fused", "plain": "PyTorch, step by step"}
    for problem in PROBLEMS:
        for name, values in errors(problem, DTYPES[dtype]).items():
            if values is None:
                continue
            first = problem.name if name == "anyflash" else ""
            cells = " | ".join(f"{value:.1e}" if value else "0" for value in values)
            lines.append(f"| {first} | {labels[name]} | {cells} |")
    return "\n".join(lines)


def tables() -> str:
    isa = build_info()["cpu"]["isa"]
    head = (
        f"CPU kernels for {isa}, {platform.machine()}; PyTorch {torch.__version__}; batch {BATCH}, "
        f"{HEADS} query heads on {HEADS_K}, head dim {HEAD_DIM}."
    )
    return "\n\n".join([head, *(table(dtype) for dtype in DTYPES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = tables()
    if not arguments.write:
        print(text)
        return
    page = PAGE.read_text()
    begin, end = "<!-- error_study.py -->\n", "\n<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: begin + "\n" + text + "\n" + end, page))


if __name__ == "__main__":
    main()
