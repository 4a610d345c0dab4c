"""anyflash.torch on a GPU: gradients, streams, CUDA graphs, torch.compile, autocast, devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyflash
from oracle.torch_reference import gradients

pytestmark = pytest.mark.cuda
torch = pytest.importorskip("torch")

LONG = 200_000_000  # GPU clock cycles: a tenth of a second


def given(
    dtype: str = "float16", device: str = "cuda", head_dim: int = 64, **options: Any
) -> dict[str, Any]:
    """Two sequences, 130 queries, 200 keys, 4 heads on 2; q, k, v require grad."""
    random = np.random.default_rng(0)
    shapes = {"q": (2, 130, 4, head_dim)} | dict.fromkeys("kv", (2, 200, 2, head_dim))
    tensors = {
        name: torch.from_numpy(random.standard_normal(shape))
        .to(device, getattr(torch, dtype))
        .requires_grad_()
        for name, shape in shapes.items()
    }
    return {**tensors, "causal": True, **options}


def attend(arguments: dict[str, Any], **more: Any) -> Any:
    import anyflash.torch

    return anyflash.torch.attention(**arguments, **more)


def leaves(arguments: dict[str, Any]) -> list[Any]:
    return [x for x in arguments.values() if getattr(x, "requires_grad", False)]


def launches() -> dict[str, int]:
    return {x["name"]: x["launches"] for x in anyflash.build_info()["kernels"]}


SMALL = {"bias": (4, 130, 200), "sinks": (4,), "alibi_slopes": (2, 4)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 320, 512])
@pytest.mark.parametrize("small", [SMALL, {}], ids=["all", "plain"])
def test_gradients(small: dict[str, tuple[int, ...]], head_dim: int, dtype: str) -> None:
    """Of everything that has one, by this library's kernels."""
    random = np.random.default_rng(1)
    options = {
        name: torch.from_numpy(random.standard_normal(shape)).cuda().float().requires_grad_()
        for name, shape in small.items()
    }
    arguments = given(dtype, head_dim=head_dim, **options)
    before = launches()
    out, lse = attend(arguments, return_lse=True)
    dout = torch.from_numpy(random.standard_normal(out.shape)).to(out)
    dlse = torch.from_numpy(random.standard_normal(lse.shape)).to(lse)
    grads = torch.autograd.grad((out, lse), leaves(arguments), (dout, dlse))
    ran = {name for name, count in launches().items() if count > before[name]}
    assert any("backward" in name or "bwd" in name for name in ran), ran
    host = {
        name: x.detach().double().cpu().numpy()
        for name, x in {**arguments, "dout": dout, "dlse": dlse}.items()
        if hasattr(x, "cpu")
    }
    arrays = {name: host[name] for name in "qkv"}
    extra = {name: host[name] for name in small}
    right = gradients(arrays, host["dout"], host["dlse"], causal=True, **extra)
    by_name = dict(zip(("dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"), right, strict=True))
    names = [name for name, x in arguments.items() if getattr(x, "requires_grad", False)]
    for name, actual in zip(names, grads, strict=True):
        truth = by_name[f"d{name}"]
        assert (actual.dtype, actual.device) == (arguments[name].dtype, arguments[name].device)
        error = np.abs(actual.double().cpu().numpy() - truth).max()
        assert error <= (0.01 if dtype == "float16" else 0.05) * np.abs(truth).max(), name


def test_side_stream() -> None:
    """Both passes wait for the current stream; the backward runs on the forward's."""
    arguments = given()
    right = torch.autograd.grad(attend(arguments, deterministic=True).sum(), leaves(arguments))
    late = {
        name: torch.zeros_like(x).requires_grad_() if hasattr(x, "cuda") else x
        for name, x in arguments.items()
    }
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        with torch.no_grad():
            for name in "qkv":
                late[name].copy_(arguments[name])
        out = attend(late, deterministic=True)
        assert not stream.query(), "the forward waited for the stream"
    grads = torch.autograd.grad(out.sum(), leaves(late))
    torch.cuda.synchronize()
    for one, other in zip(grads, right, strict=True):
        assert torch.equal(one, other)


def test_cuda_graph_draws_new_numbers() -> None:
    """Forward and backward with dropout, replayed: other numbers each time, the same in both."""
    arguments = given()

    def step() -> Any:
        result = attend(arguments, dropout_p=0.5, return_result=True, deterministic=True)
        grads = torch.autograd.grad(result.out.sum(), leaves(arguments))
        return result.out, result.rng_state, *grads

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    states = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        replayed = [x.clone() for x in captured]
        states.append(replayed[1].tolist())
        again = attend(
            arguments, dropout_p=0.5, rng_state=replayed[1], return_result=True, deterministic=True
        )
        grads = torch.autograd.grad(again.out.sum(), leaves(arguments))
        for one, other in zip((replayed[0], *replayed[2:]), (again.out, *grads), strict=True):
            assert torch.equal(one, other)
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: anyflash.attention(q * 2, k, v, causal=True), fullgraph=True, mode=mode
    )
    for seed in range(4):  # the third one is replayed
        arguments = given()
        with torch.no_grad():
            arguments["q"].add_(seed)
        q, k, v = leaves(arguments)
        out = compiled(q, k, v)
        grads = [x.clone() for x in torch.autograd.grad(out.float().square().sum(), (q, k, v))]
        right = anyflash.attention(q * 2, k, v, causal=True)
        expected = torch.autograd.grad(right.float().square().sum(), (q, k, v))
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_autocast() -> None:
    """float32 tensors, which the GPU's kernels do not take, as torch's own attention does."""
    arguments = given("float32")
    with torch.autocast("cuda", torch.bfloat16):
        out = anyflash.attention(**arguments)
        with torch.no_grad():
            assert torch.equal(anyflash.attention(**arguments), out)
    assert out.dtype == torch.bfloat16
    for x in torch.autograd.grad(out.sum(), leaves(arguments)):
        assert x.dtype == torch.float32
    with pytest.raises((TypeError, NotImplementedError, ValueError), match="float32"):
        attend(arguments)


def test_random_state_is_on_the_device() -> None:
    arguments = given()
    torch.cuda.manual_seed(3)
    one = attend(arguments, dropout_p=0.5, return_result=True)
    torch.cuda.manual_seed(3)
    other = attend(arguments, dropout_p=0.5, return_result=True)
    assert one.rng_state.device == arguments["q"].device
    assert torch.equal(one.out, other.out)
    assert not torch.equal(attend(arguments, dropout_p=0.5), other.out)


def test_nothing_waits() -> None:
    """No call reads anything back, also with dropout."""
    arguments = given()
    attend(arguments, dropout_p=0.5).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(arguments, dropout_p=0.5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_linear() -> None:
    """Of both passes: 8192 x 8192 scores would be 128 MiB in float16."""
    q, k, v = (
        torch.randn(1, 8192, 1, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    anyflash.attention(q, k, v, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 40 << 20


def test_devices_do_not_mix() -> None:
    arguments = given()
    arguments["k"] = arguments["k"].cpu()
    with pytest.raises(ValueError, match=r"anyflash\.torch\.attention: k is on cpu.*q is on cuda"):
        attend(arguments)


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU in this machine")
    right = attend(given())
    arguments = given(device="cuda:1")
    out = attend(arguments, dropout_p=0.0)
    out.sum().backward()
    assert torch.cuda.current_device() == 0
    assert out.device == arguments["q"].grad.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), right.cpu())
