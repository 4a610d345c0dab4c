"""S_dmask: what flash-attn's kernel leaves of the probabilities, for tests of dropout."""

from __future__ import annotations

import math
from typing import Any

import torch


def _get_block_size_n(
    device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """How many keys flash-attn's kernel takes at a time; off a GPU, what it does on an A100."""
    if head_dim <= 64:
        return 64 if is_dropout and head_dim > 32 else 128
    if not 96 < head_dim <= 128:
        return 64
    cuda = torch.device(device).type == "cuda"
    major, minor = torch.cuda.get_device_capability(device) if cuda else (8, 0)
    if major == 8 and minor > 0:
        return 64 if is_causal and not is_dropout else 32
    return 32 if is_dropout else 64


def round_multiple(x: int, m: int) -> int:
    return (x + m - 1) // m * m


def unpack(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """(total, heads, head_dim) to (batch, max_seqlen, heads, head_dim); what is beyond a sequence
    is of another one."""
    rows = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=x.device)
    if x.shape[0] == 0:
        return x.new_zeros(*rows.shape, *x.shape[1:])
    return x[rows.clamp(max=x.shape[0] - 1)]


@torch.no_grad()
def s_dmask(
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k), both lengths rounded up to 128, in q's dtype.

    flash-attn goes through a row's keys in blocks, from the last to the first. The magnitude is
    exp(score - the largest score so far), the sign is negative where dropout drops.
    """
    if packing:
        cu_q, cu_k, max_q, max_k = packing
        q, k = unpack(q, cu_q, max_q), unpack(k, cu_k, max_k)
        len_q, len_k = (cu.diff()[:, None, None, None] for cu in (cu_q, cu_k))
    else:
        len_q, len_k = (torch.tensor(x.shape[1], device=q.device) for x in (q, k))
    rows, columns, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.repeat_interleave(q.shape[2] // max(k.shape[2], 1), 2).to(wide)
    scale = options["softmax_scale"]
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), keys)
    s = s * (head_dim**-0.5 if scale is None else scale)
    if options["softcap"] > 0:
        s = options["softcap"] * torch.tanh(s / options["softcap"])

    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(columns, device=q.device)
    aligned = i + len_k - len_q  # the key that row i ends at, were it causal
    if options["alibi_slopes"] is not None:
        s = s - options["alibi_slopes"][..., None, None] * (aligned - j).abs()
    left, right = options["window_size"]
    hidden = (i >= len_q) | (j >= len_k)
    if left >= 0:
        hidden = hidden | (j < aligned - left)
    if right >= 0 or options["causal"]:
        hidden = hidden | (j > aligned + (0 if options["causal"] else right))
    s = s.masked_fill(hidden, -math.inf)

    padding = (0, round_multiple(columns, 128) - columns, 0, round_multiple(rows, 128) - rows)
    s = torch.nn.functional.pad(s, padding, value=-math.inf)
    kept = torch.nn.functional.pad(kept, padding, value=True)
    size = _get_block_size_n(q.device, head_dim, True, options["causal"])
    blocks = s.view(*s.shape[:-1], s.shape[-1] // size, size)
    top = blocks.amax(-1, keepdim=True).flip(-2).cummax(-2).values.flip(-2)
    p = torch.exp(blocks - top.masked_fill(top == -math.inf, 0.0)).flatten(-2)
    return torch.where(kept, p, -p).to(q.dtype)
