"""Every wrong call says which argument is wrong, what is allowed, and writes nothing."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from backends import capi
from backends.abi import DLDataType, DLDevice, DLTensor, Options, int64_array
from backends.capi import INVALID_TYPE, INVALID_VALUE, UNSUPPORTED, Backend, CallError
from backends.tensors import CANARY, aligned_bytes
from cases.case import Case
from oracle.attention import Array

METAL = 8  # a DLPack device type that anyflash does not know


@dataclass
class Call:
    """A right call: 2 x 5 queries, 6 keys, 8 heads on 4, head dims 16 and 24."""

    q: DLTensor | None
    k: DLTensor | None
    v: DLTensor | None
    out: DLTensor | None
    lse: DLTensor | None
    options: Options

    @property
    def tensors(self) -> list[DLTensor | None]:
        return [self.q, self.k, self.v, self.out, self.lse]


def shaped(name: str, *shape: int) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        tensor = getattr(call, name)
        tensor.ndim = len(shape)
        tensor.shape = int64_array(shape)
        # A stride too many does no harm; none is 0, so that this is never the error.
        tensor.strides = int64_array([1] * len(shape))

    return change


def typed(name: str, code: int, bits: int, lanes: int = 1) -> Callable[[Call], None]:
    return lambda call: setattr(getattr(call, name), "dtype", DLDataType(code, bits, lanes))


def on(name: str, device: int, index: int = 0) -> Callable[[Call], None]:
    return lambda call: setattr(getattr(call, name), "device", DLDevice(device, index))


def null(name: str) -> Callable[[Call], None]:
    return lambda call: setattr(call, name, None)


def no_data(name: str) -> Callable[[Call], None]:
    return lambda call: setattr(getattr(call, name), "data", None)


def option(**values: Any) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        for name, value in values.items():
            setattr(call.options, name, value)

    return change


def scaled(value: float) -> Callable[[Call], None]:
    return option(has_softmax_scale=1, softmax_scale=value)


def repeated(name: str) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        tensor = getattr(call, name)
        tensor.strides = int64_array([*tensor.strides[: tensor.ndim - 1], 0])

    return change


def many_keys(call: Call) -> None:
    """2**31 + 6 keys that share one place; 6 of them in 32 bits."""
    for tensor in (call.k, call.v):
        assert tensor is not None
        tensor.shape[1] = (1 << 31) + 6
        tensor.strides = int64_array([*tensor.strides[:1], 0, *tensor.strides[2:4]])


# What is changed, the status, and what the message must contain, in this order.
WRONG: dict[str, tuple[Callable[[Call], None], int, Sequence[str]]] = {
    "q-null": (null("q"), INVALID_VALUE, ("q", "NULL")),
    "k-null": (null("k"), INVALID_VALUE, ("k", "NULL")),
    "v-null": (null("v"), INVALID_VALUE, ("v", "NULL")),
    "out-null": (null("out"), INVALID_VALUE, ("out", "NULL")),
    "q-no-data": (no_data("q"), INVALID_VALUE, ("q", "NULL")),
    "out-no-data": (no_data("out"), INVALID_VALUE, ("out", "NULL")),
    "lse-no-data": (no_data("lse"), INVALID_VALUE, ("lse", "NULL")),
    "q-rank": (shaped("q", 2, 5, 8), INVALID_VALUE, ("q", "3", "4")),
    "k-rank": (shaped("k", 2, 6, 4, 1, 16), INVALID_VALUE, ("k", "5", "4")),
    "v-rank": (shaped("v", 2, 6), INVALID_VALUE, ("v", "2", "4")),
    "out-rank": (shaped("out", 2, 5, 192), INVALID_VALUE, ("out", "3", "4")),
    "lse-rank": (shaped("lse", 2, 8, 5, 1), INVALID_VALUE, ("lse", "4", "3")),
    "negative-extent": (shaped("k", 2, -6, 4, 16), INVALID_VALUE, ("k", "negative")),
    "k-heads": (shaped("k", 2, 6, 3, 16), INVALID_VALUE, ("k", "3 heads", "q", "8")),
    "k-more-heads": (shaped("k", 2, 6, 16, 16), INVALID_VALUE, ("k", "16 heads", "q", "8")),
    "k-no-heads": (shaped("k", 2, 6, 0, 16), INVALID_VALUE, ("k", "0 heads", "q", "8")),
    "q-no-heads": (shaped("q", 2, 5, 0, 16), INVALID_VALUE, ("q", "0", "at least 1")),
    "no-head-dim": (shaped("q", 2, 5, 8, 0), INVALID_VALUE, ("q", "0", "at least 1")),
    "k-batch": (shaped("k", 3, 6, 4, 16), INVALID_VALUE, ("k", "3, 6, 4, 16", "2, 6, 4, 16")),
    "k-dim": (shaped("k", 2, 6, 4, 32), INVALID_VALUE, ("k", "2, 6, 4, 32", "2, 6, 4, 16")),
    "v-batch": (shaped("v", 1, 6, 4, 24), INVALID_VALUE, ("v", "1, 6, 4, 24", "2, 6, 4, 24")),
    "v-length": (shaped("v", 2, 7, 4, 24), INVALID_VALUE, ("v", "2, 7, 4, 24", "2, 6, 4, 24")),
    "v-heads": (shaped("v", 2, 6, 2, 24), INVALID_VALUE, ("v", "2, 6, 2, 24", "2, 6, 4, 24")),
    "v-no-dim": (shaped("v", 2, 6, 4, 0), INVALID_VALUE, ("v", "0", "at least 1")),
    "out-shape": (shaped("out", 2, 5, 8, 16), INVALID_VALUE, ("out", "8, 16", "8, 24")),
    "out-length": (shaped("out", 2, 6, 8, 24), INVALID_VALUE, ("out", "2, 6", "2, 5, 8, 24")),
    "lse-shape": (shaped("lse", 2, 5, 8), INVALID_VALUE, ("lse", "2, 5, 8", "2, 8, 5")),
    "out-repeats": (repeated("out"), INVALID_VALUE, ("out", "stride 0")),
    "lse-repeats": (repeated("lse"), INVALID_VALUE, ("lse", "stride 0")),
    "too-many-keys": (many_keys, INVALID_VALUE, ("k", "2147483654", "at most")),
    "q-int": (typed("q", 0, 32), INVALID_TYPE, ("q", "int32", "float16")),
    "q-complex": (typed("q", 5, 64), INVALID_TYPE, ("q", "complex64", "float16")),
    "q-float8": (typed("q", 2, 8), INVALID_TYPE, ("q", "float8", "float16")),
    "q-unknown-code": (typed("q", 200, 16), INVALID_TYPE, ("q", "200", "float16")),
    "k-lanes": (typed("k", 2, 16, 4), INVALID_TYPE, ("k", "float16x4", "float16")),
    "k-dtype": (typed("k", 4, 16), INVALID_TYPE, ("k", "bfloat16", "q", "float16")),
    "v-dtype": (typed("v", 2, 32), INVALID_TYPE, ("v", "float32", "q", "float16")),
    "out-dtype": (typed("out", 4, 16), INVALID_TYPE, ("out", "bfloat16", "q", "float16")),
    "out-double": (typed("out", 2, 64), INVALID_TYPE, ("out", "float64", "float32")),
    "lse-dtype": (typed("lse", 2, 16), INVALID_TYPE, ("lse", "float16", "float32")),
    "q-device": (on("q", METAL), INVALID_TYPE, ("q", "type metal", "CPU")),
    "out-device": (on("out", METAL), INVALID_TYPE, ("out", "type metal", "CPU")),
    "scale-nan": (scaled(math.nan), INVALID_VALUE, ("softmax_scale", "nan", "finite")),
    "scale-inf": (scaled(math.inf), INVALID_VALUE, ("softmax_scale", "inf", "finite")),
    "scale-minus-inf": (scaled(-math.inf), INVALID_VALUE, ("softmax_scale", "-inf", "finite")),
    "scale-too-large": (scaled(1e300), INVALID_VALUE, ("softmax_scale", "finite")),
    "threads": (option(num_threads=-1), INVALID_VALUE, ("num_threads", "-1")),
    "isa": (option(cpu_isa=99), INVALID_VALUE, ("cpu_isa", "99")),
    "options-size": (option(size=0), INVALID_VALUE, ("options", "0", "sizeof")),
}


def expect(error: CallError, status: int, parts: Sequence[str]) -> None:
    assert error.status == status, error
    assert re.match(r"anyflash_forward(_workspace_size)?: ", error.message), error
    pattern = ".*".join(rf"(?<!\w){re.escape(part)}(?!\w)" for part in parts)
    assert re.search(pattern, error.message), f"{error.message!r} does not match {pattern!r}"


def refused(
    backend: Backend,
    change: Callable[[Call], None],
    status: int,
    parts: Sequence[str],
    *,
    workspace: Callable[[int, int], tuple[int | None, int]] = lambda address, size: (address, size),
    dtype: str = "fp16",
    head_dim: int = 16,
) -> None:
    """Change the right call, and see that it is refused and that no byte is written."""
    case = Case("errors", dtype, 2, 5, 6, 8, 4, head_dim, 24)
    tensors = case.tensors()
    before = [tensor.storage.tobytes() for tensor in tensors]
    space = aligned_bytes(1 << 20)
    with backend.memory.resident([*(t.storage for t in tensors), space]) as (*addresses, last):
        dl = [
            capi.dl_tensor(tensor, address, backend.device)
            for tensor, address in zip(tensors, addresses, strict=True)
        ]
        call = Call(*dl, backend.options())
        change(call)
        if parts[0] != "workspace":
            with pytest.raises(CallError) as sizing:
                backend.library.workspace_size(call.tensors, call.options)
            expect(sizing.value, status, parts)
            size = len(space)
        else:
            size = backend.library.workspace_size(call.tensors, call.options)
            assert 0 < size <= len(space)
        with pytest.raises(CallError) as running:
            backend.library.forward(call.tensors, call.options, *workspace(last, size))
        expect(running.value, status, parts)
    assert before == [tensor.storage.tobytes() for tensor in tensors]
    assert (space == CANARY).all(), "the workspace was written to"


@pytest.mark.parametrize("wrong", WRONG)
def test_refused(backend: Backend, wrong: str) -> None:
    refused(backend, *WRONG[wrong])


@pytest.mark.parametrize("name", ["k", "v", "out", "lse"])
def test_devices_must_be_one(backend: Backend, name: str) -> None:
    names = {capi.KDL_CPU: "cpu", capi.KDL_CUDA: "cuda:0"}
    other = capi.KDL_CUDA if backend.is_cpu else capi.KDL_CPU
    parts = (name, names[other], "q", names[backend.device[0]])
    refused(backend, on(name, other), INVALID_VALUE, parts)


def strided(call: Call) -> None:
    """A k that CUDA kernels copy to the workspace."""
    assert call.k is not None
    call.k.strides = int64_array([6 * 4 * 16, 4 * 16, 1, 4])


@pytest.mark.parametrize("short", [1, 100, None])
def test_workspace_is_too_small(backend: Backend, short: int | None) -> None:
    def workspace(address: int, size: int) -> tuple[int, int]:
        return address, 0 if short is None else size - short

    refused(backend, strided, INVALID_VALUE, ("workspace", "bytes"), workspace=workspace)


def test_workspace_is_null(backend: Backend) -> None:
    def nowhere(_: int, size: int) -> tuple[None, int]:
        return None, size

    refused(backend, strided, INVALID_VALUE, ("workspace",), workspace=nowhere)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_dtypes_of_cuda(gpu: Backend, dtype: str) -> None:
    parts = ("q", {"fp32": "float32", "fp64": "float64"}[dtype], "float16", "bfloat16")
    refused(gpu, lambda _: None, INVALID_TYPE, parts, dtype=dtype)


def test_head_dims_of_cuda(gpu: Backend) -> None:
    refused(gpu, lambda _: None, UNSUPPORTED, ("head dim", "520", "512"), head_dim=520)


def test_bytes_is_null() -> None:
    library = capi.backend("cpu").library
    tensors = Case("errors", "fp32").tensors()
    dl = [capi.dl_tensor(t, t.storage.ctypes.data, (capi.KDL_CPU, 0)) for t in tensors]
    function = library.entry("anyflash_forward_workspace_size")
    assert function(*map(ctypes.byref, dl), None, None) == INVALID_VALUE
    assert "bytes" in library.last_error


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


Q, K, V = ones(2, 5, 8, 16), ones(2, 6, 4, 16), ones(2, 6, 4, 24)
OUT = (2, 5, 8, 24)
READ_ONLY = ones(*OUT)
READ_ONLY.flags.writeable = False

# Changed arguments of anyflash.attention, the exception, and what its message must contain.
WRONG_PYTHON: dict[str, tuple[dict[str, Any], type[Exception], Sequence[str]]] = {
    "heads": ({"k": ones(2, 6, 3, 16)}, ValueError, ("k has 3 heads", "does not divide q's 8")),
    "rank": ({"q": ones(2, 5, 8)}, ValueError, ("q", "3 dimensions", "4")),
    "k-shape": ({"k": ones(2, 6, 4, 8)}, ValueError, ("k", "2, 6, 4, 8", "2, 6, 4, 16")),
    "v-shape": ({"v": ones(2, 7, 4, 24)}, ValueError, ("v", "2, 7, 4, 24", "2, 6, 4, 24")),
    "k-dtype": ({"k": K.astype(np.float16)}, TypeError, ("k", "float16", "q", "float32")),
    "v-dtype": ({"v": V.astype(ml_dtypes.bfloat16)}, TypeError, ("v", "bfloat16", "float32")),
    "int": ({"q": Q.astype(np.int32)}, TypeError, ("q", "int32", "float32")),
    "uint16": ({"q": Q.astype(np.uint16)}, TypeError, ("q", "uint16", "float32")),
    "complex": ({"q": Q.astype(np.complex64)}, TypeError, ("q", "complex64", "float32")),
    "bool": ({"v": V.astype(bool)}, TypeError, ("v", "bool", "float32")),
    "object": ({"k": K.astype(object)}, TypeError, ("k",)),
    "float8": ({"q": Q.astype(ml_dtypes.float8_e4m3fn)}, TypeError, ("q", "float8_e4m3fn")),
    "list": ({"q": [[[[1.0]]]]}, TypeError, ("q", "list")),
    "none": ({"k": None}, TypeError, ("k", "NoneType")),
    "number": ({"v": 1.0}, TypeError, ("v", "float")),
    "scale-nan": ({"softmax_scale": math.nan}, ValueError, ("softmax_scale", "nan", "finite")),
    "scale-inf": ({"softmax_scale": math.inf}, ValueError, ("softmax_scale", "inf", "finite")),
    "scale-type": ({"softmax_scale": "1"}, TypeError, ("softmax_scale", "str")),
    "out-shape": ({"out": ones(2, 5, 8, 16)}, ValueError, ("out", "2, 5, 8, 16", "2, 5, 8, 24")),
    "out-dtype": ({"out": ones(*OUT, dtype=np.float16)}, TypeError, ("out", "float16", "float32")),
    "out-list": ({"out": []}, TypeError, ("out", "list")),
    "out-read-only": ({"out": READ_ONLY}, ValueError, ("out", "read-only")),
}


@pytest.mark.parametrize("wrong", WRONG_PYTHON)
def test_refused_by_python(wrong: str) -> None:
    changed, exception, parts = WRONG_PYTHON[wrong]
    arguments = {"q": Q, "k": K, "v": V, "out": np.full(OUT, 7, np.float32)} | changed
    given = arguments["out"]
    before = given.copy() if isinstance(given, np.ndarray) else None
    with pytest.raises(exception) as error:
        anyflash.attention(**arguments)
    message = str(error.value)
    assert message.startswith("anyflash.attention: "), message
    pattern = ".*".join(rf"(?<!\w){re.escape(part)}(?!\w)" for part in parts)
    assert re.search(pattern, message), f"{message!r} does not match {pattern!r}"
    if before is not None:
        np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("arguments", [(), (Q,), (Q, K), (Q, K, V, 1.0)])
def test_number_of_arguments(arguments: tuple[Array, ...]) -> None:
    """Everything after q, k, v is given by name."""
    with pytest.raises(TypeError):
        anyflash.attention(*arguments)


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        anyflash.attention(Q, K, V, is_causal=True)
