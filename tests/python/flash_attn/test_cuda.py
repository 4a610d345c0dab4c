"""anyflash.flash_attn on a GPU, against the same calls on the CPU in float32."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

import anyflash
import anyflash.flash_attn as fa
from anyflash.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
)
from calls.flash_attn_calls import Case, Result, close, cumulative, kept_of, reference, run

torch: Any = importlib.import_module("torch")

pytestmark = pytest.mark.cuda

LONG = 200_000_000  # GPU clock cycles: a tenth of a second
PAIRS = ((128, 217), (128, 217))
CASES = {
    "plain": Case(seqlens=PAIRS, head_dim=64),
    "causal gqa": Case(seqlens=PAIRS, head_dim=128, heads_k=2, causal=True),
    "d 59 alibi": Case(seqlens=PAIRS, head_dim=59, alibi="(b, h)", causal=True),
    "d 256 window": Case(seqlens=PAIRS, head_dim=256, window=(40, 11), heads_k=1),
    "softcap": Case(seqlens=PAIRS, head_dim=96, softcap=3.0, deterministic=True),
    "dropout": Case(seqlens=PAIRS, head_dim=128, dropout_p=0.17, heads_k=3),
    "one query": Case(seqlens=((1, 239),) * 3, head_dim=64, heads_k=2, causal=True),
    "more queries": Case(seqlens=((300, 113),) * 2, head_dim=64, window=(-1, 113)),
    "hidden rows": Case(seqlens=((217, 64),) * 2, head_dim=64, causal=True),
}
LENGTHS = ((113, 203), (1, 64), (0, 7), (97, 0), (60, 60), (130, 9))
NAMES = ["flash_attn_func", "flash_attn_kvpacked_func"]
VARLEN = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func"]
PACKED = ["flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"]


def launches() -> int:
    return sum(kernel["launches"] for kernel in anyflash.build_info()["kernels"])


def verify(name: str, case: Case) -> None:
    before = launches()
    actual: Result = run(name, case, "cuda")
    assert launches() >= before + 2
    kept = kept_of(case, actual.mask) if case.dropout_p else None
    truth, naive = (reference(case, x, kept) for x in (torch.float64, case.number()))
    close("out", 2, actual.out, truth.out, naive.out)
    for x, right in zip(actual.lse, truth.lse, strict=True):
        torch.testing.assert_close(x.double(), right, rtol=1e-5, atol=1e-5)
    for i, what in enumerate(("dq", "dk", "dv")):
        close(what, 3, *([one[i] for one in x.grads] for x in (actual, truth, naive)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_dense(name: str, function: str, dtype: str) -> None:
    verify(function, replace(CASES[name], dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function", VARLEN)
@pytest.mark.parametrize("name", ["plain", "causal gqa", "d 59 alibi", "softcap", "dropout"])
def test_varlen(name: str, function: str, dtype: str) -> None:
    verify(function, replace(CASES[name], dtype=dtype, seqlens=LENGTHS))


@pytest.mark.parametrize("function", PACKED)
@pytest.mark.parametrize("name", ["plain", "d 59 alibi", "dropout"])
def test_packed(name: str, function: str) -> None:
    case = replace(CASES[name], dtype="bfloat16", heads_k=6, seqlens=((200, 200),) * 2)
    verify(function, case)


def randn(*shape: int, seed: int = 0, dtype: str = "float16") -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to("cuda", getattr(torch, dtype))


def on_cpu(x: Any) -> Any:
    if not hasattr(x, "cpu"):
        return x
    return x.float().cpu() if x.is_floating_point() else x.cpu()


def near(actual: Any, right: Any) -> None:
    torch.testing.assert_close(on_cpu(actual), on_cpu(right), rtol=2e-2, atol=2e-2)


# KV cache -----------------------------------------------------------------------------------------

CAPACITY = 96


def cached(size: int | None, new: int = 4) -> dict[str, Any]:
    rows, pages = (CAPACITY, 4) if size is None else (size, 4 * (CAPACITY // size))
    given = {
        "q": randn(4, new, 8, 64),
        "k_cache": randn(pages, rows, 2, 64, seed=1),
        "v_cache": randn(pages, rows, 2, 64, seed=2),
        "k": randn(4, new, 2, 64, seed=3),
        "v": randn(4, new, 2, 64, seed=4),
        "cache_seqlens": torch.tensor([0, 17, 90, 64], dtype=torch.int32, device="cuda"),
        "causal": True,
        "return_softmax_lse": True,
    }
    if size is not None:
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        given["block_table"] = table.view(4, -1).to("cuda", torch.int32)
    return given


@pytest.mark.parametrize("size", [None, 16, 24])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kvcache(size: int | None, interleaved: bool) -> None:
    angles = torch.rand(CAPACITY, 16, generator=torch.Generator().manual_seed(0)) * 6
    given = cached(size) | {
        "rotary_cos": angles.cos().to("cuda", torch.float16),
        "rotary_sin": angles.sin().to("cuda", torch.float16),
        "rotary_interleaved": interleaved,
        "alibi_slopes": torch.full((8,), 0.1, device="cuda"),
        "softcap": 5.0,
    }
    host = {name: on_cpu(x) for name, x in given.items()}
    results = zip(
        fa.flash_attn_with_kvcache(**given), fa.flash_attn_with_kvcache(**host), strict=True
    )
    for actual, right in results:
        near(actual, right)
    for name in ("k_cache", "v_cache"):
        near(given[name], host[name])


def test_kvcache_in_a_cuda_graph() -> None:
    """Lengths and pages are read at replay."""
    given = cached(16, new=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fa.flash_attn_with_kvcache(**given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fa.flash_attn_with_kvcache(**given)
    for lengths in ([3, 0, 50, 95], [1, 1, 1, 1]):
        given["cache_seqlens"].copy_(torch.tensor(lengths))
        given["block_table"].copy_(given["block_table"].flip(0))
        graph.replay()
        for actual, right in zip(results, fa.flash_attn_with_kvcache(**given), strict=True):
            assert torch.equal(actual, right)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [16, 24])
def test_varlen_pages(size: int, dtype: str) -> None:
    rows, keys = [5, 0, 33, 1], [40, 7, 33, 64]
    blocks = -(-64 // size)
    pool = randn(2, 4 * blocks, size, 2, 64, dtype=dtype)
    table = torch.randperm(4 * blocks, generator=torch.Generator().manual_seed(0))
    table = table.view(4, blocks).to("cuda", torch.int32)
    q = randn(39, 8, 64, seed=1, dtype=dtype)
    given = (q, *pool, cumulative(rows).cuda(), cumulative(keys).cuda(), 33, 64)
    options = {"causal": True, "return_attn_probs": True, "window_size": (20, -1)}
    actual = fa.flash_attn_varlen_func(*given, block_table=table, **options)
    right = fa.flash_attn_varlen_func(*map(on_cpu, given), block_table=table.cpu(), **options)
    for x, y in zip(actual[:2], right[:2], strict=True):
        near(x, y)


# Streams, graphs, buffers -------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_qkvpacked_func"])
def test_current_stream(function: str) -> None:
    """Forward and backward wait for the current stream, and the caller for nothing."""
    public = getattr(fa, function)

    def step(x: Any, dout: Any) -> Any:
        given = [x] if "packed" in function else x.unbind(2)
        out = public(*given, causal=True)
        return out, torch.autograd.grad(out, x, dout)[0]

    qkv, dout = randn(2, 200, 3, 4, 64), randn(2, 200, 4, 64, seed=1)
    right = step(qkv.clone().requires_grad_(), dout)
    late = torch.zeros_like(qkv)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(qkv)
        results = step(late.requires_grad_(), dout)
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(results[0], right[0])
    near(results[1], right[1])


def test_cuda_graph() -> None:
    """Forward with an LSE, and backward into buffers, captured and replayed for other numbers."""
    qkv, dout = randn(2, 128, 3, 4, 64), randn(2, 128, 4, 64, seed=1)
    grads = torch.empty_like(qkv)
    options = (0.0, 0.125, True, -1, -1, 0.0, None)

    def step() -> Any:
        q, k, v = qkv.unbind(2)
        out, lse, _, _ = _flash_attn_forward(q, k, v, *options, False)
        _flash_attn_backward(dout, q, k, v, out, lse, *grads.unbind(2), *options, True)
        return out, lse

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    qkv.copy_(randn(2, 128, 3, 4, 64, seed=7))
    graph.replay()
    x = qkv.clone().requires_grad_()
    right, right_lse, _ = fa.flash_attn_qkvpacked_func(
        x, softmax_scale=0.125, causal=True, deterministic=True, return_attn_probs=True
    )
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    assert torch.equal(grads, torch.autograd.grad(right, x, dout)[0])


def test_rng_state() -> None:
    """On the device, of the seed that torch was given, and what the backward reads."""
    q, dout = randn(2, 128, 4, 64), randn(2, 128, 4, 64, seed=1)
    options = (0.25, 0.125, True, -1, -1, 0.0, None)
    states, outs = [], []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out, lse, _, state = _flash_attn_forward(q, q, q, *options, False)
        assert (state.shape, state.dtype, state.device) == ((2,), torch.int64, q.device)
        states.append(state)
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    grads = [torch.empty_like(q) for _ in range(3)]
    softmax_d = _flash_attn_backward(dout, q, q, q, out, lse, *grads, *options, True, states[2])
    near(softmax_d[:, :, :128], (dout.float() * out.float()).sum(-1).transpose(1, 2))
    host = [x.cpu().float() for x in (dout, q, q, q, out, lse)]
    right = [torch.empty_like(host[0]) for _ in range(3)]
    _flash_attn_backward(*host, *right, *options, True, states[2].cpu())
    for actual, gradient in zip(grads, right, strict=True):
        near(actual, gradient)


def test_zero_tensors() -> None:
    """Rows behind the last sequence, which have no meaning otherwise, become 0."""
    q, cu = randn(200, 4, 64), cumulative([50, 70]).cuda()
    given = (cu, cu, 70, 70, 0.0, 0.125, True)
    out, lse, _, _ = _flash_attn_varlen_forward(q, q, q, *given, zero_tensors=True)
    right = _flash_attn_varlen_forward(q[:120], q[:120], q[:120], *given)
    assert torch.equal(out[:120], right[0])
    assert torch.equal(lse[:, :120], right[1])
    assert (out[120:] == 0).all()
    assert (lse[:, 120:] == -torch.inf).all()
    grads = [torch.full_like(q, torch.nan) for _ in range(3)]
    window = (-1, -1, 0.0, None, True)
    _flash_attn_varlen_backward(q, q, q, q, out, lse, *grads, *given, *window, zero_tensors=True)
    for x in grads:
        assert x[:120].isfinite().all()
        assert (x[120:] == 0).all()


def test_block_size() -> None:
    """Whatever GPU this is, 128 is a multiple."""
    for head_dim in (32, 64, 96, 128, 256):
        for dropout in (False, True):
            assert 128 % _get_block_size_n(torch.device("cuda"), head_dim, dropout, True) == 0


def test_float32_is_refused() -> None:
    q = randn(1, 8, 2, 64, dtype="float32")
    with pytest.raises((TypeError, NotImplementedError), match="float32"):
        fa.flash_attn_func(q, q, q)
