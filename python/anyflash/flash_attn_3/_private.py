"""FlashAttention-3's private functions, which programs for context parallelism call."""

# ruff: noqa: PLR0917 (FlashAttention-3's orders of arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import anyflash
from anyflash.flash_attn._options import packing_of, read_flags, score_options
from anyflash.flash_attn._varlen import attend_varlen, backward_varlen
from anyflash.flash_attn_3._arguments import check_pack_gqa, refuse
from anyflash.flash_attn_3._kvcache import flash_attn_with_kvcache
from anyflash.torch import attention
from anyflash.torch._dispatch_state import is_deterministic

Tensor = torch.Tensor


class Applied:
    """What has ``apply`` like FlashAttention-3's autograd Functions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def apply(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, empty, empty).

    With ``cu_seqlens_q`` and ``cu_seqlens_k`` as :func:`flash_attn_varlen_func`; where something of
    a cache is given, or one of the two alone, as :func:`flash_attn_with_kvcache`, of which
    ``seqused_k`` is the ``cache_seqlens``; else as :func:`flash_attn_func`. Gradients are recorded
    as by these. ``out_``: where the result is written, without gradients.
    """
    name = "_flash_attn_forward"
    refuse(name, qv=qv, attention_chunk=attention_chunk, seqused_q=seqused_q)
    check_pack_gqa(name, pack_gqa)
    window = (window_size_left, window_size_right)
    cache: dict[str, Any] = {
        "cache_batch_idx": kv_batch_idx,
        "cache_leftpad": leftpad_k,
        "page_table": page_table,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": seqlens_rotary,
        "cu_seqlens_k_new": cu_seqlens_k_new,
    }
    dense = cu_seqlens_q is None and cu_seqlens_k is None
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    out: Tensor
    lse: Tensor
    if k_new is not None or not (dense or packed) or any(x is not None for x in cache.values()):
        refuse(name, cu_seqlens_k=cu_seqlens_k)
        out, lse, *_ = flash_attn_with_kvcache(
            *(q, k, v, k_new, v_new),
            **cache,
            cache_seqlens=seqused_k,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            num_splits=num_splits,
            return_softmax_lse=True,
        )
    else:
        options = score_options(softmax_scale, causal, window, softcap, None)
        options |= {"seqused_k": seqused_k, "return_lse": True}
        if packed:
            packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            out, lse = attend_varlen(q, k, v, *packing, **options)
        else:
            out, lse = attention(q, k, v, **options)
    if out_ is not None:
        out = out_.copy_(out.detach())
    return out, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk and dv; gives rowsum(dout * out).

    That is float32, (batch, heads, seqlen_q), or of packed sequences (heads, total_q):
    FlashAttention-3 rounds the length up, by what the GPU's tiles are. out and softmax_lse need not
    be those of k and v: where keys are spread over several calls, those of the whole are given each
    time.
    """
    refuse("_flash_attn_backward", seqused_q=sequed_q)
    window = (window_size_left, window_size_right)
    options = score_options(softmax_scale, is_causal, window, softcap, None)
    deterministic = read_flags(deterministic, False)[0] or is_deterministic()
    options |= {"seqused_k": sequed_k, "deterministic": deterministic}
    tensors = (dout, q, k, v, out, softmax_lse)
    with torch.no_grad():
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            backward_varlen(tensors, packing, (dq, dk, dv), **options)
        else:
            function: Any = anyflash.attention_backward
            function(*tensors, dq=dq, dk=dk, dv=dv, **options)
        products = dout.to(torch.promote_types(dout.dtype, torch.float32)) * out
        return products.sum(-1).float().transpose(-1, -2)
