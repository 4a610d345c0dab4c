"""Packed queries, and keys and values in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash.torch._varlen_kvcache import attention_varlen_with_kvcache


def split_pages(
    operation: str,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """anyflash's pages have a power of two of rows: a page of 768 rows is three of 256. ``names``:
    of the caches, for errors."""
    tensors = (k_cache, v_cache, block_table)
    # What is not as it should be, attention with a cache says.
    if not all(isinstance(x, Tensor) and x.dim() > 1 for x in tensors):
        return tensors
    assert block_table is not None
    size = k_cache.shape[1]
    part = size & -size
    if part == size:
        return tensors
    count = size // part
    parts = torch.arange(count, dtype=block_table.dtype, device=block_table.device)
    table = (block_table[..., None] * count + parts).flatten(1)
    for name, x in zip(names, (k_cache, v_cache), strict=True):  # a copy would not be written back
        if x.stride(0) != size * x.stride(1):
            raise ValueError(
                f"{operation}: {name} has pages of {size} rows that do not follow one another in "
                "memory; pages that do, and pages of a power of two of rows, are allowed"
            )
    k_parts, v_parts = (x.view(-1, part, *x.shape[2:]) for x in (k_cache, v_cache))
    return k_parts, v_parts, table


def attention_varlen_paged(  # noqa: PLR0917 (as flash-attn's)
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: int | Tensor | None,
    max_seqlen_q: int,
    block_table: Tensor | None,
    options: dict[str, Any],
    names: tuple[str, str] = ("k", "v"),
) -> tuple[Tensor, Tensor]:
    """out (total_q, heads, head_dim_v) and lse (heads, total_q). Nothing waits for the device."""
    k, v, table = split_pages(operation, k, v, block_table, names)
    result: tuple[Tensor, Tensor] = attention_varlen_with_kvcache(
        *(q, k, v, cu_seqlens_q),
        cache_seqlens=seqlens_k,
        max_seqlen_q=max_seqlen_q,
        block_table=table,
        return_lse=True,
        **options,
    )
    return result
