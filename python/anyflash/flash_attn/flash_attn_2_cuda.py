"""flash-attn's extension module: programs import it to see that flash-attn is whole, and some call
it. The order of arguments is that of the C++ functions of version 2.8, and of what follows it."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from typing import Any

import torch

from anyflash.flash_attn._kvcache import flash_attn_with_kvcache
from anyflash.flash_attn._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

Tensor = torch.Tensor


def _into(target: Tensor | None, result: Tensor) -> Tensor:
    return result if target is None else target.copy_(result)


def _refuse_generator(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError(
            f"flash_attn_2_cuda: generator is {type(generator).__name__}; only None is allowed: "
            "dropout is drawn from PyTorch's default generator, which torch.manual_seed sets"
        )


def _gradients(given: tuple[Tensor | None, ...], of: tuple[Tensor, ...]) -> list[Tensor]:
    return [torch.empty_like(y) if x is None else x for x, y in zip(given, of, strict=True)]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
) -> list[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state]"""
    _refuse_generator(generator)
    result, *others = _flash_attn_forward(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right),
        *(softcap, alibi_slopes, return_softmax),
    )
    return [_into(out, result), *others]


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
    num_splits: int = 0,
) -> list[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state]"""
    _refuse_generator(generator)
    result, *others = _flash_attn_varlen_forward(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p),
        *(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes),
        *(return_softmax, block_table, leftpad_k, seqused_k, zero_tensors, num_splits),
    )
    return [_into(out, result), *others]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d]"""
    _refuse_generator(generator)
    gradients = _gradients((dq, dk, dv), (q, k, v))
    given: tuple[Any, ...] = (
        *(dout, q, k, v, out, softmax_lse, *gradients, dropout_p, softmax_scale, causal),
        *(window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state),
    )
    return [*gradients, _flash_attn_backward(*given)]


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d]"""
    _refuse_generator(generator)
    gradients = _gradients((dq, dk, dv), (q, k, v))
    given: tuple[Any, ...] = (
        *(dout, q, k, v, out, softmax_lse, *gradients, cu_seqlens_q, cu_seqlens_k),
        *(max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left),
        *(window_size_right, softcap, alibi_slopes, deterministic, rng_state, zero_tensors),
    )
    return [*gradients, _flash_attn_varlen_backward(*given)]


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """[out, softmax_lse]"""
    result: tuple[Any, Any] = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, block_table, softmax_scale, causal),
        *((window_size_left, window_size_right), softcap, rotary_interleaved, alibi_slopes),
        *(num_splits, True),
    )
    return [_into(out, result[0]), result[1]]
