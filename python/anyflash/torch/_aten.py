"""PyTorch's own operators of flash attention, computed by anyflash.

Each function has the arguments and results of the operator in ``torch.ops.aten`` that it stands
for; `OVERRIDES` names them. They run below autograd, on tensors of any device that anyflash serves.
"""

# ruff: noqa: PLR0917 (the operators' orders of arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflash.torch._aten_calls import (
    Gradients,
    as_drawn,
    attend,
    check,
    check_scales,
    flash_forward,
    gradients,
    options_of,
    out_like,
    packing_of,
    random_state,
    refuse,
    unused_results,
)

FlashForward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
SdpaForward = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> FlashForward:
    """``aten::_flash_attention_forward``: (output, LSE, random state, unused, empty).

    Dense tensors are (batch, seqlen, heads, head_dim); with ``cum_seq_q`` they are packed,
    (total, heads, head_dim). With ``block_table`` key and value are pages. Packed keys are never
    split, whatever ``num_splits`` says.
    """
    name, tensors = "_flash_attention_forward", (query, key, value)
    check(
        *(name, tensors, return_debug_mask),
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    state = random_state(query, dropout_p)
    window = (window_size_left, window_size_right)
    drawn = state.view(torch.int64)
    options = options_of(scale, is_causal, window, dropout_p, drawn, alibi_slopes, seqused_k)
    out = out_like(query, value)
    cum_seqs, maxima = (cum_seq_q, cum_seq_k), (max_q, max_k)
    lse = flash_forward(name, tensors, cum_seqs, maxima, options, block_table, num_splits, out)
    return out, lse, state, *unused_results(query)


def flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: writes ``out``, returns the LSE."""
    name, tensors = "_flash_attention_forward_no_dropout_inplace", (query, key, value)
    if dropout_p:
        refuse(name, "dropout_p", dropout_p, "only 0 is allowed")
    check(name, tensors, return_debug_mask)
    window = (window_size_left, window_size_right)
    options = options_of(scale, is_causal, window, 0.0, None, alibi_slopes, seqused_k)
    cum_seqs, maxima = (cum_seq_q, cum_seq_k), (max_q, max_k)
    return flash_forward(name, tensors, cum_seqs, maxima, options, block_table, num_splits, out)


def flash_attention_forward_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> FlashForward:
    """``aten::_flash_attention_forward.quantized``, of tensors that are not quantized."""
    check_scales("_flash_attention_forward.quantized", q_descale, k_descale, v_descale)
    return flash_attention_forward(
        *(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k),
        *(dropout_p, is_causal, return_debug_mask),
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
    )


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> SdpaForward:
    """``aten::_scaled_dot_product_flash_attention``, of (batch, heads, seqlen, head_dim).

    Returns (output, LSE, None, None, seqlen_q, seqlen_k, random state, unused, empty).
    """
    name, tensors = "_scaled_dot_product_flash_attention", (query, key, value)
    check(name, tensors, return_debug_mask)
    state = random_state(query, dropout_p)
    options = options_of(scale, is_causal, (None, None), dropout_p, state.view(torch.int64))
    out = out_like(query, value)
    with torch.no_grad():
        q, k, v, target = (x.transpose(1, 2) for x in (*tensors, out))
        lse = attend(name, (q, k, v), None, options, target)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, state, *unused_results(query)


def scaled_dot_product_flash_attention_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> SdpaForward:
    """``aten::_scaled_dot_product_flash_attention.quantized``, of tensors that are not."""
    name = "_scaled_dot_product_flash_attention.quantized"
    check_scales(name, q_descale, k_descale, v_descale)
    return scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
    )


# -- the backward


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """``aten::_flash_attention_backward``: the gradients of query, key and value."""
    name = "_flash_attention_backward"
    window = (window_size_left, window_size_right)
    options = options_of(scale, is_causal, window, dropout_p, as_drawn(rng_state, dropout_p))
    packing = packing_of(name, cum_seq_q, cum_seq_k, max_q, max_k)
    results = grad_out, out, logsumexp
    return gradients(name, (query, key, value), packing, options, results, False)


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    """``aten::_scaled_dot_product_flash_attention_backward``: the gradients of query, key and
    value."""
    state = as_drawn(philox_seed, dropout_p)
    options = options_of(scale, is_causal, (None, None), dropout_p, state)
    return gradients(
        "_scaled_dot_product_flash_attention_backward",
        (query, key, value),
        None,
        options,
        (grad_out, out, logsumexp),
        True,
    )


# By the operator's name, its overload's behind a point.
OVERRIDES: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward.quantized": flash_attention_forward_quantized,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention.quantized": scaled_dot_product_flash_attention_quantized,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_attention_backward,
}
