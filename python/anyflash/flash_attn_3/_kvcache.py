"""FlashAttention-3's flash_attn_with_kvcache."""

# ruff: noqa: PLR0917 (FlashAttention-3's orders of arguments)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anyflash._call.parsing import flags
from anyflash.flash_attn._kvcache import is_tensor, rows_in_cache
from anyflash.flash_attn._options import as_int, check_tensors, optional, score_options
from anyflash.flash_attn_3._arguments import check_pack_gqa, refuse
from anyflash.torch import attention_varlen_with_kvcache, attention_with_kvcache
from anyflash.torch._paged import split_pages

_NAME = "flash_attn_with_kvcache"
_FUNCTION = f"anyflash.flash_attn_3.{_NAME}"
Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """:func:`anyflash.attention_with_kvcache` with FlashAttention-3's signature; with packed
    queries or new keys, :func:`anyflash.attention_varlen_with_kvcache`.

    k and v, if given, are written to the caches in place, from ``cache_seqlens`` on, and seen.
    There is no backward: the results require no grad.

    Parameters that are not listed are those of :func:`flash_attn_func`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
        With ``cu_seqlens_q``: (total_q, heads, head_dim).
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v)
        q's dtype. With ``page_table``: (pages, page_size, heads_k, head_dim or head_dim_v), any
        page size.
    k, v : (batch, seqlen_new, heads_k, head_dim or head_dim_v), optional
        With ``cu_seqlens_k_new``: (total_new, heads_k, head_dim or head_dim_v).
    rotary_cos, rotary_sin : (rows, rotary_dim / 2), optional
    cache_seqlens : int or (batch,) int32, optional
    cache_batch_idx, cache_leftpad : (batch,) int32, optional
    page_table : (batch, pages of a sequence) int32, optional
    cu_seqlens_q : (batch + 1,) int32, optional
        Where packed queries begin, and the last ones end. No sequence has more than
        ``max_seqlen_q``.
    cu_seqlens_k_new : (batch + 1,) int32, optional
        The same of packed new keys.
    rotary_seqlens : (batch,) int32, optional
        The row of the rotary tables of each sequence's first new key; default: ``cache_seqlens``.
    num_splits : int
        Parts that the keys are divided into; 0: chosen.
    qv, attention_chunk
        None and 0 alone are allowed.
    scheduler_metadata, q_descale, k_descale, v_descale, pack_gqa, sm_margin
        Change nothing.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v)
    softmax_lse : (batch, heads, seqlen_q), or (heads, total_q), float32
        Only with ``return_softmax_lse``; two empty tensors follow, where FlashAttention-3 has the
        results of splits.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 8, 2, 16)
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[:, 3] == 1).all())
    True
    """
    refuse(_NAME, qv=qv, attention_chunk=attention_chunk)
    check_pack_gqa(_NAME, pack_gqa)
    (return_softmax_lse,) = flags(_FUNCTION, return_softmax_lse=return_softmax_lse)
    others = {"page_table": page_table, "k": k, "v": v}
    packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new}
    check_tensors(_FUNCTION, q=q, k_cache=k_cache, v_cache=v_cache, **optional(**others, **packing))
    if k_cache.dtype != q.dtype:
        raise TypeError(
            f"anyflash.flash_attn_3.{_NAME}: k_cache is {k_cache.dtype}, but q is {q.dtype}; both "
            "must have one dtype (anyflash.attention_with_kvcache takes caches of 8 bits)"
        )
    options = score_options(softmax_scale, causal, window_size, softcap, None)
    k_cache, v_cache, table = split_pages(_FUNCTION, k_cache, v_cache, page_table)
    new = _NewKeys.of(q, k, v, cu_seqlens_q, cu_seqlens_k_new)
    if rotary_cos is not None:
        options["window_size"] = _bounds(options["window_size"], new, k_cache, table)
    if rotary_cos is not None and rotary_seqlens is None:
        rotary_seqlens = rows_in_cache(q, cache_seqlens, cache_leftpad, cu_seqlens_q)
    options |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    options |= {"cache_seqlens": cache_seqlens, "block_table": table, "num_splits": num_splits}
    options |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    options |= {"rotary_seqlens": rotary_seqlens, "rotary_interleaved": rotary_interleaved}
    with torch.no_grad():
        if new.ends_q is not None:
            if max_seqlen_q is not None:
                options["max_seqlen_q"] = as_int(max_seqlen_q, "max_seqlen_q")
            out, lse = attention_varlen_with_kvcache(
                *(new.q, k_cache, v_cache, new.ends_q, new.k, new.v),
                cu_seqlens_k_new=new.ends_k,
                return_lse=True,
                **options,
            )
            out, lse = new.like_q(out, lse)
        else:
            out, lse = attention_with_kvcache(
                *(q, k_cache, v_cache, k, v), return_lse=True, **options
            )
    empty = lse.new_empty(0)
    return (out, lse, empty, empty) if return_softmax_lse else out


class _NewKeys(NamedTuple):
    """Queries and new keys. Where either are packed, both are made so."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    ends_q: Tensor | None
    ends_k: Tensor | None  # None: as ends_q
    seqlen_q: int  # of queries that were not packed; else 0

    @property
    def is_packed(self) -> bool:
        return self.ends_q is not None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        ends_q: Tensor | None,
        ends_k: Tensor | None,
    ) -> _NewKeys:
        seqlen_q = 0
        if ends_q is None and ends_k is None:
            return cls(q, k, v, None, None, 0)
        if ends_q is None:
            if q.dim() != 4:
                raise ValueError(
                    f"{_FUNCTION}: q has {q.dim()} dimensions; without cu_seqlens_q 4 are "
                    "expected: (batch, seqlen_q, heads, head_dim)"
                )
            seqlen_q = q.shape[1]
            ends_q, q = _ends(q), q.flatten(0, 1)
        if k is not None and ends_k is None and k.dim() == 4:
            ends_k, k = _ends(k), k.flatten(0, 1)
            v = v.flatten(0, 1) if v is not None and v.dim() == 4 else v
        return cls(q, k, v, ends_q, ends_k, seqlen_q)

    def like_q(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        if self.ends_q is None or not self.seqlen_q:
            return out, lse
        shape = (-1, self.seqlen_q)
        out = out.reshape(*shape, *out.shape[1:])
        return out, lse.reshape(lse.shape[0], *shape).transpose(0, 1)


def _ends(x: Tensor) -> Tensor:
    """Where the sequences of (batch, seqlen, ...) begin, and the last one ends."""
    batch, length = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length


def _bounds(
    window: tuple[int, int], new: _NewKeys, k_cache: Tensor, table: Tensor | None
) -> tuple[int, int]:
    """A bound that no score can meet is none, which is what rotates all queries alike. The limits
    are FlashAttention-3's: a left bound of at least seqlen_k - 1, a right one of at least
    seqlen_q - 1, are none."""
    # What is not as it should be, attention_with_kvcache says.
    if not all(is_tensor(x) for x in (new.q, k_cache)) or not (table is None or is_tensor(table)):
        return window
    last_key = k_cache.shape[1] * (1 if table is None else table.shape[1]) - 1
    seqlen_q = new.q.shape[0 if new.is_packed else 1]
    left, right = window
    return (-1 if left >= last_key else left, -1 if right >= seqlen_q - 1 else right)
