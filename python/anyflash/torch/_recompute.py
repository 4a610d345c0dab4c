"""Attention in plain PyTorch, with the matrix of scores: what double backward differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.torch._problem import Problem


def _rows(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each packed row: its sequence, its number within it, and whether there is one."""
    ends = cu_seqlens[1:].long()
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, row, right=True)
    exists = sequence < ends.numel()
    sequence = sequence.clamp(max=max(ends.numel() - 1, 0))
    return sequence, (row - cu_seqlens.long()[sequence]).clamp(min=0), exists


def _unpacked(x: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """(total, heads, dim) as (batch, longest, heads, dim), with zeros."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    row = begin[:, None] + torch.arange(longest, device=x.device)
    exists = row < end[:, None]
    if not x.shape[0]:
        return x.new_zeros((*row.shape, *x.shape[1:]))
    taken = x[row.clamp(max=x.shape[0] - 1)]
    return torch.where(exists[..., None, None], taken, 0)


def _full(mask: Tensor, p: Problem, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A mask of blocks as one of scores."""
    mask = mask.repeat_interleave(p.block_m, -2)[..., :seqlen_q, :]
    return mask.repeat_interleave(p.block_n, -1)[..., :seqlen_k]


def _in_ranges(ranges: Tensor, p: Problem, row: Tensor, group: int) -> Tensor:
    """(batch or 1, heads or 1, rows, keys) bool: the key's ranges hold the row."""
    if p.cu_seqlens_k is not None:
        ranges = _unpacked(ranges.transpose(0, 1), p.cu_seqlens_k, p.max_seqlen_k).transpose(1, 2)
    if ranges.shape[1] > 1:
        ranges = ranges.repeat_interleave(group, 1)
    begin, end = ranges[..., None, :, 0::2], ranges[..., None, :, 1::2]
    return ((begin <= row[..., None]) & (row[..., None] < end)).any(-1)


def _scores(p: Problem, q: Tensor, k: Tensor, lengths: tuple[Tensor, Tensor]) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k), -inf where a mask hides the key."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = p.softmax_scale if p.softmax_scale is not None else q.shape[-1] ** -0.5
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if p.softcap > 0:
        s = p.softcap * torch.tanh(s / p.softcap)
    length_q, length_k = (x[:, None, None, None] for x in lengths)
    i = torch.arange(seqlen_q, device=q.device)[:, None]
    j = torch.arange(seqlen_k, device=q.device)
    distance = i + length_k - length_q - j  # >= 0: the key is not later than the query
    hidden = (j >= length_k) | (i >= length_q)
    if p.bias is not None:
        if p.bias.dtype == torch.bool:
            hidden = hidden | ~p.bias
        else:
            bias = p.bias.to(s.dtype)
            hidden = hidden | (bias == -torch.inf)
            s = s + bias.masked_fill(bias == -torch.inf, 0)
    if p.alibi_slopes is not None:
        s = s - p.alibi_slopes.to(s.dtype)[..., None, None] * distance.abs()
    right = 0 if p.causal else p.window_right
    if right >= 0:
        hidden = hidden | (-distance > right)
    if p.window_left >= 0:
        hidden = hidden | (distance > p.window_left)
    if p.block_mask is not None:
        hidden = hidden | ~_full(p.block_mask, p, seqlen_q, seqlen_k)
    if p.key_ranges is not None:
        hidden = hidden | ~_in_ranges(p.key_ranges, p, i, q.shape[2] // max(p.k.shape[-2], 1))
    return s.masked_fill(hidden, -torch.inf)


def attention(p: Problem, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse), both of float32 (float64 on float64) and differentiable as often as one likes.

    kept: (batch, heads, seqlen_q, seqlen_k) bool, what dropout keeps.
    """
    dtype = torch.promote_types(p.q.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (p.q, p.k, p.v))
    packed = p.cu_seqlens_q is not None and p.cu_seqlens_k is not None
    if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
        q = _unpacked(q, p.cu_seqlens_q, p.max_seqlen_q)
        k, v = (_unpacked(x, p.cu_seqlens_k, p.max_seqlen_k) for x in (k, v))
        length_q, length_k = p.cu_seqlens_q.diff(), p.cu_seqlens_k.diff()
    else:
        length_q = torch.full(q.shape[:1], q.shape[1], device=q.device)
        length_k = torch.full(q.shape[:1], k.shape[1], device=q.device)
    if p.seqused_k is not None:
        length_k = p.seqused_k
    unused = torch.arange(k.shape[1], device=k.device) >= length_k[:, None]
    k, v = (x.masked_fill(unused[..., None, None], 0) for x in (k, v))
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))

    s = _scores(p, q, k, (length_q, length_k))
    empty = (s == -torch.inf).all(-1, keepdim=True)  # rows that see no key
    s = s.masked_fill(empty, 0)  # so that no gradient is NaN
    if p.sinks is None:
        lse = torch.logsumexp(s, -1, keepdim=True)
        nothing = torch.full_like(lse, -torch.inf)
    else:
        nothing = p.sinks.to(dtype)[:, None, None].expand(*s.shape[:-1], 1)
        lse = torch.logsumexp(torch.cat([s, nothing], -1), -1, keepdim=True)
    weights = torch.exp(s - lse).masked_fill(empty, 0)
    lse = torch.where(empty, nothing, lse).squeeze(-1)
    if kept is not None:
        p_dropped = round(p.dropout_p * 65536) / 65536
        weights = torch.where(kept, weights / (1 - p_dropped), 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    if not packed:
        return out, lse
    assert p.cu_seqlens_q is not None
    sequence, row, exists = _rows(p.cu_seqlens_q, p.q.shape[0])
    out = torch.where(exists[:, None, None], out[sequence, row], 0)
    lse = torch.where(exists, lse.transpose(0, 1)[:, sequence, row], -torch.inf)
    return out, lse
