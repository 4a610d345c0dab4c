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


def rows_of(positions: Any) -> tuple[Any, Any]:
    return COS[positions], SIN[positions]


PACKED = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
# Shape, what rotates it in place, and how many parts along axis 2 or -2 that reaches.
IN_PLACE: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "x": ((2, 5, 4, 8), lambda x, **options: rotary.apply_rotary_emb(x, COS, SIN, **options), 4),
    "qkv": ((2, 5, 3, 4, 8), lambda x, **o: rotary.apply_rotary_emb_qkv_(x, COS, SIN, **o), 2),
    "gqa": (
        (2, 5, 8, 8),
        lambda x, **o: rotary.apply_rotary_emb_qkv_(x, COS, SIN, num_heads_q=4, **o),
        6,
    ),
    "kv": ((2, 5, 2, 4, 8), lambda x, **o: rotary.apply_rotary_emb_kv_(x, COS, SIN, **o), 1),
}
OFFSETS = pytest.mark.parametrize("offsets", [0, 4, torch.tensor([7, 0], dtype=torch.int32)])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@OFFSETS
@pytest.mark.parametrize("name", IN_PLACE)
def test_leaf_in_place(name: str, offsets: Any, interleaved: bool, compiled: bool) -> None:
    """A leaf that requires grad is written to, and gets the gradient of what it was."""
    shape, function, parts = IN_PLACE[name]
    options = {"seqlen_offsets": offsets, "interleaved": interleaved}
    options |= {"inplace": True} if name == "x" else {}
    torch._dynamo.reset()
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    x = torch.randn(shape).requires_grad_()
    before = x.detach().clone().requires_grad_()
    y = run(x, **options)
    first = offsets if hasattr(offsets, "shape") else torch.full((2,), offsets)
    tables = rows_of(first[:, None] + torch.arange(5))
    turned = [
        rotary.apply_rotary_emb_torch(before[:, :, i : i + 1].flatten(2, -2), *tables, interleaved)
        for i in range(parts)
    ]
    right = torch.cat(
        [*(z.unflatten(2, before[:, :, :1].shape[2:-1]) for z in turned), before[:, :, parts:]], 2
    )
    torch.testing.assert_close(y, right)
    assert torch.equal(x, y)
    weights = torch.randn(shape)
    y.backward(weights)
    right.backward(weights)
    torch.testing.assert_close(x.grad, before.grad)


def test_applied_functions() -> None:
    """What has the names and the arguments of flash-attn's autograd Functions."""
    q = torch.randn(2, 5, 4, 8)
    found = rotary.ApplyRotaryEmb.apply(q, COS, SIN, True, False, 3, None, None)
    assert torch.equal(found, rotary.apply_rotary_emb(q, COS, SIN, True, seqlen_offsets=3))
    qkv, kv = torch.randn(2, 5, 8, 8), torch.randn(2, 5, 2, 4, 8)
    found = rotary.ApplyRotaryEmbQKV_.apply(qkv.clone(), COS, SIN, None, None, True, 3, 4)
    options = {"interleaved": True, "seqlen_offsets": 3}
    right = rotary.apply_rotary_emb_qkv_(qkv.clone(), COS, SIN, num_heads_q=4, **options)
    assert torch.equal(found, right)
    found = rotary.ApplyRotaryEmbKV_.apply(kv.clone(), COS, SIN, True, 3)
    assert torch.equal(found, rotary.apply_rotary_emb_kv_(kv.clone(), COS, SIN, **options))


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_leaf_in_place(interleaved: bool) -> None:
    x = torch.randn(5, 2, 8, requires_grad=True)
    before = x.detach().clone().requires_grad_()
    y = rotary.apply_rotary_emb(x, COS, SIN, interleaved, True, 3, PACKED, 3)
    tables = rows_of(torch.tensor([3, 4, 3, 4, 5]))
    right = rotary.apply_rotary_emb_torch(before, *tables, interleaved)
    torch.testing.assert_close(y, right)
    weights = torch.randn(5, 2, 8)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, weights), torch.autograd.grad(right, before, weights)
    )


@pytest.mark.parametrize("leaf", [False, True])
def test_views_in_place(leaf: bool) -> None:
    """Also one of a leaf; gradients of any order."""
    weights = torch.randn(1, 5, 2, 8).double()

    def attend(qkv: Any) -> Any:
        qkv = qkv if leaf else qkv.clone()
        q = rotary.apply_rotary_emb(qkv[:, :, 0], COS.double(), SIN.double(), inplace=True)
        return (q * q * qkv[:, :, 1] * weights).sum()

    def slowly(qkv: Any) -> Any:
        q, k, _ = qkv.unbind(2)
        q = rotary.apply_rotary_emb(q, COS.double(), SIN.double())
        return (q * q * k * weights).sum()

    x = torch.randn(1, 5, 3, 2, 8).double().requires_grad_()
    same = x.detach().clone().requires_grad_()
    results = []
    for function, of in ((attend, x), (slowly, same)):
        (first,) = torch.autograd.grad(function(of), of, create_graph=True)
        results.append((first, *torch.autograd.grad(first.square().sum(), of)))
    torch.testing.assert_close(*results)


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


def test_module_of_a_leaf() -> None:
    """q and k are rotated in a parameter's memory; q alone, with kv beside it, too."""
    module = rotary.RotaryEmbedding(6)
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    q, kv = (qkv.detach()[:, :, part].clone() for part in (0, slice(1, 3)))
    q.requires_grad_()
    kv.requires_grad_()
    weights = torch.randn(2, 5, 3, 4, 8)
    module(qkv).backward(weights)
    turned_q, turned_kv = module(q, kv)
    torch.autograd.backward((turned_q, turned_kv), (weights[:, :, 0], weights[:, :, 1:]))
    assert torch.equal(torch.cat([turned_q[:, :, None], turned_kv], 2), qkv)
    assert torch.equal(torch.cat([q.grad[:, :, None], kv.grad], 2), qkv.grad)
    assert torch.equal(qkv.grad[:, :, 2], weights[:, :, 2])
    assert not torch.allclose(qkv.grad[:, :, 1], weights[:, :, 1])


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_heads_q is needed"):
        rotary.apply_rotary_emb_qkv_(torch.randn(1, 4, 6, 8), COS, SIN)
    with pytest.raises(ValueError, match="max_seqlen is needed"):
        rotary.RotaryEmbedding(8)(torch.randn(1, 4, 3, 2, 8), seqlen_offset=torch.tensor([9]))
    with pytest.raises(ValueError, match="cos is on meta, but x is on cpu; both must be on one"):
        rotary.apply_rotary_emb(torch.randn(1, 4, 2, 8), COS.to("meta"), SIN)
