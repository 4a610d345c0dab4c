"""What PyTorch's autograd sees of attention over ranks: one Function a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._call.options import Part
from anyflash.torch.distributed._layout import Layout
from anyflash.torch.distributed._pieces import Pieces, Results
from anyflash.torch.distributed._problem import Given, Packed, Whole
from anyflash.torch.distributed._transport import (
    Axis,
    Group,
    all_gather_rows,
    largest_of_ranks,
    sum_of_rows,
)


class Call(NamedTuple):
    """All but the tensors that have gradients."""

    group: Group
    layout: Layout
    method: Any
    whole: Whole
    given: Given  # without bias, sinks and slopes
    packed: Packed | None
    dtype: torch.dtype  # of the result
    part: Part = Part()  # which batch entries and heads
    return_max_logits: bool = False

    def begin(self, tensors: Any, max_logits: Tensor | None = None, doing: str = "") -> Any:
        """The method at work, with q, k, v, bias, sinks and slopes. The forward writes what this
        rank sees of ``max_logits``."""
        q, k, v, bias, sinks, slopes = tensors
        given = self.given._replace(bias=bias, sinks=sinks, alibi_slopes=slopes)
        rows = self.layout.runs(self.group.rank, self.whole.seqlen_q)
        pieces = Pieces(self.whole, given, self.packed, self.part, (q, rows))
        pieces.max_logits = max_logits
        return self.method(self.group._replace(doing=doing), self.layout, pieces, k, v)

    def new_max_logits(self, q: Tensor) -> Tensor | None:
        """Where they are wanted: (batch, heads) of no key yet."""
        if not self.return_max_logits:
            return None
        batch = q.shape[0] if self.packed is None else len(self.packed.cu_seqlens_q) - 1
        return q.new_full((batch, q.shape[2]), -torch.inf, dtype=torch.float32)


class Attention(torch.autograd.Function):
    """(call, q, k, v, bias, sinks, alibi_slopes) -> (out, lse, max_logits or None)"""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        maxima = call.new_max_logits(tensors[0])
        out, lse = call.begin(tensors, maxima).forward(call.dtype)
        if maxima is not None:
            largest_of_ranks(call.group, "joining max_logits", maxima)
            ctx.mark_non_differentiable(maxima)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse, maxima

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        # Always there, since all ranks have to exchange the same.
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        needed = ctx.needs_input_grad[1:]
        method = ctx.call.begin(tensors, doing="backward: ")
        grads = method.backward(Results(out, lse, dout, dlse), needed[3:])
        return None, *[
            grad.to(x.dtype) if is_needed and grad is not None else None
            for grad, x, is_needed in zip(grads, tensors, needed, strict=True)
        ]


class Unshard(torch.autograd.Function):
    """(rows, group, axis) -> the whole"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, axis: Axis) -> Tensor:
        ctx.group, ctx.axis = group, axis
        return all_gather_rows(group, "gathering rows", axis, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return sum_of_rows(ctx.group, "summing gradients of rows", ctx.axis, grads[0]), None, None
