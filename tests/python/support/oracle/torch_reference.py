"""Attention in float64 for torch.autograd: what anyflash.attention_backward must give."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

import anyflash
from oracle.attention import Array

BLOCK = (128, 128)
DIFFERENTIABLE = ("bias", "sinks", "alibi_slopes")  # those that have a gradient


def _seen(shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Array, Array]:
    """What the masks leave, and how far key j lies behind the last one of row i."""
    batch, _, rows, columns = shape
    used = options.get("seqused_k")
    lengths = np.full(batch, columns) if used is None else used
    key = np.arange(columns)
    last = np.arange(rows)[:, None] + lengths[:, None, None, None] - rows
    distance = last - key
    left, right = (np.inf if bound in (-1, None) else bound for bound in options["window_size"])
    right = 0 if options["causal"] else right
    seen = (distance <= left) & (distance >= -right) & (key < lengths[:, None, None, None])
    mask = options.get("block_mask")
    if mask is not None:
        for axis, size in zip((-2, -1), options["block_size"], strict=True):
            mask = mask.repeat(size, axis)
        seen = seen & mask[..., :rows, :columns]
    ranges = options.get("key_ranges")
    if ranges is not None:
        ranges = ranges.repeat(shape[1] // ranges.shape[1], 1)[:, :, None]
        row = np.arange(rows)[:, None, None]
        seen = seen & ((ranges[..., 0::2] <= row) & (row < ranges[..., 1::2])).any(-1)
    bias = options.get("bias")
    if bias is not None and bias.dtype == bool:
        seen = seen & bias
    return seen, distance


def attend(torch: Any, leaves: dict[str, Any], kept: Array | None, **options: Any) -> Any:
    """out and lse. leaves: q, k, v and DIFFERENTIABLE ones in float64; kept: dropout's factors."""
    options = {"causal": False, "window_size": (-1, -1), "block_size": BLOCK} | options
    q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = options.get("softmax_scale")
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen, distance = map(torch.from_numpy, _seen(tuple(scores.shape), options))
    softcap = options.get("softcap", 0)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if "bias" in leaves:
        seen = seen & (leaves["bias"] != -np.inf)
        scores = scores + leaves["bias"]
    if "alibi_slopes" in leaves:
        scores = scores - leaves["alibi_slopes"][..., None, None] * distance.abs()
    # A row without keys has neither probabilities nor an LSE to take the derivative of.
    scores = torch.where(seen, scores, -1e300)
    top = torch.nn.functional.pad(scores.detach(), (0, 1), value=-1e300).amax(-1, keepdim=True)
    top = torch.where(top > -1e299, top, 0.0)
    weights = torch.exp(scores - top) * seen
    total = weights.sum(-1, keepdim=True)
    if "sinks" in leaves:
        total = total + torch.exp(leaves["sinks"][:, None, None] - top)
    some = total > 0
    total = torch.where(some, total, 1.0)
    p = weights / total
    if kept is not None:
        p = p * torch.from_numpy(kept)
    lse = torch.where(some, top + torch.log(total), 0.0)
    return (p @ v).transpose(1, 2), lse[..., 0]


def gradients(
    arrays: dict[str, Array],
    dout: Array,
    dlse: Array | None = None,
    kept: Array | None = None,
    **options: Any,
) -> anyflash.AttentionGrads:
    """In float64. arrays: q, k, v; options: those of anyflash.attention, but dropout's."""
    torch = importlib.import_module("torch")
    leaves = {name: x for name, x in (arrays | options).items() if isinstance(x, np.ndarray)}
    leaves = {
        name: torch.from_numpy(x.astype(np.float64)).requires_grad_()
        for name, x in leaves.items()
        if name in ("q", "k", "v", *DIFFERENTIABLE) and x.dtype != bool
    }
    out, lse = attend(torch, leaves, kept, **options)
    loss = (out * torch.from_numpy(dout.astype(np.float64))).sum()
    if dlse is not None:
        loss = loss + (lse * torch.from_numpy(dlse.astype(np.float64))).sum()
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return anyflash.AttentionGrads(
        *(
            found[name].numpy() if name in found else None
            for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes")
        )
    )
