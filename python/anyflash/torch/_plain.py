"""Attention without options, of tensors that nobody but autograd looks at: the fewest steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash import _core
from anyflash.torch import _fast_path, _problem
from anyflash.torch._autograd import Context, Grads, apply, gradients_of
from anyflash.torch._dispatch_state import is_deterministic, is_only_recorded, is_plain_eager
from anyflash.torch._problem import RequestedOutputs

_forward = _core.forward_direct
_NAME = _problem.name(packed=False)
_LSE = RequestedOutputs(True, False, False, None)


def attend(  # noqa: PLR0917 (its callers count time)
    operation: str,
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    causal: Any,
    return_lse: Any,
    deterministic: bool | None = None,
) -> Any:
    """What :func:`attention` returns without other options; None where q, k and v are traced, cast
    or not direct tensors."""
    if is_plain_eager(q, k, v):  # _fast_path.forward, without its step
        try:
            return _forward(
                operation, q, k, v, scale, causal, None, return_lse, False, _fast_path.PYTORCH
            )
        except RuntimeError:
            if q.is_nested or k.is_nested or v.is_nested:  # which others refuse in a sentence
                return None
            raise
    if isinstance(q, Tensor) and isinstance(return_lse, bool) and is_only_recorded(q, k, v):
        if deterministic is None:
            deterministic = is_deterministic()
        results = apply(PlainAttention, q, k, v, scale, causal, deterministic)
        return results if return_lse is True else results[0]
    return None


class PlainAttention(torch.autograd.Function):
    """(q, k, v, softmax_scale, causal, deterministic) -> (out, lse).

    What `_autograd.Attention` does, in half the time: most of a small call is the reading of
    arguments, here 6 instead of 30.
    """

    @staticmethod
    def forward(ctx: Context, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, scale, causal, _ = arguments
        results = _fast_path.forward(_NAME, q, k, v, scale, causal, True)
        if results is None:
            results = _problem.forward(_problem.plain(*arguments), _LSE)
        out, lse = results[:2]
        ctx.numbers = arguments[3:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> Grads:
        q, k, v, out, lse = ctx.saved_tensors
        # Six gradients, as a problem has; the last three are None, of numbers here.
        return gradients_of(ctx, _problem.plain(q, k, v, *ctx.numbers), out, lse, grads)
