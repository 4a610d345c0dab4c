"""Rotary embedding in PyTorch's own operations; differentiable."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from typing import Any

import torch

from anyflash.flash_attn._checks import Checks

_NAME = "ops.triton.rotary.apply_rotary"


def check_rotary(
    function: str,
    x: Any,
    cos: Any,
    sin: Any,
    seqlen_offsets: Any,
    cu_seqlens: Any = None,
    *,
    called: tuple[str, str, str] = ("x", "cos", "sin"),
) -> None:
    """Refuses what `apply_rotary` cannot turn. ``called`` is what the function calls x and the
    tables."""
    checks = Checks(function.removeprefix("anyflash.flash_attn."))
    checks.tensors(**dict(zip(called, (x, cos, sin), strict=True)))
    rank = 4 if cu_seqlens is None else 3
    layout = (
        "(batch, seqlen, heads, head_dim)"
        if rank == 4
        else "(total, heads, head_dim), as with cu_seqlens"
    )
    checks.shape(called[0], x, x.dim() == rank, layout)
    for name, table in zip(called[1:], (cos, sin), strict=True):
        checks.dtype(name, table, table.is_floating_point(), "a floating-point dtype")
        fits = table.dim() == 2 and table.shape == cos.shape and 2 * table.shape[1] <= x.shape[-1]
        columns = x.shape[-1] // 2
        alike = f"(positions, rotary_dim / 2), {called[1]} and {called[2]} alike"
        checks.shape(name, table, fits, f"{alike}, at most {columns} columns for {called[0]}")
    checks.dtype(called[0], x, x.is_floating_point(), "a floating-point dtype")
    sequences = x.shape[0]
    if cu_seqlens is not None:
        checks.tensors(x=x, cu_seqlens=cu_seqlens)
        checks.integers("cu_seqlens", cu_seqlens, "(batch + 1,)")
        checks.shape("cu_seqlens", cu_seqlens, cu_seqlens.shape[0] > 0, "(batch + 1,)")
        sequences = cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, torch.Tensor):
        checks.tensors(x=x, seqlen_offsets=seqlen_offsets)
        checks.integers("seqlen_offsets", seqlen_offsets, f"({sequences},)", sequences)
        checks.below("seqlen_offsets", seqlen_offsets, cos.shape[0] + 1, "positions + 1")
    else:
        checks.size("seqlen_offsets", seqlen_offsets)
        if cu_seqlens is None:
            needed = x.shape[1] + seqlen_offsets
            expected = (
                f"{needed} positions at least, for the rows of {called[0]} and seqlen_offsets"
            )
            checks.shape(called[1], cos, cos.shape[0] >= needed, expected)


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
    check_rotary(_NAME, x, cos, sin, seqlen_offsets, cu_seqlens)
    interleaved, inplace, conjugate = Checks(_NAME).flags(
        interleaved=interleaved, inplace=inplace, conjugate=conjugate
    )
    x = x if inplace else x.clone()
    return turn_rows(_NAME, x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)


def turn_rows(
    function: str,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> torch.Tensor:
    """`apply_rotary` in place, of arguments that were checked, but for the tables' lengths."""
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

    Checks(function).below("cos", positions, cos.shape[0], "its rows", "has no position")
    cos, sin = cos[positions], sin[positions]
    return turn(x, cos, -sin if conjugate else sin, interleaved)


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
