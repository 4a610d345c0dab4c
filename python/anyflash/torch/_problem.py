"""The arguments of one attention, in the order of the operators' schemas, and its two passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._call.backward import Backward
from anyflash._call.forward import Forward
from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    GradientRequest,
    OutputRequest,
    Packing,
    Part,
    plain_options,
)
from anyflash.torch import _fast_path
from anyflash.torch._dispatch_state import is_plain

_SIGN = 1 << 63


class Problem(NamedTuple):
    """Dense where ``cu_seqlens_q`` is None. The first six are differentiable."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    block_mask: Tensor | None
    key_ranges: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    rng_state: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    validate: bool
    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    block_m: int
    block_n: int
    dropout_p: float
    seed: int  # where there is no rng_state; as int64
    offset: int
    # Which part of a larger batch and of more heads this is, for dropout; 0 heads: all there are.
    batch_start: int
    head_start: int
    total_heads: int
    deterministic: bool


def plain(  # noqa: PLR0917 (as a Function is given them)
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, deterministic: bool
) -> Problem:
    """Dense, without other options."""
    return Problem(q, k, v, *_NO_TENSORS, scale, causal, *_NO_NUMBERS, deterministic)


_NO_TENSORS = (*(None,) * 9, 0, 0, False)  # bias ... rng_state, max_seqlen_q ... validate
_NO_NUMBERS = (-1, -1, NO_SOFTCAP, *BLOCK_SIZE, NO_DROPOUT, 0, 0, 0, 0, 0)  # window_left ...


# As torch.library spells the same.
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? block_mask, Tensor? key_ranges, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool validate, float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt block_m, SymInt block_n, float dropout_p, SymInt seed, SymInt offset, "
    "SymInt batch_start, SymInt head_start, SymInt total_heads, bool deterministic"
)
DIFFERENTIABLE = 6
SIZE = len(Problem._fields)


def differentiable(p: Problem) -> tuple[Tensor | None, ...]:
    return p.q, p.k, p.v, p.bias, p.sinks, p.alibi_slopes


class RequestedOutputs(NamedTuple):
    """What the forward gives besides its output; what it does not is an empty tensor."""

    lse: bool
    max_logits: bool
    dropout_mask: bool
    out_dtype: torch.dtype | None


OUTPUTS_SCHEMA = (
    "bool return_lse, bool return_max_logits, bool return_dropout_mask, ScalarType? out_dtype"
)


def to_int64(word: int) -> int:
    """The same 64 bits with a sign."""
    return word - (word & _SIGN) * 2


def is_packed(p: Problem) -> bool:
    return p.cu_seqlens_q is not None


def name(packed: bool) -> str:
    return "anyflash.torch.attention_varlen" if packed else "anyflash.torch.attention"


def operation(p: Problem) -> str:
    return name(is_packed(p))


def _options_of(p: Problem) -> AttentionOptions:
    if _has_no_options(p):
        return plain_options(p.softmax_scale, p.causal)
    dropout = p.dropout_p > 0
    words = (p.seed % (2 * _SIGN), p.offset % (2 * _SIGN)) if p.rng_state is None else p.rng_state
    return AttentionOptions(
        p.softmax_scale,
        p.causal,
        UNBOUNDED if p.window_left == p.window_right == -1 else (p.window_left, p.window_right),
        p.softcap,
        p.alibi_slopes,
        p.bias,
        p.block_mask,
        (p.block_m, p.block_n),
        p.key_ranges,
        p.sinks,
        p.dropout_p if dropout else NO_DROPOUT,
        None,
        words if dropout else None,
        p.seqused_k,
        _part_of(p) if dropout else None,
    )


def _part_of(p: Problem) -> Part | None:
    if p.batch_start == p.head_start == p.total_heads == 0:
        return None
    return Part(None, None, None, p.batch_start, p.head_start, p.total_heads)


def _packing_of(p: Problem) -> Packing | None:
    if not is_packed(p):
        return None
    return Packing(p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k, p.validate)


def _has_no_options(p: Problem) -> bool:
    """But for the scale and causal."""
    return (
        p.bias is p.sinks is p.alibi_slopes is p.block_mask is p.key_ranges is None
        and p.seqused_k is p.rng_state is None
        and p.dropout_p is NO_DROPOUT
        and p.softcap is NO_SOFTCAP
        and p.window_left == p.window_right == -1
    )


def _is_direct(p: Problem) -> bool:
    """Whether `_fast_path` may take it."""
    return (
        _has_no_options(p) and p.cu_seqlens_q is p.cu_seqlens_k is None and is_plain(p.q, p.k, p.v)
    )


def forward(
    p: Problem, outputs: RequestedOutputs
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, lse, max_logits, dropout_mask), None where not asked for."""
    tensors = (p.q, p.k, p.v)
    extra = outputs.max_logits or outputs.dropout_mask or outputs.out_dtype is not None
    if not extra and _is_direct(p):
        direct = _fast_path.forward(operation(p), *tensors, p.softmax_scale, p.causal, outputs.lse)
        if direct is not None:
            return (*direct, None, None) if outputs.lse else (direct, None, None, None)
    request = OutputRequest(
        outputs.lse, outputs.max_logits, outputs.dropout_mask, out_dtype=outputs.out_dtype
    )
    result: Any = Forward(operation(p), tensors, _options_of(p), _packing_of(p)).run(request)
    if isinstance(result, Tensor):
        return result, None, None, None
    if outputs.max_logits or outputs.dropout_mask:
        return result.out, result.lse, result.max_logits, result.dropout_mask
    return result[0], result[1], None, None


def _computed(x: Tensor) -> Tensor:
    return x.resolve_neg() if x.is_neg() else x


def backward(  # noqa: PLR0917 (as the schema)
    p: Problem, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, sinks and alibi_slopes; of the last three only those
    ``wanted`` (six of bool)."""
    name, tensors = f"{operation(p)} (backward)", (p.q, p.k, p.v)
    dout = torch.zeros_like(out) if dout is None else _computed(dout)
    dlse = None if dlse is None else _computed(dlse)
    if _is_direct(p) and is_plain(dout):
        direct = _fast_path.backward(
            name, dout, *tensors, out, lse, dlse, p.softmax_scale, p.causal, p.deterministic
        )
        if direct is not None:
            return (*direct, None, None, None)
    return Backward(name, tensors, _options_of(p), _packing_of(p)).run(
        dout, out, lse, dlse, GradientRequest(p.deterministic, *wanted[3:])
    )
