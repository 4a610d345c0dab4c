"""What the study of errors compares with: the formula step by step, and FlashAttention's with each
of its roundings or without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import anyflash.torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BATCH, HEADS, HEADS_K = 1, 4, 2
NAMES = ("out", "dq", "dk", "dv")
LEVELS = 1 << 16  # a probability of dropout is a multiple of 1 / LEVELS
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Problem:
    name: str
    rows: int = 1024
    keys: int = 1024
    options: tuple[str, ...] = ()
    head_dim: int = 64

    def tensors(self, dtype: torch.dtype, device: str) -> tuple[Tensors, dict[str, Any]]:
        """q, k, v and dout, and anyflash's options; the same numbers on every device."""
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        lengths = (self.rows, HEADS), (self.keys, HEADS_K), (self.keys, HEADS_K), (self.rows, HEADS)
        x = [normal(BATCH, length, heads, self.head_dim) for length, heads in lengths]
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window_size": (128, 0)},
            "softcap": lambda: {"softcap": 20.0},
            "alibi": lambda: {"alibi_slopes": 2.0 ** -torch.arange(1.0, HEADS + 1, device=device)},
            "bias": lambda: {"bias": normal(1, HEADS, self.rows, self.keys)},
            "sinks": lambda: {"sinks": normal(HEADS).float()},
            "dropout": lambda: {"dropout_p": 0.125, "seed": 1},
        }
        return x, {name: y for option in self.options for name, y in made[option]().items()}


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
    Problem("dropout 1/8", options=("dropout",)),
    Problem("head dim 128", head_dim=128),
    Problem("head dim 128, causal", options=("causal",), head_dim=128),
    Problem("16384 keys", 64, 16384),
)


def scores_of(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The guide's order of a score; all in q's dtype."""
    s = q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3) / math.sqrt(q.shape[-1])
    rows, keys = s.shape[2:]
    key = torch.arange(keys, device=q.device)
    distance = torch.arange(rows, device=q.device)[:, None] + keys - rows - key
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + options["bias"].to(s.dtype)
    if "alibi_slopes" in options:
        s = s - options["alibi_slopes"].to(s.dtype)[:, None, None] * distance.abs()
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=q.device)
    if "causal" in options:
        hidden |= distance < 0
    if "window_size" in options:
        hidden |= distance > options["window_size"][0]
    return s.masked_fill(hidden, -math.inf)


def dropped(p: torch.Tensor, x: Tensors, options: dict[str, Any]) -> torch.Tensor:
    """Probabilities after dropout; which remain, anyflash says."""
    q, k, v = (
        t.detach().to(torch.float32 if t.device.type == "cpu" else torch.bfloat16) for t in x
    )
    keep = {name: options[name] for name in ("dropout_p", "seed")}
    kept = anyflash.torch.attention(q, k, v, **keep, return_dropout_mask=True).dropout_mask
    return p * kept / (1 - math.floor(options["dropout_p"] * LEVELS + 0.5) / LEVELS)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The formula, step by step in q's dtype."""
    given = [q, k, v]
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 2) for x in (k, v))
    s = scores_of(q, k, options)
    if "sinks" in options:
        sink = options["sinks"].to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        p = torch.softmax(torch.cat((s, sink), -1), -1)[..., :-1]
    else:
        p = torch.softmax(s, -1)
    if "dropout_p" in options:
        p = dropped(p, given, options)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def results(function: Callable[..., torch.Tensor], x: Tensors, options: dict[str, Any]) -> Tensors:
    """out, dq, dk and dv in float64."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = function(q, k, v, options)
    gradients = torch.autograd.grad(out, (q, k, v), x[3])
    return [t.detach().double() for t in (out, *gradients)]


def exact(x: Tensors, options: dict[str, Any]) -> Tensors:
    return results(plain, [t.double() for t in x], options)


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Absolute where the exact values are 0."""
    size = true.square().mean().sqrt().item()
    difference = (found - true).square().mean().sqrt().item()
    return difference / size if size > 1e-12 else difference


# What FlashAttention rounds to 16 bits within a call: P before the products with V and dO, dS
# before those with K and Q, and out, of which it makes delta = rowsum(dO out).
ROUNDINGS = {"P", "dS", "delta"}


def flash(x: Tensors, options: dict[str, Any], rounded: set[str]) -> Tensors:
    """FlashAttention's forward and backward in float32, with some of its roundings. Results are
    rounded in any case. Where `delta` is not, it is of exact values in float64."""
    dtype = x[0].dtype
    q, k, v, dout = (t.float().transpose(1, 2) for t in x)
    k, v = (t.repeat_interleave(HEADS // HEADS_K, 1) for t in (k, v))

    def round_to(name: str, t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype).float() if name in rounded else t

    s = scores_of(q.transpose(1, 2), k.transpose(1, 2), options)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    out = (round_to("P", p) @ v / total).to(dtype)
    if "delta" in rounded:
        delta = (dout * out.float()).sum(-1, keepdim=True)
    else:
        of_out = exact(x, options)[0].transpose(1, 2)
        delta = (dout.double() * of_out).sum(-1, keepdim=True)
    p = torch.exp(s - (top + torch.log(total)))
    ds = round_to("dS", (p * ((dout @ v.mT).to(delta.dtype) - delta)).float())
    scale = 1 / math.sqrt(q.shape[-1])
    of_group = (
        t.unflatten(1, (HEADS_K, -1)).sum(2)
        for t in (scale * ds.mT @ q, round_to("P", p).mT @ dout)
    )
    found = (out, scale * ds @ k, *of_group)
    return [t.to(dtype).double().transpose(1, 2) for t in found]
