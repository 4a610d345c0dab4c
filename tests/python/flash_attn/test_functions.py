"""Every function of anyflash.flash_attn against float64, on the grid of flash-attn's own tests."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import anyflash.flash_attn as fa
import anyflash.flash_attn_3 as fa3
from anyflash.flash_attn.flash_attn_interface import _get_block_size_n
from calls.flash_attn_calls import (
    Case,
    close,
    cumulative,
    kept_of,
    one_thread,
    reference,
    run,
    scores_of,
)

__all__ = ["one_thread"]

torch: Any = importlib.import_module("torch")

LENGTHS = ((113, 203), (1, 64), (0, 7), (97, 0), (60, 60), (130, 9))
SAME = ((97, 97), (0, 0), (1, 1), (128, 128), (33, 33))
CASES = {
    "plain": Case(),
    "causal": Case(causal=True, seqlens=((128, 217),) * 2),
    "more queries": Case(causal=True, seqlens=((217, 113),) * 2, heads_k=1),
    "d 59": Case(head_dim=59, causal=True, alibi="(b, h)"),
    "d 256": Case(head_dim=256, heads_k=2, window=(40, 11), seqlens=((64, 100),)),
    "d 320": Case(head_dim=320, heads=4, heads_k=1, causal=True, seqlens=((70, 100),) * 2),
    "d 512 dropout": Case(head_dim=512, heads=2, heads_k=2, dropout_p=0.17, seqlens=((60, 100),)),
    "d 111 dropout": Case(head_dim=111, dropout_p=0.17, alibi="(h)", seqlens=((97, 97),) * 3),
    "mqa window dropout": Case(head_dim=128, heads_k=1, window=(30, 5), dropout_p=0.17),
    "softcap": Case(head_dim=40, softcap=3.0, heads_k=2, causal=True, scale=0.5),
    "softcap dropout": Case(softcap=3.0, dropout_p=0.17, causal=True, seqlens=((108, 256),) * 2),
    "left": Case(window=(20, -1), seqlens=((203, 113),) * 2),
    "right beyond the keys": Case(window=(-1, 113), seqlens=((300, 113),)),
    "one query": Case(causal=True, window=(5, -1), seqlens=((1, 239),) * 3, heads_k=3),
    "one query, alibi": Case(causal=True, alibi="(h)", seqlens=((1, 239),), heads_k=3),
    "no keys": Case(seqlens=((20, 0),), dropout_p=0.17),
    "all options": Case(
        head_dim=64,
        heads_k=3,
        causal=True,
        window=(50, 7),
        alibi="(b, h)",
        dropout_p=0.3,
        scale=-0.3,
        softcap=2.0,
        deterministic=True,
    ),
}
DTYPES = ["float32", "float16", "bfloat16"]


def verify(name: str, case: Case) -> None:
    actual = run(name, case)
    kept = None
    if case.dropout_p:
        kept = kept_of(case, actual.mask)
        check_s_dmask(case, actual, kept)
    else:
        assert actual.mask.shape == (0,)
    assert actual.mask.dtype == case.number()
    truth = reference(case, torch.float64, kept)
    naive = reference(case, case.number(), kept)
    close("out", 2, actual.out, truth.out, naive.out)
    close("lse", 2, actual.lse, truth.lse, [x.float() * (1 + 1e-6) for x in truth.lse])
    for i, what in enumerate(("dq", "dk", "dv")):
        close(what, 3, *([one[i] for one in x.grads] for x in (actual, truth, naive)))


def check_s_dmask(case: Case, actual: Any, kept: list[Any]) -> None:
    """Its magnitudes are the probabilities, once each block has the row's scale; as many are
    negative as dropout drops; what is hidden or padding is 0."""
    longest = [-(-max(lengths) // 128) * 128 for lengths in zip(*case.seqlens, strict=True)]
    assert actual.mask.shape == (len(case.seqlens), case.heads, *longest)
    size = _get_block_size_n(torch.device("cpu"), case.head_dim, True, case.causal)
    dropped = visible = 0
    for b, (q, k, *_) in enumerate(case.tensors()):
        rows, keys = len(q), len(k)
        mask = actual.mask[b].double()
        assert (mask[:, rows:] == 0).all()
        assert (mask[..., keys:] == 0).all()
        if not rows * keys:
            continue
        s = scores_of(case, b, q.double(), k.double())
        largest = [s[..., first:].amax(-1) for first in range(0, keys, size)]
        top = torch.stack(largest, -1).repeat_interleave(size, -1)[..., :keys]
        lse = actual.lse[b].double()[..., None]
        p = mask[:, :rows, :keys].abs() * torch.exp(top - lse)
        true = torch.exp(s - lse)
        unit = torch.finfo(case.number()).eps
        assert (p - true).abs().max() <= unit + 1e-5
        counts = true > 1e-4
        dropped += (counts & ~kept[b]).sum().item()
        visible += counts.sum().item()
    if visible:
        deviation = math.sqrt(case.dropout_p * (1 - case.dropout_p) / visible)
        assert abs(dropped / visible - case.dropout_p) <= 4.5 * deviation + 2**-16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_flash_attn_func(name: str, dtype: str) -> None:
    verify("flash_attn_func", replace(CASES[name], dtype=dtype))


@pytest.mark.parametrize("name", ["plain", "d 59", "mqa window dropout", "all options", "no keys"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attn_kvpacked_func(name: str, dtype: str) -> None:
    verify("flash_attn_kvpacked_func", replace(CASES[name], dtype=dtype))


@pytest.mark.parametrize("name", ["plain", "d 59", "d 111 dropout", "all options"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attn_qkvpacked_func(name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype, heads_k=6, seqlens=((200, 200),) * 2)
    verify("flash_attn_qkvpacked_func", case)


VARLEN = ["plain", "causal", "d 59", "d 320", "mqa window dropout", "softcap", "all options"]


@pytest.mark.parametrize("function", ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARLEN)
def test_flash_attn_varlen(name: str, dtype: str, function: str) -> None:
    verify(function, replace(CASES[name], dtype=dtype, seqlens=LENGTHS))


@pytest.mark.parametrize("name", ["causal", "d 111 dropout", "all options"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_attn_varlen_qkvpacked(name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype, seqlens=SAME, heads_k=6)
    verify("flash_attn_varlen_qkvpacked_func", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("varlen", [False, True])
def test_flash_attn_3(varlen: bool, head_dim: int, dtype: str) -> None:
    """Beyond the 256 columns of FlashAttention-3."""
    case = Case(((70, 90),), head_dim, heads=4, heads_k=2, causal=True, softcap=3.0, dtype=dtype)
    *inputs, dout = case.tensors()[0]
    inputs = [x.requires_grad_() for x in inputs]
    options = {"causal": True, "softcap": 3.0, "return_attn_probs": True}
    if varlen:
        packing = (cumulative([70]), cumulative([90]), 70, 90)
        out, lse = fa3.flash_attn_varlen_func(*inputs, *packing, **options)
    else:
        out, lse = (x[0] for x in fa3.flash_attn_func(*(x[None] for x in inputs), **options))
    grads = torch.autograd.grad(out, inputs, dout)
    truth, naive = reference(case, torch.float64), reference(case, case.number())
    close("out", 2, [out.detach()], truth.out, naive.out)
    close("lse", 2, [lse], truth.lse, [x.float() * (1 + 1e-6) for x in truth.lse])
    for i, what in enumerate(("dq", "dk", "dv")):
        close(what, 3, [grads[i]], *([one.grads[0][i]] for one in (truth, naive)))


# What autograd sees -------------------------------------------------------------------------------

PACKED = torch.randn(2, 9, 3, 4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def qkv() -> Any:
    return PACKED.clone().requires_grad_()


def test_the_lse_has_gradients(qkv: Any) -> None:
    """Of rows that see a key; +inf of the others is a constant."""

    def loss(function: Any, *given: Any) -> Any:
        out, lse, _ = function(*given, causal=True, window_size=(3, -1), return_attn_probs=True)
        assert not lse.isinf().any()
        return (out * out).sum() + lse.cos().sum()

    (packed,) = torch.autograd.grad(loss(fa.flash_attn_qkvpacked_func, qkv), qkv)
    (parts,) = torch.autograd.grad(loss(fa.flash_attn_func, *qkv.unbind(2)), qkv)
    torch.testing.assert_close(packed, parts)
    alone = fa.flash_attn_qkvpacked_func(qkv, return_attn_probs=True)[1]
    (gradient,) = torch.autograd.grad(alone.sum(), qkv)
    assert gradient[:, :, 0].abs().max() > 0
    assert (gradient[:, :, 2] == 0).all()
    q, kv = qkv[:, :, 0], qkv[:, 2:5, 1:]
    lse = fa.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)[1]
    assert lse.isinf().any()
    (gradient,) = torch.autograd.grad(lse.masked_fill(lse.isinf(), 0).sum(), qkv)
    assert gradient.isfinite().all()


def test_gradients_of_gradients_of_packed(qkv: Any) -> None:
    def second(function: Any, *given: Any) -> Any:
        torch.manual_seed(3)
        out = function(*given, dropout_p=0.2, causal=True)
        (first,) = torch.autograd.grad((out**2).sum(), qkv, create_graph=True)
        return torch.autograd.grad((first**2).sum(), qkv)[0]

    packed = second(fa.flash_attn_qkvpacked_func, qkv)
    torch.testing.assert_close(packed, second(fa.flash_attn_func, *qkv.unbind(2)))


def test_autocast(qkv: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa.flash_attn_qkvpacked_func(qkv)
        parts = fa.flash_attn_func(*qkv.unbind(2))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, parts)
    out.float().sum().backward()
    assert qkv.grad.dtype == torch.float32


def test_slopes_have_gradients(qkv: Any) -> None:
    """Also where q, k and v are packed."""
    slopes = torch.full((4,), 0.1, requires_grad=True)
    fa.flash_attn_qkvpacked_func(qkv, alibi_slopes=slopes).square().sum().backward()
    assert (slopes.grad != 0).all()


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_qkvpacked_func"])
def test_compile(qkv: Any, function: str) -> None:
    """In one graph, the packed functions too."""
    public = getattr(fa, function)

    def attend(x: Any) -> Any:
        given = x.unbind(2) if function == "flash_attn_func" else [x]
        out, lse, mask = public(*given, causal=True, softcap=5.0, return_attn_probs=True)
        return out * 2 + mask.numel(), lse

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    right, right_lse = attend(qkv)
    out, lse = compiled(qkv)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
    (gradient,) = torch.autograd.grad(out.sum() + lse.sum(), qkv)
    torch.testing.assert_close(gradient, torch.autograd.grad(right.sum() + right_lse.sum(), qkv)[0])


def test_strided_inputs(qkv: Any) -> None:
    """As transposes and expansions leave them; flash-attn copies these."""
    right = fa.flash_attn_qkvpacked_func(qkv)
    strided = qkv.detach().permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    strided.requires_grad_()
    out = fa.flash_attn_qkvpacked_func(strided)
    assert torch.equal(out, right)
    dout = torch.ones(()).expand_as(out)
    (gradient,) = torch.autograd.grad(out, strided, dout)
    assert torch.equal(gradient, torch.autograd.grad(right, qkv, dout)[0])


def test_the_seed_is_torchs(qkv: Any) -> None:
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(fa.flash_attn_qkvpacked_func(qkv, 0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_numbers_in_tensors(torch: ModuleType) -> None:
    """flash-attn takes them for window_size and max_seqlen."""
    q = PACKED[0]
    cu = torch.tensor([0, 9], dtype=torch.int32)
    window, length = torch.tensor([3, 1]), torch.tensor(9)
    out = fa.flash_attn_varlen_qkvpacked_func(q, cu, length, window_size=window)
    assert torch.equal(out, fa.flash_attn_qkvpacked_func(q[None], window_size=(3, 1))[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fa.flash_attn_qkvpacked_func(PACKED[:, :, :2]),
            r"qkv has shape \(2, 9, 2, 4, 8\)",
        ),
        (lambda: fa.flash_attn_kvpacked_func(PACKED[:, :, 0], PACKED), r"kv has shape .*heads_k"),
        (lambda: fa.flash_attn_func(PACKED, PACKED, PACKED), r"q has 5 dimensions"),
        (lambda: fa.flash_attn_func(*PACKED.unbind(2), dropout_p=1.5), r"dropout_p is 1\.5"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^anyflash\.(flash_attn|torch\.attention): {message}"):
        call()
