"""anyflash.flash_attn.layers.rotary against a product of complex numbers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from anyflash.flash_attn.layers import rotary
from anyflash.flash_attn.ops.triton.rotary import apply_rotary

torch: Any = importlib.import_module("torch")

ANGLES = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)) * 6
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(x: Any, positions: Any, interleaved: bool, sign: int = 1) -> Any:
    """x (rows, heads, 8): 6 columns by the angles of positions."""
    pairs = x[..., :6].double().unflatten(-1, (3, 2) if interleaved else (2, 3))
    axis = -1 if interleaved else -2
    z = torch.complex(*pairs.unbind(axis))
    factors = torch.polar(torch.ones_like(ANGLES), sign * ANGLES).to(z.dtype)
    z = z * factors[positions][:, None]
    return torch.cat([torch.stack([z.real, z.imag], axis).flatten(-2), x[..., 6:].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([7, 0])])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_apply_rotary(interleaved: bool, inplace: bool, offsets: Any, dtype: str) -> None:
    x = torch.randn(2, 5, 4, 8).to(getattr(torch, dtype))
    before = x.clone()
    y = rotary.apply_rotary_emb(x, COS, SIN, interleaved, inplace, offsets)
    assert (y is x) == inplace
    first = offsets if hasattr(offsets, "shape") else torch.full((2,), offsets)
    for b in range(2):
        right = turned(before[b], first[b] + torch.arange(5), interleaved)
        exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 8e-3, "atol": 8e-3}
        torch.testing.assert_close(y[b].double(), right, **exact)
    assert inplace or torch.equal(x, before)


@pytest.mark.parametrize("offsets", [2, torch.tensor([1, 0, 9], dtype=torch.int32)])
def test_packed_sequences(offsets: Any) -> None:
    cu_seqlens = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    x = torch.randn(11, 2, 8)
    y = apply_rotary(x, COS, SIN, offsets, cu_seqlens, 7, conjugate=True)
    first = offsets if hasattr(offsets, "shape") else torch.full((3,), offsets)
    positions = torch.cat([first[0] + torch.arange(4), first[2] + torch.arange(7)])
    torch.testing.assert_close(y.double(), turned(x, positions, False, -1), rtol=1e-5, atol=1e-5)


def test_gradients() -> None:
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = COS.double(), SIN.double()
    assert torch.autograd.gradcheck(lambda x: rotary.apply_rotary_emb(x, cos, sin, True), (x,))
    assert torch.autograd.gradcheck(
        lambda x: rotary.apply_rotary_emb(x * 1, cos, sin, inplace=True), (x,)
    )


@pytest.mark.parametrize("scale_base", [None, 16.0])
@pytest.mark.parametrize("offset", [0, 3])
def test_rotary_embedding(scale_base: float | None, offset: int) -> None:
    """The table is that of the formula; XPos cancels up to the distance in the product of q and k;
    q, k, v in one tensor, in two, and with fewer heads of k."""
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind(0)
    qkv = module(torch.stack([q, k, v], 2), seqlen_offset=offset)
    split = module(q.clone(), torch.stack([k, v], 2), seqlen_offset=offset)
    flat = module(torch.cat([q, k, v], 2), seqlen_offset=offset, num_heads_q=4)
    assert torch.equal(qkv[:, :, 0], split[0])
    assert torch.equal(qkv[:, :, 1:], split[1])
    assert torch.equal(flat, qkv.flatten(2, 3))
    assert torch.equal(qkv[:, :, 2], v)
    length = 5 + offset
    positions = torch.arange(length)[:, None].double()
    angles = positions * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    scale = torch.ones_like(angles)
    if scale_base is not None:
        base = (torch.arange(0, 8, 2) + 0.4 * 8) / (1.4 * 8)
        scale = base ** ((positions - length // 2) / scale_base)
    for actual, x, factor in ((qkv[:, :, 0], q, scale), (qkv[:, :, 1], k, 1 / scale)):
        a, b = x.double().chunk(2, -1)
        c, s = ((f(angles) * factor)[offset:, None] for f in (torch.cos, torch.sin))
        right = torch.cat([a * c - b * s, a * s + b * c], -1)
        torch.testing.assert_close(actual.double(), right, rtol=1e-5, atol=1e-5)


def test_the_table_grows_and_changes_its_dtype() -> None:
    module = rotary.RotaryEmbedding(8)
    module(torch.randn(1, 5, 3, 2, 8))
    table = module._cos_cached
    module(torch.randn(1, 4, 3, 2, 8))
    assert module._cos_cached is table
    module(torch.randn(1, 4, 3, 2, 8).bfloat16(), seqlen_offset=torch.tensor([9]), max_seqlen=13)
    assert (module._cos_cached.shape, module._cos_cached.dtype) == ((13, 4), torch.bfloat16)


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_heads_q is needed"):
        rotary.apply_rotary_emb_qkv_(torch.randn(1, 4, 6, 8), COS, SIN)
    with pytest.raises(ValueError, match="max_seqlen is needed"):
        rotary.RotaryEmbedding(8)(torch.randn(1, 4, 3, 2, 8), seqlen_offset=torch.tensor([9]))
