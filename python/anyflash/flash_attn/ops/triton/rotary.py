"""Rotary embedding in PyTorch's own operations; differentiable."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

import torch


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rotates the first ``rotary_dim`` columns of x by the angles of their positions.

    Parameters
    ----------
    x : (batch, seqlen, heads, head_dim), or with ``cu_seqlens`` (total, heads, head_dim)
    cos, sin : (positions, rotary_dim / 2)
    seqlen_offsets : int or (batch,) int
        The position of each sequence's first row.
    cu_seqlens : (batch + 1,) int, optional
        Where packed sequences begin, and the last one ends.
    max_seqlen : int, optional
        Not needed here.
    interleaved : bool
        A pair is columns 2 c and 2 c + 1; False: c and c + rotary_dim / 2.
    inplace : bool
        Write to x.
    conjugate : bool
        Rotate backwards.

    Returns
    -------
    As x. Computed in float32, or wider.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn.ops.triton.rotary import apply_rotary
    >>> angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    >>> x = torch.randn(2, 5, 3, 8)
    >>> y = apply_rotary(x, angles.cos(), angles.sin())
    >>> back = apply_rotary(y, angles.cos(), angles.sin(), conjugate=True)
    >>> bool(torch.allclose(x, back, atol=1e-6)), bool((x[..., 4:] == y[..., 4:]).all())
    (True, True)
    """
    rows = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        offsets = seqlen_offsets
        if isinstance(offsets, torch.Tensor):
            offsets = offsets[:, None]
        positions = rows + offsets
    else:
        sequence = torch.searchsorted(cu_seqlens[1:-1], rows.to(cu_seqlens.dtype), right=True)
        positions = rows - cu_seqlens[sequence]
        if isinstance(seqlen_offsets, torch.Tensor):
            positions = positions + seqlen_offsets[sequence]
        else:
            positions = positions + seqlen_offsets

    cos, sin = cos[positions], sin[positions]
    return turn(x if inplace else x.clone(), cos, -sin if conjugate else sin, interleaved)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (..., seqlen, heads, head_dim), of which the first columns are rotated in place by angles
    that are the same for all heads: cos and sin (..., seqlen, rotary_dim / 2)."""
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (y.unsqueeze(-2).to(wide) for y in (cos, sin))
    places = [
        slice(0, 2 * half, 2) if interleaved else slice(0, half),
        slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half),
    ]
    a, b = (x[..., place].to(wide) for place in places)
    for place, turned in zip(places, (a * c - b * s, a * s + b * c), strict=True):
        x[..., place] = turned.to(x.dtype)
    return x
