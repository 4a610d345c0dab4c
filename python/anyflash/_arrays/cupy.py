"""CuPy's arrays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import FLOAT8, Device, WithAttributes, numpy_name
from anyflash._call.overlap import Memory

if TYPE_CHECKING:
    import numpy.typing as npt


class CuPy(WithAttributes):
    name = "CuPy"
    as_bits = ("bfloat16", *FLOAT8)

    def device(self, x: Any) -> Device:
        return Device("cuda", x.device.id)

    def stream(self, x: Any, device: Device) -> int:
        stream: int = sys.modules["cupy"].cuda.get_current_stream(device.number).ptr
        return stream

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        # bool is not known to older DLPack exports, ml_dtypes' to none before CuPy 14.1.
        if x.dtype.kind not in "iuf":
            x = x.view(f"uint{8 * x.dtype.itemsize}")
        return x.__dlpack__(stream=-1 if stream is None else stream or 1)

    def memory(self, x: Any) -> Memory:
        return Memory(x.data.ptr, x.shape, x.strides, x.itemsize)

    def ends(self, x: Any) -> tuple[int, int]:
        if not x.flags.c_contiguous:
            return super().ends(x)
        first = x.data.ptr
        return first, first + x.nbytes

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device.number):
            return cupy.empty(shape, numpy_name(dtype) if dtype else like.dtype)

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        with self._on(device, stream):
            memory = sys.modules["cupy"].empty(size, "uint8")
        return memory, memory.data.ptr

    def lengths(
        self, count: int, value: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, Any]:
        with self._on(device, stream):
            numbers = sys.modules["cupy"].full(count, value, "int32")
        return numbers, self.export(numbers, device, None)

    @contextlib.contextmanager
    def _on(self, device: Device, stream: int | None) -> Iterator[None]:
        """What is allocated within belongs to the stream: the pool keeps memory apart by the one
        that is current at the allocation."""
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device.number):
            current = cuda.get_current_stream() if stream is None else cuda.ExternalStream(stream)
            with current:
                yield

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device.id):
            return cupy.asarray(x)
