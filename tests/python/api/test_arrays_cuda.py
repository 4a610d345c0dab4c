"""anyflash.attention with arrays on a GPU: PyTorch, CuPy, streams, graphs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from oracle.attention import check, reference

pytestmark = pytest.mark.cuda

LONG = 200_000_000  # GPU clock cycles: a tenth of a second


def inputs(torch: ModuleType, dtype: str = "float16", head_dim: int = 64) -> list[Any]:
    """Two sequences, 130 queries, 200 keys, 4 heads on 2."""
    random = np.random.default_rng(head_dim)
    shapes = ((2, 130, 4, head_dim), (2, 200, 2, head_dim), (2, 200, 2, head_dim))
    values = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in values]


def verify(torch: ModuleType, given: list[Any], out: Any, lse: Any, causal: bool) -> None:
    host = [x.cpu().half().numpy() for x in given]
    check(out.cpu().half().numpy(), lse.cpu().numpy(), reference(*host, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 59])
def test_torch_cuda(torch: ModuleType, head_dim: int, causal: bool) -> None:
    given = inputs(torch, head_dim=head_dim)
    out, lse = anyflash.attention(*given, causal=causal, return_lse=True)
    assert (out.dtype, out.device, lse.device) == (given[0].dtype, given[0].device, out.device)
    verify(torch, given, out, lse, causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_cuda_layouts_have_the_same_bits(torch: ModuleType, dtype: str) -> None:
    given = inputs(torch, dtype)
    expected = anyflash.attention(*given)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    assert torch.equal(anyflash.attention(*swapped), expected)
    columns = [torch.stack([x, x], -1)[..., 1] for x in given]
    assert torch.equal(anyflash.attention(*columns), expected)
    out = torch.full_like(expected.transpose(1, 3), torch.nan).transpose(1, 3)
    assert anyflash.attention(*given, out=out) is out
    assert torch.equal(out, expected)


class OnlyDLPack:
    """Of a library that anyflash does not know: it cannot be asked for memory."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("head_dim", [64, 59])
def test_what_only_speaks_dlpack(torch: ModuleType, head_dim: int) -> None:
    """More tiles than a GPU has multiprocessors: Hopper's kernels then want a workspace."""
    tensors = [x.repeat(200, 1, 1, 1) for x in inputs(torch, "bfloat16", head_dim)]
    out, lse = anyflash.attention(*tensors, causal=True, return_lse=True)
    given = [OnlyDLPack(x) for x in (*tensors, out, lse)]
    found = anyflash.attention(*given[:3], causal=True)
    assert isinstance(found, anyflash.Array)
    assert torch.equal(torch.from_dlpack(found), out)

    q, k, v, o, log_sum = given
    gradients = anyflash.attention_backward(o, q, k, v, o, log_sum, causal=True, deterministic=True)
    expected = anyflash.attention_backward(out, *tensors, out, lse, causal=True, deterministic=True)
    for actual, gradient in zip(gradients[:3], expected[:3], strict=True):
        assert torch.equal(torch.from_dlpack(actual), gradient)


def test_torch_cuda_errors(torch: ModuleType) -> None:
    q, k, v = inputs(torch)
    with pytest.raises(ValueError, match=r"anyflash\.attention: k is on cpu.*q is on cuda"):
        anyflash.attention(q, k.cpu(), v)
    with pytest.raises(TypeError, match=r"anyflash\.attention: q is float32.*float16"):
        anyflash.attention(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match=r"anyflash\.attention: .*q has head dim 520"):
        anyflash.attention(*inputs(torch, head_dim=520))


@pytest.mark.parametrize("head_dim", [64, 59])
def test_current_stream(torch: ModuleType, head_dim: int) -> None:
    """The work waits for the framework's current stream, and the caller for nothing."""
    given = inputs(torch, head_dim=head_dim)
    expected = anyflash.attention(*given)
    zeros = [torch.zeros_like(x) for x in given]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for target, source in zip(zeros, given, strict=True):
            target.copy_(source)
        out = anyflash.attention(*zeros)
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_stream_argument(torch: ModuleType) -> None:
    given = inputs(torch)
    expected = anyflash.attention(*given)
    out = torch.zeros_like(expected)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    anyflash.attention(*given, out=out, stream=stream.cuda_stream)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stream", [0, 1])
def test_legacy_stream(torch: ModuleType, stream: int) -> None:
    """By its two names, and in calls that need memory beside their arrays."""
    q, k, v = (x[:, ::2] for x in inputs(torch))
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    expected = anyflash.attention_backward(out, q, k, v, out, lse)
    grads = anyflash.attention_backward(out, q, k, v, out, lse, stream=stream)
    torch.cuda.synchronize()
    for found, right in zip(grads[:3], expected, strict=False):
        assert torch.equal(found, right)


def test_per_thread_stream(torch: ModuleType) -> None:
    """PyTorch does not know it."""
    q, k, v = inputs(torch)
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    for call in (
        lambda: anyflash.attention(q, k, v, stream=2),
        lambda: anyflash.attention_backward(out, q, k, v, out, lse, stream=2),
        lambda: anyflash.merge_states(out, lse, out, lse, stream=2),
    ):
        with pytest.raises(ValueError, match=r"^anyflash\.\w+: stream is 2, CUDA's per-thread"):
            call()


def test_cuda_graph(torch: ModuleType) -> None:
    """A replay reads the inputs afresh."""
    given = inputs(torch)
    out = torch.empty_like(given[0])
    anyflash.attention(*given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        anyflash.attention(*given, out=out)
    for factor in (1, -1, 0.5):
        given[0].mul_(factor)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, anyflash.attention(*given))


def test_cupy(torch: ModuleType, cupy: ModuleType) -> None:
    given = inputs(torch)
    arrays = [cupy.asarray(x.cpu().numpy()) for x in given]
    out, lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is type(lse) is cupy.ndarray
    expected, expected_lse = anyflash.attention(*given, causal=True, return_lse=True)
    assert (out.get() == expected.cpu().numpy()).all()
    assert (lse.get() == expected_lse.cpu().numpy()).all()
    target = cupy.zeros_like(out)
    assert anyflash.attention(*arrays, causal=True, out=target) is target
    assert (target == out).all()
    strided = [cupy.stack([x, x], -1)[..., 1] for x in arrays]
    assert (anyflash.attention(*strided, causal=True) == out).all()


def test_cupy_stream(torch: ModuleType, cupy: ModuleType) -> None:
    """The work waits for CuPy's current stream, and the caller for nothing."""
    arrays = [cupy.asarray(x.cpu().numpy()) for x in inputs(torch)]
    expected = anyflash.attention(*arrays)
    zeros = [cupy.zeros_like(x) for x in arrays]
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { for (long long t = clock64(); clock64() < '
        "t + n;) {} }",
        "spin",
    )
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin((1,), (1,), (LONG,))
        for target, source in zip(zeros, arrays, strict=True):
            target[...] = source
        out = anyflash.attention(*zeros)
        assert not stream.done, "the call waited for the stream"
        stream.synchronize()
    assert (out == expected).all()


def test_cupy_bits(torch: ModuleType, cupy: ModuleType) -> None:
    """bool, bfloat16 where CuPy has it: its DLPack export need not know them."""
    given = inputs(torch)
    arrays = [cupy.asarray(x.cpu().numpy()) for x in given]
    keep = np.random.default_rng(1).random((130, 200)) > 0.3
    out = anyflash.attention(*arrays, bias=cupy.asarray(keep))
    expected = anyflash.attention(*given, bias=torch.from_numpy(keep).cuda())
    assert (out.get() == expected.cpu().numpy()).all()
    if int(cupy.__version__.partition(".")[0]) >= 14:
        host = [x.cpu().float().numpy().astype(ml_dtypes.bfloat16) for x in given]
        out = anyflash.attention(*map(cupy.asarray, host))
        assert out.dtype == ml_dtypes.bfloat16
        expected = anyflash.attention(*(x.bfloat16() for x in given))
        assert (out.get().astype(np.float32) == expected.float().cpu().numpy()).all()


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_second_device(torch: ModuleType, cupy: ModuleType, name: str) -> None:
    """The arrays' device is used, whichever is current, which stays so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    given = inputs(torch)
    expected = anyflash.attention(*given).cpu().numpy()
    if name == "torch":
        moved = [x.to("cuda:1") for x in given]
        out = anyflash.attention(*moved)
        assert (out.device, torch.cuda.current_device()) == (moved[0].device, 0)
        assert (out.cpu().numpy() == expected).all()
        mixed = [given[0], *moved[1:]]
    else:
        with cupy.cuda.Device(1):
            moved = [cupy.asarray(x.cpu().numpy()) for x in given]
        out = anyflash.attention(*moved)
        assert (out.device.id, cupy.cuda.Device().id) == (1, 0)
        assert (out.get() == expected).all()
        mixed = [cupy.asarray(given[0].cpu().numpy()), *moved[1:]]
    with pytest.raises(ValueError, match=r"k is on cuda:1, but q is on cuda:0"):
        anyflash.attention(*mixed)
