"""Attention of PyTorch's tensors: its arguments are read, then it runs where autograd and
torch.compile see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anyflash._call import parsing
from anyflash._call.options import (
    BLOCK_SIZE,
    UNBOUNDED,
    AttentionOptions,
    OutputRequest,
    Packing,
)
from anyflash._call.results import AttentionResult, Returned
from anyflash.torch import _problem
from anyflash.torch._autograd import Attention, TransformedAttention, apply
from anyflash.torch._dispatch_state import (
    autocast_dtype,
    is_any_autocast_enabled,
    is_compiling,
    is_deterministic,
    is_in_functorch,
    is_recorded,
    is_traced,
)
from anyflash.torch._problem import DIFFERENTIABLE, Problem, RequestedOutputs, differentiable
from anyflash.torch._random import RandomState, random_state
from anyflash.torch._sharding import WHOLE, is_distributed, part_of, register_rules

_DENSE = Packing(None, None, 0, 0, False)
_FLAGS = ("validate", "causal", "deterministic")
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    packing: Packing | None,
    outputs: OutputRequest,
    deterministic: Any = None,
) -> Returned[Tensor]:
    operation = _problem.name(packing is not None)
    check_tensor(operation, tensors[0])
    check_no_nested(operation, q=tensors[0], k=tensors[1], v=tensors[2])
    tensors = autocast(tensors)
    p, random = _read(operation, tensors, options, packing or _DENSE, deterministic)
    return_lse, return_max_logits, return_dropout_mask, return_result = parsing.flag_values(
        operation, OutputRequest._fields[:4], outputs[:4]
    )
    whole = return_result or return_max_logits or return_dropout_mask
    requested = RequestedOutputs(
        return_lse or whole,
        return_max_logits,
        return_dropout_mask,
        as_dtype(outputs.out_dtype),
    )
    out: Tensor
    lse: Tensor
    out, lse, max_logits, dropout_mask = _run(p, requested)
    if whole:
        return AttentionResult(
            out,
            lse,
            max_logits if return_max_logits else None,
            random.returned if p.dropout_p > 0 else None,
            dropout_mask if return_dropout_mask else None,
        )
    return (out, lse) if return_lse else out


def _read(
    operation: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    packing: Packing,
    deterministic: Any,
) -> tuple[Problem, RandomState]:
    parse: Callable[..., Any] = partial(parsing.named, operation)
    window, block_size, dropout_p = options.window_size, options.block_size, options.dropout_p
    if is_compiling():  # bounds may be symbols; the operator looks at numbers
        left, right = (-1 if bound is None else bound for bound in window)
    elif window is UNBOUNDED:
        left, right = UNBOUNDED
    else:
        left, right = parse("window_size", parsing.window, window)
    if options.block_mask is not None or block_size is not BLOCK_SIZE:
        block_size = parse("block_size", parsing.block_size, block_size)
    random = RandomState()
    if type(dropout_p) is not float:  # an array cannot be compared
        dropout_p = parse("dropout_p", parsing.probability, dropout_p)
    if dropout_p != 0 or options.seed is not None or options.rng_state is not None:
        dropout_p = parse("dropout_p", parsing.probability, dropout_p)
        if options.seed is not None and options.rng_state is not None:
            raise ValueError(
                f"{operation}: seed and rng_state are both given; one of them is allowed"
            )
        device = tensors[0].device
        random = random_state(parse, dropout_p > 0, options.seed, options.rng_state, device)
        if random.tensor is not options.rng_state and is_distributed(tensors[0]):
            raise ValueError(
                f"{operation}: dropout_p is {dropout_p} and q is a DTensor, but no seed is given; "
                "ranks would draw different ones. Pass seed, the same on every rank"
            )
    if deterministic is None:
        deterministic = is_deterministic()
    flags = packing.validate, options.causal, deterministic
    validate, causal, deterministic = parsing.flag_values(operation, _FLAGS, flags)
    drops_sharded = dropout_p != 0 and is_distributed(tensors[0])
    p = Problem(
        *tensors,
        options.bias,
        options.sinks,
        options.alibi_slopes,
        options.block_mask,
        options.key_ranges,
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        options.seqused_k,
        random.tensor,
        packing.max_seqlen_q,
        packing.max_seqlen_k,
        validate,
        options.softmax_scale,
        causal,
        left,
        right,
        options.softcap,
        block_size[0],
        block_size[1],
        dropout_p,
        _problem.to_int64(random.words[0]),
        _problem.to_int64(random.words[1]),
        *(part_of(tensors[0]) if drops_sharded else WHOLE),
        deterministic,
    )
    return p, random


def check_tensor(operation: str, q: Any) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"{operation}: q is {type(q).__name__}; a torch.Tensor is allowed")


def check_no_nested(operation: str, **tensors: Any) -> None:
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.is_nested:
            raise TypeError(
                f"{operation}: {name} is a nested tensor; use anyflash.torch.attention_varlen, "
                "with its sequences packed"
            )


def as_dtype(dtype: Any) -> Any:
    """A dtype that may be given by its name."""
    return getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype


def autocast(tensors: tuple[Tensor, ...]) -> Any:
    """q, k and v as ``torch.autocast`` wants them."""
    if not is_compiling() and not is_any_autocast_enabled():
        return tensors  # the question that costs least
    device = tensors[0].device.type
    dtype = autocast_dtype(device) if device in ("cpu", "cuda") else None
    if dtype is None:
        return tensors
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in _AUTOCAST else x for x in tensors
    )


def _with_lse(outputs: RequestedOutputs) -> RequestedOutputs:
    # Not _replace, which torch.compile of 2.4 cannot follow.
    return RequestedOutputs(True, *outputs[1:])


def _run(p: Problem, outputs: RequestedOutputs) -> Any:
    in_functorch = not is_compiling() and is_in_functorch()
    if is_traced(p.q) and not in_functorch:
        register_rules()
        # With the LSE, which the gradients need.
        return torch.ops.anyflash.forward(*p, *_with_lse(outputs))
    # A Function refuses dual tensors of forward mode.
    if in_functorch or is_recorded(*differentiable(p)):
        outputs = _with_lse(outputs)
        if in_functorch:
            return apply(TransformedAttention, *p, *outputs)
        return apply(Attention, *differentiable(p), p[DIFFERENTIABLE:], outputs)
    return _problem.forward(p, outputs)
