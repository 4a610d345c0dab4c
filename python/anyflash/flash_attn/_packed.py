"""Packed q, k, v or k, v, whose gradient is written as one tensor: nothing is concatenated."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from typing import Any, cast

import torch

from anyflash.flash_attn._options import check_tensors, optional
from anyflash.flash_attn._private import attend, backward
from anyflash.torch._dispatch_state import (
    autocast_dtype,
    is_grad_enabled,
    is_mapped_backward,
    is_traced,
)

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_AXIS = -3  # of (..., 3 or 2, heads, head_dim)


def attend_packed(
    q: torch.Tensor | None,
    packed: torch.Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    deterministic: bool,
    return_softmax: bool,
) -> Three:
    """packed: q, k, v; or k, v where q is given. (out, softmax_lse, S_dmask)"""
    slopes = options["alibi_slopes"]
    given = {"qkv": packed} if q is None else {"q": q, "kv": packed}
    check_tensors("anyflash.flash_attn", **given | optional(alibi_slopes=slopes))
    device = packed.device.type
    arguments = (q, packed, packing, options, dropout_p, deterministic, return_softmax)
    parts = 3 if q is None else 2
    if packed.ndim < 3 or packed.shape[_AXIS] != parts:
        name, axes = ("qkv", "3, heads") if q is None else ("kv", "2, heads_k")
        raise ValueError(
            f"anyflash.flash_attn: {name} has shape {tuple(packed.shape)}; expected "
            f"({'total' if packing else 'batch, seqlen'}, {axes}, head_dim)"
        )
    if (
        not is_grad_enabled()
        or not (packed.requires_grad or (q is not None and q.requires_grad))
        or (slopes is not None and slopes.requires_grad)
        or is_traced(packed)
        or autocast_dtype(device) is not None
    ):
        return _by_parts(*arguments)[:3]
    results: Any = _Packed.apply(*arguments)  # type: ignore[no-untyped-call]
    return cast(Three, results)


def attend_kv(q: torch.Tensor, kv: torch.Tensor, *others: Any) -> Three:
    """attend_packed, for which no q would mean that kv is qkv."""
    check_tensors("anyflash.flash_attn", q=q)
    return attend_packed(q, kv, *others)


def _tensors(q: torch.Tensor | None, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = packed.unbind(_AXIS)
    return parts if q is None else (q, *parts)


def _by_parts(
    q: torch.Tensor | None,
    packed: torch.Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    deterministic: bool,
    return_softmax: bool,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """torch's autograd stacks the gradients."""
    given: tuple[Any, ...] = (*_tensors(q, packed), packing, options, dropout_p, return_softmax)
    return attend(*given, deterministic=deterministic or None, rng_state=rng_state)


class _Packed(torch.autograd.Function):
    """(*arguments of attend_packed) -> (out, softmax_lse, S_dmask)"""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor | None, packed: torch.Tensor, *others: Any) -> Any:
        packing, options, dropout_p, deterministic, _ = others
        out, lse, mask, rng_state = _by_parts(q, packed, *others)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(q, packed, out, lse, rng_state, *packing[:2])
        ctx.max_seqlens = packing[2:]
        ctx.numbers = options, dropout_p, deterministic
        return out, lse, mask

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dout, dlse, _ = grads
        q, packed, out, lse, rng_state, *cu_seqlens = ctx.saved_tensors
        options, dropout_p, deterministic = ctx.numbers
        packing = (*cu_seqlens, *ctx.max_seqlens)
        nothing = (None,) * 5
        again_differentiable = is_grad_enabled()  # create_graph=True
        if again_differentiable or is_mapped_backward():  # autograd maps what knows how
            numbers = (options, dropout_p, deterministic, False, rng_state)
            with torch.enable_grad():
                again = _by_parts(q, packed, packing, *numbers)
            pairs = [(y, g) for y, g in zip(again[:2], (dout, dlse), strict=True) if g is not None]
            needed = ctx.needs_input_grad[:2]
            inputs = [x for x, need in zip((q, packed), needed, strict=True) if need]
            outputs, known = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, inputs, known, create_graph=again_differentiable)
            found = iter(grads)
            return *[next(found) if need else None for need in needed], *nothing

        dpacked = torch.empty_like(packed)
        gradients = _tensors(None if q is None else torch.empty_like(q), dpacked)
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        tensors = (dout, *_tensors(q, packed), out, lse)
        backward(tensors, gradients, packing, options, dropout_p, rng_state, deterministic, dlse)
        return None if q is None else gradients[0], dpacked, *nothing
