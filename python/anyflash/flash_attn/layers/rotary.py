"""flash_attn.layers.rotary, in PyTorch's own operations; differentiable."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyflash.flash_attn._checks import Checks
from anyflash.flash_attn.ops.triton.rotary import check_rotary, turn, turn_rows
from anyflash.torch._dispatch_state import is_grad_enabled

Offsets = int | torch.Tensor
_NAME = "layers.rotary"


class _InPlace(torch.autograd.Function):
    """What autograd cannot record as it is done: a leaf is written to, or a view, which may be one
    of a leaf. As in flash-attn, autograd then knows of the rotation by the result alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        tensors = [y if isinstance(y, torch.Tensor) else None for y in given]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(y, torch.Tensor) else y for y in given]
        return _rotate(x, False, *given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = [y if x is None else x for x, y in zip(ctx.saved_tensors, ctx.others, strict=True)]
        return _rotate(gradients[0].clone(), True, *given), *[None] * len(given)


def _rotate(
    x: torch.Tensor,
    conjugate: bool,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None,
    sin_k: torch.Tensor | None,
    seqlen_offsets: Offsets,
    cu_seqlens: torch.Tensor | None,
    count: int,
    heads: int | None,
    interleaved: bool,
) -> torch.Tensor:
    """In place: all of x, or its first ``count`` parts along axis 2; or ``heads`` heads of q and
    those of k behind them. cos_k, sin_k: the second part's, where they are others."""
    parts: tuple[torch.Tensor, ...] = (x,)
    if heads is not None:
        last = heads + (x.shape[2] - heads) // 2
        parts = (x[:, :, :heads], x[:, :, heads:last])
    elif count > 0:
        parts = tuple(x[:, :, i] for i in range(count))
    for i, part in enumerate(parts):
        c = cos if i == 0 or cos_k is None else cos_k
        s = sin if i == 0 or sin_k is None else sin_k
        turn_rows(_NAME, part, c, s, seqlen_offsets, cu_seqlens, interleaved, conjugate)
    return x


def _in_place(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """_rotate, also of what autograd allows nobody to write to."""
    if is_grad_enabled() and x.requires_grad and (x.is_leaf or x._base is not None):
        recorded: Callable[..., torch.Tensor] = _InPlace.apply
        return recorded(x, *given)
    return _rotate(x, False, *given)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """:func:`~anyflash.flash_attn.ops.triton.rotary.apply_rotary` with other places for its
    arguments.

    With ``inplace`` x may be a leaf that requires grad, or a view. As in flash-attn, autograd then
    knows of the rotation by the result alone, and cos and sin get no gradient.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn.layers.rotary import apply_rotary_emb
    >>> angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    >>> x = torch.randn(2, 5, 3, 8, requires_grad=True)
    >>> apply_rotary_emb(x, angles.cos(), angles.sin()).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 5, 3, 8])
    """
    function = f"{_NAME}.apply_rotary_emb"
    check_rotary(function, x, cos, sin, seqlen_offsets, cu_seqlens)
    interleaved, inplace = Checks(function).flags(interleaved=interleaved, inplace=inplace)
    if not inplace:
        given = (x.clone(), cos, sin, seqlen_offsets, cu_seqlens, interleaved, False)
        return turn_rows(function, *given)
    return _in_place(x, cos, sin, None, None, seqlen_offsets, cu_seqlens, 0, None, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """:func:`apply_rotary_emb` of x (batch, seqlen, heads, head_dim); cos and sin (seqlen,
    rotary_dim / 2) or (batch, seqlen, rotary_dim / 2)."""
    checks = Checks(f"{_NAME}.apply_rotary_emb_torch")
    checks.tensors(x=x, cos=cos, sin=sin)
    checks.shape("x", x, x.dim() in {3, 4}, "(batch, seqlen, heads, head_dim)")
    rows, columns = tuple(x.shape[:-2]), x.shape[-1]
    expected = f"([batch,] seqlen, rotary_dim / 2) for x {rows}, cos and sin alike"
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() in {2, 3} and tuple(table.shape[:-1]) in {rows, rows[-1:]}
        is_right = fits and table.shape == cos.shape and 2 * table.shape[-1] <= columns
        checks.shape(name, table, is_right, expected)
    (interleaved,) = checks.flags(interleaved=interleaved)
    return turn(x.clone(), cos, sin, interleaved)


def _q_and_k(
    checks: Checks, qkv: torch.Tensor, heads: int | None
) -> tuple[int | None, torch.Tensor, torch.Tensor]:
    """Within qkv; and its heads of q, where axis 2 counts heads."""
    if qkv.dim() == 5:
        checks.shape("qkv", qkv, qkv.shape[2] == 3, "(batch, seqlen, 3, heads, head_dim)")
        return None, qkv[:, :, 0], qkv[:, :, 1]
    is_right = qkv.dim() == 4 and heads is not None
    checks.shape("qkv", qkv, is_right, "5 dimensions; with 4 dimensions num_heads_q is needed")
    checks.size("num_heads_q", heads)
    assert heads is not None
    others = qkv.shape[2] - heads
    layout = f"(batch, seqlen, {heads} (num_heads_q) + 2 heads_k, head_dim)"
    checks.shape("qkv", qkv, others >= 0 and others % 2 == 0, layout)
    return heads, qkv[:, :, :heads], qkv[:, :, heads : heads + others // 2]


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotates q and k within ``qkv``, in place, as :func:`apply_rotary_emb` does.

    Parameters
    ----------
    qkv : (batch, seqlen, 3, heads, head_dim), or with ``num_heads_q`` (batch, seqlen, \
num_heads_q + 2 heads_k, head_dim)
    cos, sin, cos_k, sin_k : (positions, rotary_dim / 2)
        Those of k, where they are others.
    """
    checks = Checks(f"{_NAME}.apply_rotary_emb_qkv_")
    checks.tensors(qkv=qkv, cos=cos, sin=sin)
    (interleaved,) = checks.flags(interleaved=interleaved)
    num_heads_q, q, k = _q_and_k(checks, qkv, num_heads_q)
    check_rotary(checks.function, q, cos, sin, seqlen_offsets, called=("qkv", "cos", "sin"))
    c, s = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    check_rotary(checks.function, k, c, s, seqlen_offsets, called=("qkv", "cos_k", "sin_k"))
    # A compiler traces no Function that is given one tensor twice.
    cos_k, sin_k = None if cos_k is cos else cos_k, None if sin_k is sin else sin_k
    tables = (cos, sin, cos_k, sin_k)
    return _in_place(qkv, *tables, seqlen_offsets, None, 2, num_heads_q, interleaved)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
) -> torch.Tensor:
    """Rotates k within ``kv`` (batch, seqlen, 2, heads_k, head_dim), in place, as
    :func:`apply_rotary_emb` does."""
    checks = Checks(f"{_NAME}.apply_rotary_emb_kv_")
    checks.tensors(kv=kv, cos=cos, sin=sin)
    (interleaved,) = checks.flags(interleaved=interleaved)
    is_right = kv.dim() == 5 and kv.shape[2] == 2
    checks.shape("kv", kv, is_right, "(batch, seqlen, 2, heads_k, head_dim)")
    called = ("kv", "cos", "sin")
    check_rotary(checks.function, kv[:, :, 0], cos, sin, seqlen_offsets, called=called)
    return _in_place(kv, cos, sin, None, None, seqlen_offsets, None, 1, None, interleaved)


class _Applied:
    """What has ``apply`` like flash-attn's autograd Functions: with a function's arguments."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.apply = function


ApplyRotaryEmb = _Applied(apply_rotary_emb)
ApplyRotaryEmbQKV_ = _Applied(apply_rotary_emb_qkv_)
ApplyRotaryEmbKV_ = _Applied(apply_rotary_emb_kv_)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding (Su et al., arXiv 2104.09864) whose table of angles grows as needed.

    With ``scale_base`` q is scaled up, and k down, by position (XPos, Sun et al.,
    arXiv 2212.10554).

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn.layers.rotary import RotaryEmbedding
    >>> qkv = torch.randn(2, 5, 3, 4, 16)
    >>> RotaryEmbedding(16)(qkv) is qkv
    True
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        checks = Checks(f"{_NAME}.RotaryEmbedding")
        checks.size("dim", dim)
        (interleaved,) = checks.flags(interleaved=interleaved)
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (self._even(device) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _even(self, device: torch.device | None) -> torch.Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: torch.device | None = None) -> torch.Tensor:
        return self.base ** (self._even(device) / -self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        old = self._cos_cached
        if (
            old is not None
            and seqlen <= self._seq_len_cached
            and (old.device, old.dtype) == (device, dtype)
            and not (self.training and old.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        inv_freq = self.inv_freq
        if inv_freq.dtype != torch.float32:  # the model was cast, and large angles need the digits
            inv_freq = self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = positions[:, None] * inv_freq.to(positions.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (positions - seqlen // 2) / self.scale_base
        scale = self.scale.to(positions) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """In place.

        Parameters
        ----------
        qkv : (batch, seqlen, 3, heads, head_dim)
            Or as :func:`apply_rotary_emb_qkv_` takes it; with ``kv`` q alone, (batch, seqlen,
            heads, head_dim).
        kv : (batch, seqlen, 2, heads_k, head_dim), optional
        seqlen_offset : int or (batch,) int
            The position of each sequence's first row. A tensor needs ``max_seqlen``.
        max_seqlen : int, optional
            Positions that the table must hold.
        """
        checks = Checks(f"{_NAME}.RotaryEmbedding")
        checks.tensors(qkv=qkv)
        checks.shape("qkv", qkv, qkv.dim() > 3, "4 or 5 dimensions")
        if max_seqlen is not None:
            checks.size("max_seqlen", max_seqlen)
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError(
                "anyflash.flash_attn.layers.rotary: seqlen_offset is a tensor; max_seqlen is needed"
            )
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
