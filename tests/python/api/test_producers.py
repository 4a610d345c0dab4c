"""anyflash.attention with arrays of no framework that it knows, only with DLPack."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from backends import capi
from calls.frameworks import (
    OldProducer,
    Producer,
    bits,
    from_torch,
    inputs,
    to_torch,
    views,
)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_producer(kind: type[Producer], dtype: str) -> None:
    arrays = inputs(dtype)
    out, lse = anyflash.attention(*map(kind, arrays), causal=True, return_lse=True)
    assert isinstance(out, anyflash.Array)
    assert isinstance(lse, anyflash.Array)
    assert (out.shape, out.dtype, lse.dtype) == ((2, 30, 4, 12), dtype, "float32")
    assert tuple(out.device) == ("cpu", 0)
    assert out.__dlpack_device__() == (capi.KDL_CPU, 0)
    expected, expected_lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    assert bits(np.from_dlpack(out)) == bits(expected)
    assert bits(np.from_dlpack(lse)) == bits(expected_lse)


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_producer_of_bfloat16(torch: ModuleType, kind: type[Producer]) -> None:
    arrays = inputs("bfloat16")
    out = anyflash.attention(*(kind(to_torch(torch, x)) for x in arrays))
    assert isinstance(out, anyflash.Array)
    assert out.dtype == "bfloat16"
    expected = anyflash.attention(*arrays)
    assert bits(from_torch(torch, torch.from_dlpack(out))) == bits(expected)


def test_producer_strides() -> None:
    q, k, v = inputs()
    given = [Producer(views(x)["bhsd"]) for x in (q, k, v)]
    result = np.from_dlpack(anyflash.attention(*given))
    np.testing.assert_array_equal(result, anyflash.attention(q, k, v))


def test_read_only_producer() -> None:
    """A versioned capsule can say that it is read-only: fine for inputs, not for out."""
    q, k, v = inputs()
    frozen = [views(x)["read-only"] for x in (q, k, v)]
    result = np.from_dlpack(anyflash.attention(*map(Producer, frozen)))
    expected = anyflash.attention(q, k, v)
    np.testing.assert_array_equal(result, expected)
    out = np.zeros_like(expected)
    out.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=r"anyflash\.attention: out .*read-only"):
        anyflash.attention(*map(Producer, frozen), out=Producer(out))
    assert not out.any()


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_out_of_a_producer(kind: type[Producer]) -> None:
    arrays = inputs()
    expected = anyflash.attention(*arrays)
    memory = np.zeros_like(expected)
    out = kind(memory)
    assert anyflash.attention(*map(kind, arrays), out=out) is out
    np.testing.assert_array_equal(memory, expected)


def test_results_go_in_again() -> None:
    """anyflash.Array is a producer itself."""
    q, k, _ = inputs()
    out = anyflash.attention(Producer(q), Producer(k), Producer(k))
    again = anyflash.attention(out, out, out)
    expected = anyflash.attention(q, k, k)
    expected = anyflash.attention(expected, expected, expected)
    np.testing.assert_array_equal(np.from_dlpack(again), expected)


def test_result_keeps_its_memory() -> None:
    arrays = inputs()
    result = np.from_dlpack(anyflash.attention(*map(Producer, arrays)))
    for seed in range(20):  # would reuse freed memory
        anyflash.attention(*map(Producer, inputs(seed=seed + 1)))
    np.testing.assert_array_equal(result, anyflash.attention(*arrays))


def test_reference_counts() -> None:
    q, k, v = inputs()
    given = [q, k, v, Producer(q), Producer(k), Producer(v)]
    before = [sys.getrefcount(x) for x in given]
    for _ in range(10):
        anyflash.attention(q, k, v, return_lse=True)
        anyflash.attention(*given[3:], return_lse=True)
    assert [sys.getrefcount(x) for x in given] == before


def test_unknown_device() -> None:
    class OnMetal(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)

    q, k, v = map(OnMetal, inputs())
    with pytest.raises(TypeError, match=r"anyflash\.attention: q .*of type metal"):
        anyflash.attention(q, k, v)


@pytest.mark.skipif(bool(anyflash.build_info()["devices"]), reason="this machine has a GPU")
def test_cuda_array_without_a_gpu() -> None:
    class OnCuda(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return self.x.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (capi.KDL_CUDA, 0)

    q, k, v = map(OnCuda, inputs("float16"))
    lacking = "no NVIDIA driver|driver supports|no CUDA device|has no CUDA kernels"
    with pytest.raises((RuntimeError, NotImplementedError), match=lacking) as caught:
        anyflash.attention(q, k, v)
    assert str(caught.value).startswith("anyflash.attention: ")


def test_producer_that_fails() -> None:
    class Broken(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            raise BufferError("nothing here")

    q, k, v = inputs()
    with pytest.raises((TypeError, BufferError), match=r"(?s)anyflash.*q .*|nothing here"):
        anyflash.attention(Broken(q), Producer(k), Producer(v))
