"""Paddle's arrays: dense tensors of its dynamic mode."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, Device, Instead, WithAttributes
from anyflash._call.overlap import Memory

if TYPE_CHECKING:
    import numpy.typing as npt


class Paddle(WithAttributes):
    name = "Paddle"
    arrays = "tensors of the dynamic mode are allowed"

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def device(self, x: Any) -> Device:
        place = x.place
        if place.is_cpu_place():
            return CPU
        if not place.is_gpu_place():
            raise TypeError(f"is on {place}; CPU and GPU tensors are allowed")
        return Device("cuda", place.gpu_device_id())

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        if not x.stop_gradient and sys.modules["paddle"].is_grad_enabled():
            raise NotImplementedError(
                "wants a gradient (its stop_gradient is False), and anyflash records nothing for "
                "Paddle's autograd; use paddle.no_grad(), or detach() the tensor; "
                f"{instead.gradients}"
            )
        if x.is_sparse() or x.is_dist():
            raise TypeError("is a sparse or distributed tensor; dense tensors are allowed")
        dtype = x.dtype
        name = self._names.get(dtype)
        if name is None:
            name = self._names[dtype] = dtype.name.lower()
        return tuple(x.shape), name, self.device(x)

    def stream(self, x: Any, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        current = sys.modules["paddle"].device.current_stream(f"gpu:{device.number}")
        stream: int = current.stream_base.cuda_stream
        return stream

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        if not x.stop_gradient:  # within paddle.no_grad()
            x = x.detach()
        if device.kind == "cpu":
            return x
        return x.__dlpack__(stream=-1 if stream is None else stream or 1)

    def memory(self, x: Any) -> Memory:
        size = x.element_size()
        strides = tuple(stride * size for stride in x.strides)
        return Memory(x.data_ptr(), tuple(x.shape), strides, size)

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        return sys.modules["paddle"].empty(shape, dtype=dtype or like.dtype, device=like.place)

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        if stream is not None:
            raise NotImplementedError(
                f"this call needs {size} bytes of workspace, which Paddle allocates for its "
                "current stream only; leave stream away, and make yours the current one"
            )
        memory = self.empty((size,), like, "uint8", device)
        return memory, memory.data_ptr()

    def lengths(
        self, count: int, value: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, Any]:
        if device.kind == "cpu":
            return super().lengths(count, value, like, device, stream)
        paddle = sys.modules["paddle"]
        numbers = paddle.to_tensor([value] * count, dtype="int32", place=like.place)
        return numbers, self.export(numbers, device, stream)

    def draw_seed(self) -> int:
        generator = sys.modules["paddle"].framework.core.default_cpu_generator()
        return int(generator.random())

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["paddle"].to_tensor(x, place=like.place)
