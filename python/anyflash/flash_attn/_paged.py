"""Keys and values in pages."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyflash.torch import attention_with_kvcache


def split_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """anyflash's pages have a power of two of rows: a page of 768 rows is three of 256."""
    size = k_cache.shape[1]
    part = size & -size
    if block_table is None or part == size:
        return k_cache, v_cache, block_table
    count = size // part
    parts = torch.arange(count, dtype=block_table.dtype, device=block_table.device)
    table = (block_table[..., None] * count + parts).flatten(1)
    for x in (k_cache, v_cache):  # a copy would not be written back
        if x.stride(0) != size * x.stride(1):
            raise ValueError(
                f"anyflash.flash_attn: pages of {size} rows do not follow one another in memory; "
                "then a power of two of rows is allowed"
            )
    k_parts, v_parts = (x.view(-1, part, *x.shape[2:]) for x in (k_cache, v_cache))
    return k_parts, v_parts, table


def attention_varlen_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: int | torch.Tensor | None,
    max_seqlen_q: int,
    block_table: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (total_q, heads, head_dim_v) and lse (heads, total_q). Nothing waits for the device.

    Each sequence's queries are set flush right in max_seqlen_q rows: as all masks count from the
    last query and key, the rows before them change nothing.
    """
    total = q.shape[0]
    if total == 0:
        out = q.new_empty(0, q.shape[1], v.shape[-1])
        return out, q.new_empty(q.shape[1], 0, dtype=torch.float32)
    k, v, table = split_pages(k, v, block_table)
    ends = cu_seqlens_q[1:]
    first = ends - max_seqlen_q
    rows = first[:, None] + torch.arange(max_seqlen_q, device=q.device)
    out, lse = attention_with_kvcache(
        q[rows.clamp(0, total - 1)],
        *(k, v),
        cache_seqlens=seqlens_k,
        block_table=table,
        return_lse=True,
        **options,
    )
    tokens = torch.arange(total, dtype=ends.dtype, device=q.device)
    sequence = torch.searchsorted(ends, tokens, right=True).clamp(max=ends.shape[0] - 1)
    column = (tokens - first[sequence]).clamp(0, max_seqlen_q - 1)
    return out[sequence, column], lse.transpose(1, 2)[sequence, column].t()


class ForwardOnly(torch.autograd.Function):
    """Results that depend on q, k and v, and say so when a gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        attend: Callable[..., tuple[torch.Tensor, ...]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return attend(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise NotImplementedError(
            "anyflash.flash_attn.flash_attn_varlen_func: block_table is given, and attention to "
            "pages has no backward; pass packed k and v"
        )
