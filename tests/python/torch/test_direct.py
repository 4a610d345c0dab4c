"""Calls without options, which go the shortest way (anyflash.torch._fast_path): they give what
others do, whatever the tensors' strides and PyTorch's version; and what does not go this way."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import anyflash
from anyflash import _core
from anyflash._call.backward import Backward
from anyflash._call.forward import Forward
from anyflash.torch import _fast_path, attention, scaled_dot_product_attention
from backends.abi import DLDataType, DLDevice, DLTensor

Make = Callable[..., torch.Tensor]


def pytorch(exchange_api: Any) -> Any:
    """What the binding asks, with another exchange API, or none."""
    return _core.PyTorch(**{**_fast_path._FUNCTIONS, "exchange_api": exchange_api})


@pytest.fixture(params=["exchange", "capsules"])
def direct(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on there is no other way than the direct one, with PyTorch's exchange API and
    as before 2.10."""
    if request.param == "exchange" and _fast_path._FUNCTIONS["exchange_api"] is None:
        pytest.skip("this PyTorch has no exchange API")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not the direct way")

    def begin() -> None:
        if request.param == "capsules":
            monkeypatch.setattr(_fast_path, "PYTORCH", pytorch(None))
        monkeypatch.setattr(Forward, "__init__", refuse)
        monkeypatch.setattr(Backward, "__init__", refuse)

    return begin


def transposed(*shape: int) -> torch.Tensor:
    return torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)


def sliced(*shape: int) -> torch.Tensor:
    return torch.randn(*shape[:3], shape[3] + 3)[..., :-3]


def expanded(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape[1:]).expand(*shape)


def reversed_axes(*shape: int) -> torch.Tensor:
    return torch.randn(*shape[::-1]).permute(3, 2, 1, 0)


LAYOUTS: dict[str, Make] = {
    "contiguous": torch.randn,
    "transposed": transposed,
    "sliced": sliced,
    "expanded": expanded,
    "reversed": reversed_axes,
}
SHAPES = {
    "plain": ((2, 5, 4, 16), (2, 7, 2, 16), 16),
    "narrow": ((2, 5, 4, 16), (2, 7, 2, 16), 6),
    "one": ((1, 1, 1, 16), (1, 1, 1, 16), 16),
    "nothing": ((2, 0, 4, 16), (2, 7, 2, 16), 16),
}


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    arrays = (np.ascontiguousarray(x.numpy()) for x in (q, k, v))
    return anyflash.attention(*arrays, causal=causal, return_lse=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("function", [anyflash.attention, attention])
def test_results(function: Any, name: str, layout: str, direct: Callable[[], None]) -> None:
    shape, shape_k, columns = SHAPES[name]
    make = LAYOUTS[layout]
    q, k, v = make(*shape), make(*shape_k), make(*shape_k[:3], columns)
    right = [expected(q, k, v, causal) for causal in (False, True)]
    direct()
    for causal, (out, lse) in zip((False, True), right, strict=True):
        result, result_lse = function(q, k, v, causal=causal, return_lse=True)
        assert np.array_equal(result_lse.numpy(), lse)
        for tensor in (result, function(q, k, v, causal=causal)):
            assert np.array_equal(tensor.numpy(), out)
            assert tensor.stride() == torch.empty(*shape[:3], columns).stride()


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, layout: str, with_lse: bool, direct: Callable[[], None]) -> None:
    shape, shape_k, columns = SHAPES[name]
    make = LAYOUTS[layout]
    tensors = [make(*shape), make(*shape_k), make(*shape_k[:3], columns)]
    dout, dlse = make(*shape[:3], columns), make(shape[0], shape[2], shape[1], 1)[..., 0]
    arrays = [np.ascontiguousarray(x.numpy()) for x in (dout, *tensors, dlse)]
    out, lse = anyflash.attention(*arrays[1:4], causal=True, softmax_scale=0.3, return_lse=True)
    right = anyflash.attention_backward(
        *(*arrays[:4], out, lse),
        dlse=arrays[4] if with_lse else None,
        causal=True,
        softmax_scale=0.3,
    )
    leaves = [x.requires_grad_() for x in tensors]
    direct()
    outputs = attention(*leaves, causal=True, softmax_scale=0.3, return_lse=True)
    given = 2 if with_lse else 1
    grads = torch.autograd.grad(outputs[:given], leaves, (dout, dlse)[:given])
    for grad, expected_grad in zip(grads, right, strict=False):
        assert np.array_equal(grad.numpy(), expected_grad)
        assert grad.is_contiguous()


@pytest.mark.parametrize("function", [anyflash.attention, attention])
def test_numbers_of_other_types(function: Any) -> None:
    """An int and NumPy's bool are allowed, and take the longer way, forward and backward."""
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    right = torch.autograd.grad(function(x, x, x, softmax_scale=1.0, causal=True).sum(), x)[0]
    out = function(x, x, x, softmax_scale=1, causal=np.True_)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], right)
    with pytest.raises(ValueError, match=r"causal is 2"):
        function(x, x, x, causal=2)
    with pytest.raises(ValueError, match=r"softmax_scale is inf"):
        function(x, x, x, softmax_scale=float("inf"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_heads_first(name: str, layout: str, direct: Callable[[], None]) -> None:
    shape, shape_k, columns = SHAPES[name]
    make = LAYOUTS[layout]
    q, k, v = make(*shape), make(*shape_k), make(*shape_k[:3], columns)
    out, _ = expected(q, k, v, False)
    direct()
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    result = scaled_dot_product_attention(*swapped, enable_gqa=True).transpose(1, 2)
    assert np.array_equal(result.numpy(), out)
    assert result.is_contiguous()
    if result.numel():
        assert result.stride() == torch.empty(*shape[:3], columns).stride()


def test_parameters_and_leaves(direct: Callable[[], None]) -> None:
    q = torch.nn.Parameter(torch.randn(1, 3, 2, 8))
    with torch.no_grad():
        right = anyflash.attention(q.numpy(), q.numpy(), q.numpy())
        direct()
        out = attention(q, q, q)
    assert type(out) is torch.Tensor
    assert not out.requires_grad
    assert np.array_equal(out.numpy(), right)


X = torch.randn(2, 30, 4, 20)


@pytest.mark.parametrize("function", [anyflash.attention, attention])
@pytest.mark.parametrize(
    "options",
    [{"window_size": (-1, -1)}, {"softcap": float("0")}, {"dropout_p": float("0")}],
    ids=str,
)
def test_defaults_by_their_values(
    function: Any, options: dict[str, Any], direct: Callable[[], None]
) -> None:
    """Not only the objects that the functions have as defaults."""
    right = function(X, X, X)
    direct()
    assert torch.equal(function(X, X, X, **options), right)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (X, X)},
        {"window_size": -1},
        {"softcap": X},
        {"softcap": "0"},
        {"dropout_p": X},
    ],
    ids=lambda options: f"{next(iter(options))}-{type(next(iter(options.values()))).__name__}",
)
def test_what_is_no_default(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(TypeError, match=rf"^anyflash\.attention: {name} is "):
        anyflash.attention(X, X, X, **options)


NEGATIVE = torch.randn(2, 30, 4, 20, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ((NEGATIVE, X, X), TypeError, "q is a conjugate or a negative"),
        ((X, X, NEGATIVE), TypeError, "v is a conjugate or a negative"),
        ((X, X.to_sparse(), X), TypeError, "k is a tensor of layout"),
        ((X, X, X.to_mkldnn()), TypeError, "v is a tensor of layout"),
        ((X, X.to(torch.complex64), X), TypeError, "k is complex64"),
        ((X, X.to(torch.int16), X), TypeError, "k is int16"),
        ((X, X, X[0]), ValueError, "v has 3 dimensions"),
        ((X, X[None], X), ValueError, "k has 5 dimensions"),
        ((X, X.double(), X), TypeError, "k is float64, but q is float32"),
        ((X, X[:, :, :3], X[:, :, :3]), ValueError, "k has 3 heads"),
        ((X, X.numpy(), X), TypeError, "k is an array of NumPy"),
        ((X, X, X.to("meta")), TypeError, "v is on meta"),
    ],
)
@pytest.mark.parametrize("way", ["exchange", "capsules"])
def test_errors(
    way: str, tensors: Any, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "capsules":
        monkeypatch.setattr(_fast_path, "PYTORCH", pytorch(None))
    with pytest.raises(error, match=rf"^anyflash\.attention: {message}"):
        anyflash.attention(*tensors)


class Api(ctypes.Structure):
    """DLPack's exchange API."""

    FROM_PYTHON = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(DLTensor))
    STREAM = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
    )
    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("allocate", "from_python", "to_python")),
        *(("show", FROM_PYTHON), ("stream", STREAM)),
    )


class FakeGpu:
    """An exchange API that shows CPU tensors of float16 as those of a GPU that there is not."""

    INDEX = 1000

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.strides = (ctypes.c_int64 * 4)(1 * 8, 8, 8, 1)
        self.shape = (ctypes.c_int64 * 4)(1, 1, 1, 8)
        self.api = Api(1, 3, show=Api.FROM_PYTHON(self.show), stream=Api.STREAM(self.stream))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.capsule = new(ctypes.addressof(self.api), b"dlpack_exchange_api", None)

    def show(self, tensor: int, shown: Any) -> int:
        device, dtype = DLDevice(2, self.INDEX), DLDataType(2, 16, 1)
        shown[0] = DLTensor(256, device, 4, dtype, self.shape, self.strides, 0)
        return 0

    def stream(self, kind: int, index: int, stream: Any) -> int:
        self.asked.append((kind, index))
        stream[0] = 0
        return 0


def test_stream_of_the_tensors_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(_fast_path, "PYTORCH", pytorch(gpu.capsule))
    x = torch.ones(1, 1, 1, 8, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"^anyflash\.torch\.attention: .*CUDA"):
        attention(x, x, x)
    assert gpu.asked == [(2, gpu.INDEX)]


def test_other_versions_of_the_exchange_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left alone where it is not known."""
    gpu = FakeGpu()
    gpu.api.major = 2
    monkeypatch.setattr(_fast_path, "PYTORCH", pytorch(gpu.capsule))
    x = torch.ones(1, 1, 1, 8)
    assert torch.equal(attention(x, x, x), x)
    assert not gpu.asked


def test_nothing_is_left_at_exit() -> None:
    """The binding holds functions of the module that holds it: Python must see this cycle."""
    code = "import torch, anyflash; x = torch.ones(1, 1, 1, 8); anyflash.attention(x, x, x)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    assert "leak" not in done.stderr
