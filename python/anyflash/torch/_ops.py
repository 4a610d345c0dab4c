"""torch.ops.anyflash: what torch.compile, torch.export and torch.func see of attention.

The operators' fake kernels, gradients and batching rules are here; what they compute is in
_problem.py. An output that was not asked for is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflash.torch import _autograd, _flops, _problem, _vmap
from anyflash.torch._autograd import Grads
from anyflash.torch._fake_checks import check_forward, check_ranks
from anyflash.torch._problem import (
    DIFFERENTIABLE,
    OUTPUTS_SCHEMA,
    SCHEMA,
    SIZE,
    Problem,
    RequestedOutputs,
    differentiable,
)

RESULTS = ("out", "lse", "max_logits", "dropout_mask")

library: Any = torch.library.Library("anyflash", "DEF")  # type: ignore[no-untyped-call]


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator of CPU and CUDA tensors."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        library.impl(name, kernel, device)
    torch.library.register_fake(f"anyflash::{name}", fake, lib=library)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


# -- forward


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    p = Problem(*arguments[:SIZE])
    return tuple(or_empty(x, p.q) for x in _problem.forward(p, RequestedOutputs(*arguments[SIZE:])))


def lse_shape(q: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def _sizes(p: Problem) -> tuple[int, int, int]:
    """batch, seqlen_q, seqlen_k; of packed sequences the largest ones."""
    if p.cu_seqlens_q is not None:
        return p.cu_seqlens_q.shape[0] - 1, p.max_seqlen_q, p.max_seqlen_k
    return p.q.shape[0], p.q.shape[1], p.k.shape[1]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    p, outputs = Problem(*arguments[:SIZE]), RequestedOutputs(*arguments[SIZE:])
    check_ranks(p)
    batch, *lengths = _sizes(p)
    heads = p.q.shape[-2]

    def empty(given: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return p.q.new_empty(shape, dtype=dtype) if given else p.q.new_empty(0)

    whole = outputs.max_logits or outputs.dropout_mask
    results = (
        p.q.new_empty((*p.q.shape[:-1], p.v.shape[-1]), dtype=outputs.out_dtype),
        empty(outputs.lse or whole, lse_shape(p.q), torch.float32),
        empty(outputs.max_logits, (batch, heads), torch.float32),
        empty(outputs.dropout_mask, (batch, heads, *lengths), torch.bool),
    )
    asked = (True, outputs.lse or whole, outputs.max_logits, outputs.dropout_mask)
    named = zip(RESULTS, results, asked, strict=True)
    check_forward(p, {name: x for name, x, is_asked in named if is_asked})
    return results


def _forward_backward(ctx: Any, *grads: Tensor | None) -> Grads:
    p, (out, lse) = _autograd.kept(ctx)
    dout, dlse = grads[:2]
    wanted = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    if dout is None and dlse is None:
        return _autograd.NO_GRADS
    found = torch.ops.anyflash.backward(*p, out, lse, dout, dlse, wanted)
    first = [x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)]
    return (*first, *_autograd.NO_GRADS[DIFFERENTIABLE:])


define(
    "forward",
    f"({SCHEMA}, {OUTPUTS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
torch.library.register_autograd(
    "anyflash::forward", _forward_backward, setup_context=_autograd.keep_forward, lib=library
)


# -- backward


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    p = Problem(*arguments[:SIZE])
    return tuple(or_empty(x, p.q) for x in _problem.backward(p, *arguments[SIZE:]))


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    p, needed = Problem(*arguments[:SIZE]), arguments[-1]
    given = (True, True, True, *needed[3:])
    return tuple(
        p.q.new_empty(x.shape, dtype=x.dtype) if x is not None and need else p.q.new_empty(0)
        for x, need in zip(differentiable(p), given, strict=True)
    )


def _keep_backward(ctx: Any, inputs: Any, output: Any) -> None:
    _autograd.keep_backward(ctx, inputs)


def _backward_backward(ctx: Any, *grads: Tensor | None) -> Grads:
    return _autograd.backward_of_backward(ctx, grads)


define(
    "backward",
    f"({SCHEMA}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd(
    "anyflash::backward", _backward_backward, setup_context=_keep_backward, lib=library
)
_flops.register()

if hasattr(torch.library, "register_vmap"):  # from torch 2.5 on
    for _name in ("forward", "backward"):
        _rule = _vmap.rule(getattr(torch.ops.anyflash, _name))
        torch.library.register_vmap(f"anyflash::{_name}", _rule, lib=library)
