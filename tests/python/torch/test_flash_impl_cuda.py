"""anyflash.torch.register on a GPU: what PyTorch's dispatcher passes to anyflash there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import anyflash.torch
from calls.launches import launches
from calls.torch_math import ENDS, USED, causal, in_pages, packed, packed_math, used_math

registry = importlib.import_module("torch.nn.attention")
functional = importlib.import_module("torch.nn.functional")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not hasattr(registry, "register_flash_attention_impl"),
        reason="this PyTorch has no registry",
    ),
]


def activated(function: Callable[[], Any]) -> tuple[int, Any]:
    anyflash.torch.register()
    registry.activate_flash_attention_impl("anyflash")
    try:
        return launches(function)
    finally:
        registry.restore_flash_attention_impl()


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        yield


def random(torch: ModuleType, *shape: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
    return x.requires_grad_()


def close(torch: ModuleType, actual: Any, right: Any) -> None:
    torch.testing.assert_close(actual.float(), right.float(), rtol=3e-2, atol=3e-2)


def agree(torch: ModuleType, attend: Callable[[], Any], tensors: Any) -> None:
    """Output and gradients by anyflash are PyTorch's."""
    right = attend()
    dout = torch.randn_like(right)
    wanted = torch.autograd.grad(right, tensors, dout)

    def both() -> Any:
        out = attend()
        return out, torch.autograd.grad(out, tensors, dout)

    count, (out, found) = activated(both)
    assert count >= 2
    close(torch, out, right)
    for x, y in zip(found, wanted, strict=True):
        close(torch, x, y)
    assert launches(both)[0] == 0


@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(torch: ModuleType, head_dim: int, is_causal: bool) -> None:
    q, k, v = (random(torch, 2, 4, 300, head_dim, seed=i) for i in range(3))
    attend = functional.scaled_dot_product_attention
    agree(torch, lambda: attend(q, k, v, is_causal=is_causal), (q, k, v))


def test_grouped_heads(torch: ModuleType) -> None:
    q = random(torch, 2, 8, 200, 64)
    k, v = (random(torch, 2, 2, 200, 64, seed=i) for i in (1, 2))
    attend = functional.scaled_dot_product_attention
    agree(torch, lambda: attend(q, k, v, enable_gqa=True), (q, k, v))


def test_compiled(torch: ModuleType) -> None:
    """Compiled before it is activated: the code calls what is active."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), fullgraph=True
    )
    x = random(torch, 2, 4, 128, 64)
    agree(torch, lambda: compiled(x), (x,))


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of prototypes
def test_nested_tensors(torch: ModuleType, layout: str) -> None:
    parts = [random(torch, n, 4, 64, seed=n) for n in (30, 1, 77)]
    x = torch.nested.as_nested_tensor(parts, layout=getattr(torch, layout)).transpose(1, 2)
    attend = functional.scaled_dot_product_attention
    count, out = activated(lambda: attend(x, x, x))
    assert count >= 1
    for actual, p in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        one = p[None].transpose(1, 2)
        close(torch, actual, attend(one, one, one)[0].transpose(0, 1))


def test_varlen(torch: ModuleType) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch's varlen_attn has no windows")
    ends = torch.tensor([0, 30, 31, 108], dtype=torch.int32, device="cuda")
    q, k, v = (random(torch, 108, 4, 64, seed=i) for i in range(3))
    agree(
        torch,
        lambda: varlen.varlen_attn(q, k, v, ends, ends, 77, 77, window_size=(-1, 0)),
        (q, k, v),
    )


def varlen_with(*options: str) -> Any:
    """PyTorch's module, if its varlen_attn has these options."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    known = inspect.signature(varlen.varlen_attn).parameters
    missing = [name for name in options if name not in known]
    if missing:
        pytest.skip(f"this PyTorch's varlen_attn has no {', '.join(missing)}")
    return varlen


def rounded(tensors: Any) -> list[Any]:
    """On the CPU, with numbers that bfloat16 has."""
    return [x.detach().bfloat16().float() for x in tensors]


def on_gpu(tensors: Any) -> list[Any]:
    return [x.bfloat16().cuda() if x.is_floating_point() else x.cuda() for x in tensors]


def test_varlen_with_grouped_heads(torch: ModuleType) -> None:
    varlen = varlen_with("enable_gqa", "window_size")
    q, k, v, ends_q, ends_k, *maxima = packed(torch)
    q, k, v = rounded((q, k, v))
    arguments = [*on_gpu((q, k, v, ends_q, ends_k)), *maxima]
    options = {"enable_gqa": True, "window_size": (-1, 0)}
    count, out = activated(lambda: varlen.varlen_attn(*arguments, **options))
    assert count == 1
    close(torch, out.cpu(), packed_math(torch, q, k, v, ENDS, hidden=causal)[0])


@pytest.mark.parametrize("paged", [False, True])
def test_varlen_with_used_lengths(torch: ModuleType, paged: bool) -> None:
    names = ["enable_gqa", "seqused_k", "window_size", *(["block_table"] if paged else [])]
    varlen = varlen_with(*names)
    q, k, v, ends_q, ends_k, *maxima = packed(torch)
    q, k, v = rounded((q, k, v))
    right, _ = used_math(torch, q, k, v, causal)
    used = torch.tensor(USED, dtype=torch.int32)
    options = {"enable_gqa": True, "window_size": (-1, 0), "seqused_k": used.cuda()}
    ends = ends_k.cuda()
    if paged:
        (k, table), (v, _) = in_pages(torch, k), in_pages(torch, v)
        options["block_table"], ends = table.cuda(), None
    arguments = [*on_gpu((q, k, v, ends_q)), ends, *maxima]
    with torch.no_grad():
        count, out = activated(lambda: varlen.varlen_attn(*arguments, **options))
    assert count >= 1
    close(torch, out.cpu(), right)


def test_dropout_in_a_graph(torch: ModuleType) -> None:
    """Each replay drops something else."""
    x = random(torch, 2, 4, 128, 64).detach()
    attend = functional.scaled_dot_product_attention

    def run() -> list[Any]:
        attend(x, x, x, dropout_p=0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(x, x, x, dropout_p=0.5)
        results = []
        for _ in range(2):
            graph.replay()
            results.append(out.clone())
        return results

    count, (first, second) = activated(run)
    assert count >= 2
    assert not torch.equal(first, second)
