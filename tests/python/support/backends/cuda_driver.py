"""Device memory through the CUDA driver: blocks of the exact size, for memory checkers."""

from __future__ import annotations

import ctypes
from typing import Any

from oracle.attention import Array


class DriverError(Exception):
    pass


class CudaDriver:
    """The primary context of device 0, which the CUDA runtime uses too."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(str(error)) from error
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise DriverError(f"{name} returned {status}")

    def compute_capability(self) -> tuple[int, int]:
        def attribute(number: int) -> int:
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
            return value.value

        return attribute(75), attribute(76)

    def allocate(self, size: int) -> int:
        block = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(max(size, 1)))
        return block.value

    def free(self, block: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(block))

    def upload(self, block: int, host: Array) -> None:
        source = ctypes.c_void_p(host.ctypes.data)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(block), source, ctypes.c_size_t(host.nbytes))

    def download(self, host: Array, block: int) -> None:
        target = ctypes.c_void_p(host.ctypes.data)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(block), ctypes.c_size_t(host.nbytes))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")
