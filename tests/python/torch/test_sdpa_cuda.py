"""anyflash.torch.scaled_dot_product_attention and sdpa_routing on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from anyflash.torch import scaled_dot_product_attention, sdpa_routing
from calls.launches import launches

pytestmark = pytest.mark.cuda

functional = importlib.import_module("torch.nn.functional")
OWN = functional.scaled_dot_product_attention  # PyTorch's
LONG = 200_000_000  # GPU clock cycles: a tenth of a second
Shape = tuple[int, ...]


def random(torch: ModuleType, *shape: int, dtype: str = "float16", seed: int = 0) -> Any:
    values = np.random.default_rng([len(shape), seed]).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to("cuda", getattr(torch, dtype)).requires_grad_()


def routed(function: Callable[[], Any]) -> tuple[int, Any]:
    with sdpa_routing():
        return launches(function)


def with_gradients(torch: ModuleType, out: Any, tensors: list[Any]) -> list[Any]:
    dout = random(torch, *out.shape, seed=9).detach().to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def close(torch: ModuleType, actual: list[Any], right: list[Any]) -> None:
    for x, wanted in zip(actual, right, strict=True):
        x, wanted = (y.detach().cpu().float() for y in (x, wanted))  # noqa: PLW2901
        torch.testing.assert_close(x, wanted, rtol=3e-2, atol=3e-2)


# query, key, value, mask of numbers; options
CASES: dict[str, tuple[tuple[Shape, ...], dict[str, Any]]] = {
    "4d": (((2, 4, 300, 64),) * 3, {}),
    "3d": (((4, 30, 128), (4, 500, 128), (4, 500, 64)), {}),
    "5d": (((2, 3, 4, 30, 40),) * 3, {}),
    "axes-cross": (((4, 1, 3, 30, 64), (1, 2, 3, 50, 64), (2, 3, 50, 64)), {}),
    "one-head": (((2, 8, 30, 64), (2, 1, 50, 64), (2, 1, 50, 64)), {}),
    "odd-head-dim": (((2, 4, 30, 50), (2, 4, 50, 50), (2, 4, 50, 20)), {}),
    "causal": (((2, 4, 300, 64),) * 3, {"is_causal": True}),
    "causal-longer-keys": (((2, 4, 30, 64), *((2, 4, 200, 64),) * 2), {"is_causal": True}),
    "causal-longer-queries": (((2, 4, 200, 64), *((2, 4, 30, 64),) * 2), {"is_causal": True}),
    "scale": (((2, 4, 30, 64),) * 3, {"scale": 0.3}),
    "gqa": (((2, 8, 30, 64), *((2, 2, 50, 64),) * 2), {"enable_gqa": True}),
    "mask": (((2, 4, 30, 64), *((2, 4, 50, 64),) * 2, (2, 1, 30, 50)), {}),
    "mask-5d": (((2, 3, 4, 30, 64), *((2, 3, 4, 50, 64),) * 2, (2, 1, 4, 30, 50)), {}),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_like_the_cpu(torch: ModuleType, name: str, dtype: str) -> None:
    shapes, options = CASES[name]
    tensors = [random(torch, *x, dtype=dtype, seed=i) for i, x in enumerate(shapes)]
    host = [x.detach().cpu().float().requires_grad_() for x in tensors]
    right = with_gradients(torch, scaled_dot_product_attention(*host, **options), host)
    count, out = launches(lambda: scaled_dot_product_attention(*tensors, **options))
    assert count >= 1
    assert (out.dtype, out.device) == (tensors[0].dtype, tensors[0].device)
    close(torch, with_gradients(torch, out, tensors), right)
    with torch.no_grad():  # a shorter way
        assert torch.equal(scaled_dot_product_attention(*tensors, **options), out)


@pytest.mark.parametrize("step", [1, 2])
def test_strides(torch: ModuleType, step: int) -> None:
    """Heads side by side; rows that are no multiples of 16 bytes apart; a last axis with gaps."""
    x = random(torch, 2, 30, 4, 66 * step).detach()[..., : 64 * step : step].transpose(1, 2)
    keep = random(torch, 2, 1, 30, 60).detach()[..., ::2] > -1
    right = scaled_dot_product_attention(x.contiguous(), x.contiguous(), x, keep.contiguous())
    assert torch.equal(scaled_dot_product_attention(x, x, x, keep), right)
    close(torch, [right], [scaled_dot_product_attention(*[x.cpu().float()] * 3, keep.cpu())])


def test_dropout(torch: ModuleType) -> None:
    query = torch.zeros(2, 3, 64, 64, dtype=torch.float16, device="cuda")
    value = torch.eye(64, dtype=torch.float16, device="cuda").expand(2, 3, 64, 64)
    torch.manual_seed(3)
    out = scaled_dot_product_attention(query, query, value, dropout_p=0.25)
    assert 0.7 < (out > 0).double().mean() < 0.8
    torch.testing.assert_close(out.float(), (out > 0) / (64 * 0.75), rtol=1e-3, atol=1e-3)
    torch.manual_seed(3)
    assert torch.equal(out, scaled_dot_product_attention(query, query, value, dropout_p=0.25))


def test_devices_do_not_mix(torch: ModuleType) -> None:
    x = random(torch, 2, 4, 30, 64)
    with pytest.raises(RuntimeError, match="key is on cpu, but query is on cuda:0"):
        scaled_dot_product_attention(x, x.cpu(), x)


def test_current_stream(torch: ModuleType) -> None:
    """The work waits for the current stream, and the caller for nothing."""
    x = random(torch, 2, 4, 300, 64).detach()
    late = torch.zeros_like(x)
    right = scaled_dot_product_attention(x, x, x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(x)
        out = scaled_dot_product_attention(late, late, late)
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(out, right)


def test_cuda_graph(torch: ModuleType) -> None:
    x = random(torch, 2, 4, 300, 64).detach()
    held = x.clone()
    scaled_dot_product_attention(held, held, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_dot_product_attention(held, held, held, is_causal=True)
    for factor in (1, 2):
        held.copy_(factor * x)
        graph.replay()
        assert torch.equal(out, scaled_dot_product_attention(held, held, held, is_causal=True))


# Routing ------------------------------------------------------------------------------------------


def test_routing(torch: ModuleType) -> None:
    x = random(torch, 2, 4, 300, 64)
    count, out = routed(lambda: functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert count >= 1
    close(torch, [out], [OWN(x, x, x, is_causal=True)])


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 64), ("float64", 64), ("float16", 520), ("bfloat16", 520)]
)
def test_what_stays_pytorch_s(torch: ModuleType, dtype: str, head_dim: int) -> None:
    x = random(torch, 2, 4, 30, head_dim, dtype=dtype)
    count, out = routed(lambda: functional.scaled_dot_product_attention(x, x, x))
    assert count == 0
    close(torch, [out], [OWN(x, x, x)])


def test_autocast(torch: ModuleType) -> None:
    x = random(torch, 2, 4, 30, 64, dtype="float32")
    mask = random(torch, 30, 30, dtype="float32")
    with torch.autocast("cuda", torch.bfloat16):
        count, out = routed(lambda: functional.scaled_dot_product_attention(x, x, x.half(), mask))
    assert count >= 1
    assert out.dtype == torch.bfloat16
    close(torch, [out], [OWN(x, x, x, mask)])


@pytest.mark.parametrize("training", [False, True])
def test_transformer(torch: ModuleType, training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    layer = layer.to("cuda", torch.bfloat16).train(training)
    x = random(torch, 2, 50, 64, dtype="bfloat16")
    with torch.set_grad_enabled(training):
        right = layer(x)
        count, out = routed(lambda: layer(x))
    assert count >= 1
    close(torch, [out], [right])


def test_checkpointing(torch: ModuleType) -> None:
    """A thread of autograd recomputes."""
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint

    def attend(x: Any) -> Any:
        return functional.scaled_dot_product_attention(x, x, x)

    x = random(torch, 2, 4, 30, 64)
    with sdpa_routing():
        count, out = launches(lambda: checkpoint(attend, x, use_reentrant=False))
        assert count >= 1
        again, (dx,) = launches(lambda: torch.autograd.grad(out.float().square().sum(), x))
    assert again > count
    close(torch, [dx], list(torch.autograd.grad(OWN(x, x, x).float().square().sum(), x)))


def test_compile(torch: ModuleType) -> None:
    def attend(x: Any) -> Any:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    x = random(torch, 2, 4, 30, 64)
    for _ in range(2):
        assert launches(lambda: compiled(x))[0] == 0
        count, out = routed(lambda: compiled(x))
        assert count >= 1
        close(torch, [out], [attend(x)])
