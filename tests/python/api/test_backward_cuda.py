"""anyflash.attention_backward with arrays on a GPU: PyTorch, CuPy, streams, graphs, memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from oracle.torch_reference import gradients

pytestmark = pytest.mark.cuda

LONG = 200_000_000  # GPU clock cycles: a tenth of a second


def arguments(torch: ModuleType, dtype: str = "float16", head_dim: int = 64) -> dict[str, Any]:
    """Two sequences, 130 queries, 200 keys, 4 heads on 2; a forward, and what comes after it."""
    random = np.random.default_rng(head_dim)
    shapes = {"q": (2, 130, 4, head_dim), "k": (2, 200, 2, head_dim), "v": (2, 200, 2, head_dim)}
    given = {
        name: torch.from_numpy(random.standard_normal(shape)).to("cuda", getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    out, lse = anyflash.attention(**given, causal=True, return_lse=True)
    dout = torch.from_numpy(random.standard_normal(out.shape)).to(out)
    return {"dout": dout, **given, "out": out, "lse": lse, "causal": True, "deterministic": True}


def equal(torch: ModuleType, one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 59])
def test_torch_cuda(torch: ModuleType, head_dim: int, dtype: str, deterministic: bool) -> None:
    given = arguments(torch, dtype, head_dim)
    given["deterministic"] = deterministic
    sinks = torch.zeros(4, device="cuda")
    given["out"], given["lse"] = anyflash.attention(
        *(given[name] for name in "qkv"), causal=True, sinks=sinks, return_lse=True
    )
    grads = anyflash.attention_backward(**given, sinks=sinks, return_dsinks=True)
    host = {name: x.double().cpu().numpy() for name, x in given.items() if hasattr(x, "cpu")}
    arrays = {name: host[name] for name in "qkv"}
    right = gradients(arrays, host["dout"], causal=True, sinks=sinks.cpu().numpy())
    for name in ("dq", "dk", "dv", "dsinks"):
        actual, truth = getattr(grads, name), getattr(right, name)
        assert (actual.device, actual.shape) == (given["q"].device, truth.shape)
        assert actual.dtype == (torch.float32 if name == "dsinks" else given["q"].dtype)
        error = np.abs(actual.double().cpu().numpy() - truth).max()
        assert error <= (0.01 if dtype == "float16" else 0.05) * np.abs(truth).max(), name


def test_torch_cuda_layouts_have_the_same_bits(torch: ModuleType) -> None:
    given = arguments(torch)
    expected = anyflash.attention_backward(**given)
    columns = {
        name: torch.stack([x, x], -1)[..., 1] if name in ("dout", "q", "k", "v", "out") else x
        for name, x in given.items()
    }
    assert equal(torch, anyflash.attention_backward(**columns), expected)
    targets = {
        name: torch.full_like(x.transpose(1, 3), torch.nan).transpose(1, 3)
        for name, x in expected._asdict().items()
        if x is not None
    }
    grads = anyflash.attention_backward(**given, **targets)
    assert all(x is targets[name] for name, x in grads._asdict().items() if x is not None)
    assert equal(torch, grads, expected)


def test_current_stream(torch: ModuleType) -> None:
    """The work waits for the framework's current stream, and the caller for nothing."""
    given = arguments(torch)
    expected = anyflash.attention_backward(**given)
    late = torch.zeros_like(given["dout"])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(given["dout"])
        grads = anyflash.attention_backward(**given | {"dout": late})
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert equal(torch, grads, expected)


def test_stream_argument(torch: ModuleType) -> None:
    given = arguments(torch)
    expected = anyflash.attention_backward(**given)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    grads = anyflash.attention_backward(**given, stream=stream.cuda_stream)
    assert not stream.query()
    stream.synchronize()
    assert equal(torch, grads, expected)


def test_cuda_graph(torch: ModuleType) -> None:
    """A replay reads the inputs afresh."""
    given = arguments(torch)
    targets = {f"d{name}": torch.empty_like(given[name]) for name in "qkv"}
    anyflash.attention_backward(**given, **targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        anyflash.attention_backward(**given, **targets)
    for factor in (1, -1, 0.5):
        given["dout"].mul_(factor)
        for target in targets.values():
            target.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(torch, [*targets.values()], anyflash.attention_backward(**given))


def test_memory_is_linear(torch: ModuleType) -> None:
    """What torch's allocator was asked for beyond the arguments: a multiple of their size."""
    q = torch.randn(1, 16384, 1, 64, device="cuda").half()
    out, lse = anyflash.attention(q, q, q, return_lse=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    anyflash.attention_backward(out, q, q, q, out, lse)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 16 * q.nbytes  # 16384 x 16384 scores would be 256 times q


def test_cupy(torch: ModuleType, cupy: ModuleType) -> None:
    given = arguments(torch)
    arrays = {
        name: cupy.asarray(x.cpu().numpy()) if hasattr(x, "cpu") else x for name, x in given.items()
    }
    grads = anyflash.attention_backward(**arrays)
    expected = anyflash.attention_backward(**given)
    for one, other in zip(grads[:3], expected[:3], strict=True):
        assert type(one) is cupy.ndarray
        assert (one.get() == other.cpu().numpy()).all()
    target = cupy.zeros_like(arrays["q"])
    assert anyflash.attention_backward(**arrays, dq=target).dq is target
    assert (target == grads.dq).all()
