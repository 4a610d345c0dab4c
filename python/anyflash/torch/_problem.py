"""The arguments of one attention, in the order of the operators' schemas, and its two passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._backward import Backward
from anyflash._forward import Forward
from anyflash._options import NO_DROPOUT, NO_SOFTCAP, UNBOUNDED
from anyflash.torch import _direct
from anyflash.torch._watched import is_plain

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
    deterministic: bool


# As torch.library spells the same.
SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? block_mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, bool validate, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "SymInt block_m, SymInt block_n, float dropout_p, SymInt seed, SymInt offset, "
    "bool deterministic"
)
DIFFERENTIABLE = 6
SIZE = len(Problem._fields)


def differentiable(p: Problem) -> tuple[Tensor | None, ...]:
    return p.q, p.k, p.v, p.bias, p.sinks, p.alibi_slopes


class Asked(NamedTuple):
    """What the forward gives besides its output; what it does not is an empty tensor."""

    lse: bool
    max_logits: bool
    dropout_mask: bool
    out_dtype: torch.dtype | None


ASKED_SCHEMA = (
    "bool return_lse, bool return_max_logits, bool return_dropout_mask, ScalarType? out_dtype"
)


def to_int64(word: int) -> int:
    """The same 64 bits with a sign."""
    return word - (word & _SIGN) * 2


def is_packed(p: Problem) -> bool:
    return p.cu_seqlens_q is not None


def operation(p: Problem) -> str:
    return "anyflash.torch.attention_varlen" if is_packed(p) else "anyflash.torch.attention"


def _given(call: Forward | Backward, p: Problem) -> None:
    if is_packed(p):
        call.pack(p.cu_seqlens_q, p.cu_seqlens_k, p.max_seqlen_q, p.max_seqlen_k, p.validate)
    window = (p.window_left, p.window_right)
    call.score(
        window_size=UNBOUNDED if window == UNBOUNDED else window,
        softcap=p.softcap,
        alibi_slopes=p.alibi_slopes,
        bias=p.bias,
        block_mask=p.block_mask,
        block_size=(p.block_m, p.block_n),
        sinks=p.sinks,
        seqused_k=p.seqused_k,
    )
    if p.dropout_p > 0:
        words = (p.seed % (2 * _SIGN), p.offset % (2 * _SIGN))
        call.dropout(p.dropout_p, None, words if p.rng_state is None else p.rng_state)


def _has_no_options(p: Problem, asked: Asked) -> bool:
    """But for the scale and causal."""
    return (
        p.bias is p.sinks is p.alibi_slopes is p.block_mask is p.seqused_k is p.rng_state is None
        and p.cu_seqlens_q is p.cu_seqlens_k is None
        and asked.out_dtype is None
        and p.dropout_p is NO_DROPOUT
        and p.softcap is NO_SOFTCAP
        and p.window_left == p.window_right == -1
        and not (asked.max_logits or asked.dropout_mask)
    )


def forward(p: Problem, asked: Asked) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, lse, max_logits, dropout_mask), None where not asked for."""
    if _has_no_options(p, asked) and is_plain(p.q, p.k, p.v):
        tensors = (p.q, p.k, p.v, None)
        direct = _direct.forward(
            operation(p), *tensors, p.softmax_scale, p.causal, UNBOUNDED, asked.lse
        )
        if direct is not None:
            return (*direct, None, None) if asked.lse else (direct, None, None, None)
    call = Forward(operation(p), p.q, p.k, p.v, 3 if is_packed(p) else 4)
    _given(call, p)
    result = call.run(
        softmax_scale=p.softmax_scale,
        causal=p.causal,
        return_lse=asked.lse,
        return_max_logits=asked.max_logits,
        return_dropout_mask=asked.dropout_mask,
        return_result=False,
        out=None,
        out_dtype=asked.out_dtype,
        stream=None,
    )
    if isinstance(result, Tensor):
        return result, None, None, None
    if asked.max_logits or asked.dropout_mask:
        return result.out, result.lse, result.max_logits, result.dropout_mask
    return result[0], result[1], None, None


def backward(  # noqa: PLR0917 (as the schema)
    p: Problem, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, sinks and alibi_slopes; of the last three only those
    ``wanted`` (six of bool)."""
    call = Backward(f"{operation(p)} (backward)", p.q, p.k, p.v, 3 if is_packed(p) else 4)
    _given(call, p)
    return tuple(
        call.run(
            dout=torch.zeros_like(out) if dout is None else dout.resolve_neg(),
            out=out,
            lse=lse,
            softmax_scale=p.softmax_scale,
            causal=p.causal,
            dlse=None if dlse is None else dlse.resolve_neg(),
            deterministic=p.deterministic,
            return_dbias=wanted[3],
            return_dsinks=wanted[4],
            return_dalibi_slopes=wanted[5],
            dq=None,
            dk=None,
            dv=None,
            grad_dtype=None,
            stream=None,
        )
    )
