"""Gradients, and gradients of gradients: by Functions where work is done at once, which cost less
than the operators of _ops.py and know torch.func. The operators share these formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash.torch import _problem, _recompute, _vmap
from anyflash.torch._dispatch_state import is_grad_enabled, is_mapped, is_mapped_backward, is_traced
from anyflash.torch._problem import DIFFERENTIABLE, SIZE, Problem, RequestedOutputs

Grads = tuple[Tensor | None, ...]
Context = Any  # torch's, of a Function or an operator
_vjp: Any = torch.func.vjp
NO_GRADS: Grads = (None,) * (SIZE + len(RequestedOutputs._fields))  # of the forward's arguments


def keep(ctx: Context, p: Problem, *tensors: Tensor | None) -> None:
    """Saves a problem, and tensors, for the backward."""
    ctx.set_materialize_grads(False)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in p]
    ctx.is_tensor = [isinstance(x, Tensor) for x in p]
    ctx.save_for_backward(*[x for x in p if isinstance(x, Tensor)], *tensors)


def kept(ctx: Context) -> tuple[Problem, tuple[Any, ...]]:
    """What `keep` was given."""
    saved = iter(ctx.saved_tensors)
    values = [
        next(saved) if tensor else number
        for tensor, number in zip(ctx.is_tensor, ctx.numbers, strict=True)
    ]
    return Problem(*values), tuple(saved)


def apply(function: Any, *arguments: Any) -> Any:
    """A Function's apply, which has no type."""
    return function.apply(*arguments)


def forward(p: Problem, outputs: RequestedOutputs) -> tuple[Tensor | None, ...]:
    if is_traced(p.q):
        results: tuple[Tensor, ...] = torch.ops.anyflash.forward(*p, *outputs)
        return results
    return _problem.forward(p, outputs)


def backward(p: Problem, *arguments: Any) -> Grads:
    if is_traced(p.q):
        results: Grads = torch.ops.anyflash.backward(*p, *arguments)
        return results
    return _problem.backward(p, *arguments)


class Attention(torch.autograd.Function):
    """(six tensors or None, the other fields of a Problem, RequestedOutputs with the LSE) -> what
    `forward` gives.

    Few arguments and no setup_context: a call of `TransformedAttention` costs 60 us more.
    """

    @staticmethod
    def forward(ctx: Context, *arguments: Any) -> tuple[Tensor | None, ...]:
        *tensors, ctx.others, outputs = arguments
        results = forward(Problem(*tensors, *ctx.others), outputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results[:2])
        ctx.mark_non_differentiable(*[x for x in results[2:] if x is not None])
        return results

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> Grads:
        *tensors, out, lse = ctx.saved_tensors
        p = Problem(*tensors, *ctx.others)
        return (*gradients_of(ctx, p, out, lse, grads), None, None)


class TransformedAttention(torch.autograd.Function):
    """The same within torch.func: (*Problem, *RequestedOutputs with the LSE)."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return forward(Problem(*arguments[:SIZE]), RequestedOutputs(*arguments[SIZE:]))

    @staticmethod
    def setup_context(ctx: Context, inputs: Any, output: Any) -> None:
        keep_forward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> Grads:
        p, (out, lse) = kept(ctx)
        return (*gradients_of(ctx, p, out, lse, grads), *NO_GRADS[DIFFERENTIABLE:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        return _vmap.rule(TransformedAttention.apply)(info, in_dims, *arguments)


def gradients_of(ctx: Context, p: Problem, out: Any, lse: Any, grads: Grads) -> Grads:
    """Of the six differentiable tensors; with create_graph=True by a Function that can itself be
    differentiated."""
    dout, dlse = grads[:2]
    if dout is None and dlse is None:
        return NO_GRADS[:DIFFERENTIABLE]
    wanted = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    if is_mapped_backward() and (is_mapped(dout) or is_mapped(dlse)):
        function = Gradient.apply if is_grad_enabled() else _backward_of_fields
        found = _vmap.apply_mapped(function, *p, out, lse, dout, dlse, wanted)
    elif is_grad_enabled():
        found = apply(Gradient, *p, out, lse, dout, dlse, wanted)
    else:
        found = backward(p, out, lse, dout, dlse, wanted)
    return tuple(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True))


def _backward_of_fields(*arguments: Any) -> Grads:
    return backward(Problem(*arguments[:SIZE]), *arguments[SIZE:])


class Gradient(torch.autograd.Function):
    """(*Problem, out, lse, dout, dlse, six of bool) -> six gradients, themselves differentiable in
    the problem's tensors, dout and dlse.

    out and lse count as functions of the others: nothing flows through them.
    """

    @staticmethod
    def forward(*arguments: Any) -> Grads:
        p = Problem(*arguments[:SIZE])
        _out, _lse, dout, dlse, wanted = arguments[SIZE:]
        if p.q.dtype != torch.float64:
            return backward(p, *arguments[SIZE:])
        # The LSE, which is float32, would limit the digits.
        found = iter(_gradients(p, dout, dlse, wanted))
        return tuple(next(found) if is_wanted else None for is_wanted in wanted)

    @staticmethod
    def setup_context(ctx: Context, inputs: Any, output: Any) -> None:
        keep_backward(ctx, inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> Grads:
        return backward_of_backward(ctx, grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        return _vmap.rule(Gradient.apply)(info, in_dims, *arguments)


# -- the formulas of both


def keep_forward(ctx: Context, inputs: Any, output: Any) -> None:
    out, lse, *others = output
    keep(ctx, Problem(*inputs[:SIZE]), out, lse)
    ctx.mark_non_differentiable(*[x for x in others if x is not None])


def keep_backward(ctx: Context, inputs: Any) -> None:
    *_, dout, dlse, ctx.wanted = inputs
    keep(ctx, Problem(*inputs[:SIZE]), dout, dlse)


def backward_of_backward(ctx: Context, grads: Grads) -> Grads:
    """Recomputes attention in plain PyTorch, with the matrix of scores, and differentiates that
    twice: memory is quadratic in the sequence lengths."""
    p, (dout, dlse) = kept(ctx)
    at = SIZE + 2  # behind out and lse
    needs = (*ctx.needs_input_grad[:DIFFERENTIABLE], *ctx.needs_input_grad[at : at + 2])
    given = [
        x if is_wanted else None
        for x, is_wanted in zip(grads, (True, True, True, *ctx.wanted[3:]), strict=True)
    ]
    results: list[Tensor | None] = [None] * (SIZE + 5)
    if all(x is None for x in given):
        return tuple(results)
    found = iter(_second_gradients(p, dout, dlse, given, needs))
    for i, need in zip((*range(DIFFERENTIABLE), at, at + 1), needs, strict=True):
        if need:
            results[i] = next(found)
    return tuple(results)


def _gradients(p: Problem, dout: Any, dlse: Any, wanted: Any) -> tuple[Tensor, ...]:
    """The gradients of those of a problem's first six that are wanted, as functions of its tensors,
    dout and dlse."""
    dropout_mask = None
    if p.dropout_p > 0:
        with torch.no_grad():
            dropout_mask = apply(
                TransformedAttention, *p, *RequestedOutputs(True, False, True, None)
            )[3]
    given: list[tuple[int, Any]] = [(0, dout), (1, dlse)]
    at = [i for i, is_wanted in enumerate(wanted) if is_wanted]

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = _recompute.attention(Problem(*_replaced(p, at, tensors)), dropout_mask)
        return tuple(results[i] for i, g in given if g is not None)

    values, pullback = _vjp(outputs, *[p[i] for i in at])
    grads = [g for _, g in given if g is not None]
    found: tuple[Tensor, ...] = pullback(
        tuple(g.to(x.dtype) for x, g in zip(values, grads, strict=True))
    )
    return found


def _replaced(fields: tuple[Any, ...], at: list[int], tensors: tuple[Any, ...]) -> list[Any]:
    result = list(fields)
    for i, x in zip(at, tensors, strict=True):
        result[i] = x
    return result


def _second_gradients(
    p: Problem, dout: Any, dlse: Any, grads: Any, needs: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """Gradients of those of a problem's first six, dout and dlse that ``needs`` names, given those
    of its six gradients."""
    fields = (*p, dout, dlse)
    at = [
        i for i, need in zip((*range(DIFFERENTIABLE), SIZE, SIZE + 1), needs, strict=True) if need
    ]
    wanted = [g is not None for g in grads]

    def first(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed = _replaced(fields, at, tensors)
        return _gradients(Problem(*changed[:SIZE]), changed[SIZE], changed[SIZE + 1], wanted)

    with torch.autocast(p.q.device.type, enabled=False):  # also of what the pullback computes
        _, pullback = _vjp(first, *[fields[i] for i in at])
        found: tuple[Tensor, ...] = pullback(tuple(g for g in grads if g is not None))
    return found
