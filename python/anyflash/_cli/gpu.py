"""Attention of NumPy's arrays on a GPU, where no framework is installed that holds arrays there.

anyflash allocates the memory, as it does for results of arrays that only speak DLPack; the CUDA
driver copies. Kernels are given bfloat16, which every build for GPUs has them for.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import anyflash
from anyflash import _core
from anyflash._arrays.base import Device

Array: TypeAlias = npt.NDArray[Any]


def to_bfloat16(x: Array) -> Array:
    """The bits of x, rounded to the nearest (ties to even): NumPy has no such dtype."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def rounded(x: Array) -> Array:
    """x as the kernels see it, in float32."""
    return (to_bfloat16(x).astype(np.uint32) << 16).view(np.float32)


class Gpu:
    """A GPU by the number that ``build_info`` gives it; OSError or RuntimeError where the driver
    does not serve."""

    def __init__(self, index: int) -> None:
        self._device = Device("cuda", index)
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        # The CUDA runtime, by which anyflash allocates and launches, uses this context, too.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        """anyflash.attention of float32, which is rounded to bfloat16; the result is not."""
        tensors = map(self._upload, (q, k, v))
        return self._download(anyflash.attention(*tensors, out_dtype="float32"))

    def _upload(self, x: Array) -> anyflash.Array:
        bits = to_bfloat16(x)
        target = anyflash.Array(bits.shape, "bfloat16", self._device)
        source, size = ctypes.c_void_p(bits.ctypes.data), ctypes.c_size_t(bits.nbytes)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(_core.address(target)), source, size)
        return target

    def _download(self, x: Any) -> Array:
        """Waits for the kernel: both are on the default stream."""
        result = np.empty(x.shape, np.float32)
        target, size = ctypes.c_void_p(result.ctypes.data), ctypes.c_size_t(result.nbytes)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(_core.address(x)), size)
        return result
