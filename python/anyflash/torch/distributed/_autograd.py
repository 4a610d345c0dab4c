"""What PyTorch's autograd sees of attention over ranks: one Function a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash.torch.distributed._layout import Layout
from anyflash.torch.distributed._pieces import Pieces, Results
from anyflash.torch.distributed._problem import Given, Heads, Packed, Whole
from anyflash.torch.distributed._transport import Axis, Group, all_gather_rows, sum_of_rows


class Call(NamedTuple):
    """All but the tensors that have gradients."""

    group: Group
    layout: Layout
    method: Any
    whole: Whole
    given: Given  # without bias, sinks and slopes
    packed: Packed | None
    dtype: torch.dtype  # of the result

    def begin(self, tensors: Any) -> Any:
        """The method at work, with q, k, v, bias, sinks and slopes."""
        q, k, v, bias, sinks, slopes = tensors
        given = self.given._replace(bias=bias, sinks=sinks, alibi_slopes=slopes)
        rows = self.layout.runs(self.group.rank, self.whole.seqlen_q)
        pieces = Pieces(self.whole, given, self.packed, Heads(0, q.shape[2]), (q, rows))
        return self.method(self.group, self.layout, pieces, k, v)


class Attention(torch.autograd.Function):
    """(call, q, k, v, bias, sinks, alibi_slopes) -> (out, lse)"""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse = call.begin(tensors).forward(call.dtype)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        # Always there, since all ranks have to exchange the same.
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        needed = ctx.needs_input_grad[1:]
        grads = ctx.call.begin(tensors).backward(Results(out, lse, dout, dlse), needed[3:])
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
