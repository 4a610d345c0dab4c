"""flash-attn's private functions: as context parallelism and the extension's callers use them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import anyflash.flash_attn as fa
from anyflash.flash_attn import flash_attn_2_cuda
from anyflash.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    maybe_contiguous,
    round_multiple,
)
from calls.flash_attn_calls import cumulative, one_thread

torch: Any = importlib.import_module("torch")

__all__ = ["one_thread"]

SCALE = 0.3
PLAIN = (-1, -1, 0.0, None)  # window, softcap, slopes


def draw(*shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def merge(out: Any, lse: Any, block_out: Any, block_lse: Any) -> tuple[Any, Any]:
    """Of disjoint keys. lse: (batch, heads, rows)"""
    total = torch.logaddexp(lse, block_lse)
    weights = [torch.exp(x - total).transpose(1, 2)[..., None] for x in (lse, block_lse)]
    return weights[0] * out + weights[1] * block_out, total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ring(causal: bool, dtype: str) -> None:
    """Keys and values come in blocks; the backward gets the LSE of all of them, and buffers."""
    number = getattr(torch, dtype)
    q, k, v, dout = draw((2, 48, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16), (2, 48, 4, 16))
    q, k, v, dout = (x.to(number) for x in (q, k, v, dout))
    size = 16
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    outs, lses = [], []
    for rank in range(3):  # whose queries these are
        rows = slice(rank * size, (rank + 1) * size)
        out = lse = None
        for step in range(3):
            source = (rank - step) % 3
            if causal and source > rank:
                continue
            keys = slice(source * size, (source + 1) * size)
            part, part_lse, mask, state = _flash_attn_forward(
                *(q[:, rows], k[:, keys], v[:, keys]),
                *(0, SCALE, causal and step == 0, *PLAIN, False),
            )
            assert mask.shape == (0,)
            assert (state.shape, state.dtype) == ((2,), torch.int64)
            part = part.float()
            out, lse = (part, part_lse) if out is None else merge(out, lse, part, part_lse)
        outs.append(out.to(number))
        lses.append(lse)
    right = [x.detach().requires_grad_() for x in (q, k, v)]
    whole, whole_lse, _ = fa.flash_attn_func(
        *right, softmax_scale=SCALE, causal=causal, return_attn_probs=True
    )
    exact = dtype == "float32"
    near = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(torch.cat(outs, 1), whole, **near)
    torch.testing.assert_close(torch.cat(lses, 2), whole_lse, rtol=1e-5, atol=1e-5)

    for rank in range(3):
        rows = slice(rank * size, (rank + 1) * size)
        for step in range(3):
            source = (rank - step) % 3
            if causal and source > rank:
                continue
            keys = slice(source * size, (source + 1) * size)
            given = (q[:, rows], k[:, keys], v[:, keys])
            buffers = [torch.full(x.shape, torch.nan, dtype=number) for x in given]
            _flash_attn_backward(
                *(dout[:, rows], *given, outs[rank], lses[rank], *buffers),
                *(0, SCALE, causal and step == 0, *PLAIN, False, None),
            )
            for total, part, at in zip(grads, buffers, (rows, keys, keys), strict=True):
                total[:, at] += part
    expected = torch.autograd.grad(whole, right, dout)
    near = near if exact else {"rtol": 5e-2, "atol": 5e-2}
    for actual, gradient in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, gradient.float(), **near)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_backward_of_dense(dropout_p: float) -> None:
    """With the forward's state; softmax_d; views of one tensor, and None, as gradients."""
    q, k, v, dout = draw((2, 50, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16), (2, 50, 4, 16))
    slopes = torch.full((4,), 0.1)
    options = (dropout_p, SCALE, False, 20, 30, 5.0, slopes)
    out, lse, mask, state = _flash_attn_forward(q, k, v, *options, dropout_p > 0)
    assert mask.shape == ((2, 4, 128, 128) if dropout_p else (0,))
    dkv = torch.empty(2, 70, 2, 2, 16)
    softmax_d = _flash_attn_backward(
        *(dout, q, k, v, out, lse, None, dkv[:, :, 0], dkv[:, :, 1]),
        *(*options, False, state),
    )
    assert (softmax_d.shape, softmax_d.dtype) == ((2, 4, 128), torch.float32)
    sums = (dout * out).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d[:, :, :50], sums)
    assert (softmax_d[:, :, 50:] == 0).all()

    # The same dropout, of the signs: dv = (P kept / (1 - p))^T dout
    kv = torch.stack([k, v], 2).requires_grad_()
    if dropout_p:
        p = torch.exp(_scores(q, k, slopes) - lse[..., None])
        p = torch.where(mask[:, :, :50, :70] >= 0, p / (1 - dropout_p), 0.0)
        dv = torch.einsum("bhij,bihd->bjhd", p, dout).unflatten(2, (2, 2)).sum(3)
        torch.testing.assert_close(dkv[:, :, 1], dv, rtol=1e-4, atol=1e-5)
    else:
        public = fa.flash_attn_kvpacked_func(
            q, kv, 0.0, SCALE, window_size=(20, 30), softcap=5.0, alibi_slopes=slopes
        )
        assert torch.equal(public, out)
        assert torch.equal(torch.autograd.grad(public, kv, dout)[0], dkv)


def _scores(q: Any, k: Any, slopes: Any) -> Any:
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * SCALE
    distance = torch.arange(50)[:, None] + 20 - torch.arange(70)
    s = 5 * torch.tanh(s / 5) - slopes[:, None, None] * distance.abs()
    return s.masked_fill((distance > 20) | (distance < -30), -torch.inf)


def test_varlen() -> None:
    """Sequence by sequence the same bits; softmax_d keeps 128 free rows a sequence; seqused_k."""
    rows, keys = [5, 0, 130], [9, 4, 60]
    total_q, total_k = sum(rows), sum(keys)
    q, k, v, dout = draw((total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 16), (total_q, 4, 16))
    used = torch.tensor([9, 4, 33], dtype=torch.int32)
    cu_q, cu_k = cumulative(rows), cumulative(keys)
    out, lse, mask, state = _flash_attn_varlen_forward(
        *(q, k, v, cu_q, cu_k, 130, 60, 0.0, SCALE, True), window_size_left=40, seqused_k=used
    )
    assert (lse.shape, mask.shape, state.shape) == ((4, total_q), (0,), (2,))
    for i, (a, b) in enumerate(zip(cu_q, cu_k, strict=True)):
        if i == 3:
            break
        part = slice(a, a + rows[i]), slice(b, b + used[i])
        alone = _flash_attn_forward(
            *(q[None, part[0]], k[None, part[1]], v[None, part[1]]),
            *(0.0, SCALE, True, 40, -1, 0.0, None, False),
        )
        assert torch.equal(alone[0][0], out[part[0]])
        assert torch.equal(alone[1][0], lse[:, part[0]])

    out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 130, 60, 0.0, SCALE, True)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    arguments = (cu_q, cu_k, 130, 60, 0.0, SCALE, True, *PLAIN, False)
    softmax_d = _flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *arguments)
    assert softmax_d.shape == (4, total_q + 3 * 128)
    sums = (dout * out).sum(-1).t()
    for i, first in enumerate((0, 5 + 128, 5 + 256)):
        block = softmax_d[:, first : first + rows[i]]
        torch.testing.assert_close(block, sums[:, cu_q[i] : cu_q[i + 1]])
    assert softmax_d.count_nonzero() <= 4 * total_q
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    public = fa.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, 130, 60, softmax_scale=SCALE, causal=True
    )
    for actual, right in zip(grads, torch.autograd.grad(public, leaves, dout), strict=True):
        assert torch.equal(actual, right)


def test_zero_tensors() -> None:
    """What lies behind the last sequence becomes 0; here nothing does."""
    q, dout = draw((7, 2, 8), (7, 2, 8))
    cu = cumulative([3, 4])
    plain = _flash_attn_varlen_forward(q, q, q, cu, cu, 4, 4, 0.0, 1.0, False)
    zeroed = _flash_attn_varlen_forward(q, q, q, cu, cu, 4, 4, 0.0, 1.0, False, zero_tensors=True)
    assert all(torch.equal(x, y) for x, y in zip(plain[:2], zeroed[:2], strict=True))
    first, second = ([torch.full_like(q, torch.nan) for _ in range(3)] for _ in range(2))
    given = (cu, cu, 4, 4, 0.0, 1.0, False, *PLAIN, False)
    _flash_attn_varlen_backward(dout, q, q, q, *plain[:2], *first, *given)
    _flash_attn_varlen_backward(dout, q, q, q, *plain[:2], *second, *given, zero_tensors=True)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_no_gradients_are_recorded() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    results = _flash_attn_forward(q, q, q, 0.0, 1.0, False, *PLAIN, False)
    assert not any(x.requires_grad for x in results)
    grads = [torch.empty(1, 4, 2, 8) for _ in range(3)]
    options = (0.0, 1.0, False, *PLAIN, False)
    _flash_attn_backward(q, q, q, q, *results[:2], *grads, *options)


def test_refusals() -> None:
    (q,) = draw((4, 2, 8))
    cu = cumulative([4])
    packing = (cu, cu, 4, 4)
    with pytest.raises(NotImplementedError, match=r"^anyflash\.flash_attn.*leftpad_k is given"):
        _flash_attn_varlen_forward(q, q, q, *packing, 0.0, 1.0, False, leftpad_k=cu[:1])
    with pytest.raises(ValueError, match=r"rng_state"):
        q = q[None]
        out, lse, _, _ = _flash_attn_forward(q, q, q, 0.5, 1.0, False, *PLAIN, False)
        options = (0.5, 1.0, False, *PLAIN, False)
        _flash_attn_backward(q, q, q, q, out, lse, None, None, None, *options)


def test_the_extension() -> None:
    """flash_attn_2_cuda, by position alone."""
    q, k, v, dout = draw((2, 6, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (2, 6, 4, 16))
    target = torch.empty_like(q)
    out, lse, _, state = flash_attn_2_cuda.fwd(
        *(q, k, v, target, None, 0.25, SCALE, True, -1, -1, 0.0, False, None)
    )
    assert out is target
    dk = torch.empty_like(k)
    bwd = (dout, q, k, v, out, lse, None, dk, None, None, 0.25, SCALE, True, -1, -1, 0.0)
    grads = flash_attn_2_cuda.bwd(*bwd, False, None, state)
    assert grads[1] is dk
    cu_q, cu_k = cumulative([6, 6]), cumulative([9, 9])
    flat = [x.flatten(0, 1) for x in (q, k, v, dout)]
    packed = flash_attn_2_cuda.varlen_fwd(
        *(*flat[:3], None, cu_q, cu_k, None, None, None, None, 6, 9),
        *(0.0, SCALE, False, True, -1, -1, 0.0, False, None),
    )
    lse = packed[1]
    varlen = flash_attn_2_cuda.varlen_bwd(
        *(flat[3], *flat[:3], packed[0], lse, None, None, None, cu_q, cu_k, None, 6, 9),
        *(0.0, SCALE, False, True, -1, -1, 0.0, False, None, None),
    )
    dense = flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, SCALE, True, -1, -1, 0.0, False, None)
    right = flash_attn_2_cuda.bwd(
        *(dout, q, k, v, *dense[:2], None, None, None, None, 0.0, SCALE, True, -1, -1, 0.0),
        *(False, None, None),
    )
    assert torch.equal(packed[0], dense[0].flatten(0, 1))
    for actual, x in zip(varlen[:3], right[:3], strict=True):
        assert torch.equal(actual, x.flatten(0, 1))
    assert (grads[3].shape, varlen[3].shape) == ((2, 4, 128), (4, 12 + 256))
    lengths = torch.full((2,), 9, dtype=torch.int32)
    cached, cached_lse = flash_attn_2_cuda.fwd_kvcache(
        *(q, k, v, None, None, lengths, None, None, None, None, None, None, None),
        *(SCALE, True, -1, -1, 0.0, True, 1),
    )
    torch.testing.assert_close(cached, dense[0])
    torch.testing.assert_close(cached_lse, dense[1])


def test_splits_of_pages() -> None:
    """num_splits, which versions after 2.8.3 have, divides keys in pages, and no others."""
    cu_q, cu_k = cumulative([3, 1]), cumulative([400, 130])
    q, pages = draw((4, 4, 16), (2, 50, 16, 2, 16))
    table = torch.randperm(50).view(2, 25).to(torch.int32)
    packing = (cu_q, cu_k, 3, 400, 0.0, SCALE, True)
    keys = ((b, torch.arange(n)) for b, n in enumerate((400, 130)))
    rows = [table[b, n // 16] * 16 + n % 16 for b, n in keys]
    k, v = (x.flatten(0, 1)[torch.cat(rows).long()] for x in pages)
    right = _flash_attn_varlen_forward(q, k, v, *packing, num_splits=-5)
    for splits in (0, 1, 2, 7):
        found = _flash_attn_varlen_forward(
            q, *pages, *packing, block_table=table, num_splits=splits
        )
        torch.testing.assert_close(found[:2], right[:2])
        extension = flash_attn_2_cuda.varlen_fwd(
            *(q, *pages, None, cu_q, cu_k, None, None, table, None, 3, 400, 0.0, SCALE, False),
            *(True, -1, -1, 0.0, False, None, splits),
        )
        assert torch.equal(extension[0], found[0])
    with pytest.raises(ValueError, match="num_splits is -5; 0"):
        _flash_attn_varlen_forward(q, *pages, *packing, block_table=table, num_splits=-5)


@pytest.mark.parametrize("name", ["fwd", "varlen_fwd", "bwd", "varlen_bwd"])
def test_generators_are_refused(name: str) -> None:
    function = getattr(flash_attn_2_cuda, name)
    given = dict.fromkeys(inspect.signature(function).parameters)
    given["generator"] = torch.Generator()
    with pytest.raises(NotImplementedError, match="generator is Generator; only None is allowed"):
        function(**given)


def test_helpers() -> None:
    x = torch.zeros(4, 6)
    assert maybe_contiguous(x) is x
    assert maybe_contiguous(None) is None
    assert maybe_contiguous(x.t()).stride() == (4, 1)
    assert maybe_contiguous(x[:, :3]).stride() == (6, 1)  # its last axis is
    assert [round_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    cpu = torch.device("cpu")
    sizes = [
        _get_block_size_n(cpu, d, dropout, False)
        for d in (32, 64, 96, 128, 192, 256)
        for dropout in (False, True)
    ]
    assert sizes == [128, 128, 128, 64, 64, 64, 64, 32, 64, 64, 64, 64]
