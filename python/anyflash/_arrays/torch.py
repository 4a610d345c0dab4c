"""PyTorch's tensors, where nothing but the kernel has a part in the work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, FLOAT8, Device, Instead, WithAttributes
from anyflash._call.overlap import Memory

if TYPE_CHECKING:
    import numpy.typing as npt


_LEGACY_STREAMS = (0, 1)  # cudaStreamLegacy is 1
_PER_THREAD_STREAM = 2  # cudaStreamPerThread


class Torch(WithAttributes):
    name = "PyTorch"
    as_bits = FLOAT8  # which DLPack export knows only in some of the versions that have it
    to_int32 = ".to(torch.int32)"

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        # DLPack export knows bool only from torch 2.2 on.
        self._views: dict[Any, Any] = {}

    def device(self, x: Any) -> Device:
        if x.is_cpu:
            return CPU
        device = x.device
        if device.type != "cuda":
            raise TypeError(f"is on {device}; CPU and CUDA tensors are allowed")
        return Device("cuda", device.index or 0)

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        torch = sys.modules["torch"]
        if x.requires_grad:
            _refuse_gradients(instead.gradients)
        if x.is_nested:
            raise TypeError(
                "is a nested tensor; use anyflash.torch.attention_varlen, with its sequences packed"
            )
        if x.layout is not torch.strided:
            raise TypeError(f"is a tensor of layout {x.layout}; plain strided tensors are allowed")
        if x.is_conj() or x.is_neg():
            raise TypeError(
                "is a conjugate or a negative that was never computed; what its resolve_conj() or "
                "resolve_neg() gives is allowed"
            )
        dtype = x.dtype
        return tuple(x.shape), self._names.get(dtype) or self._name(torch, dtype), self.device(x)

    def _name(self, torch: Any, dtype: Any) -> str:
        name = self._names[dtype] = str(dtype).removeprefix("torch.")
        as_bytes = (getattr(torch, kind, None) for kind in ("bool", *FLOAT8))
        self._views = dict.fromkeys(as_bytes, torch.uint8)
        return name

    def stream(self, x: Any, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
        return stream

    def check_stream(self, stream: int) -> None:
        if stream == _PER_THREAD_STREAM:
            raise ValueError(
                "is 2, CUDA's per-thread default stream, which PyTorch does not know; the address "
                "of another stream is allowed"
            )

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        torch = sys.modules["torch"]
        if x.requires_grad:  # within torch.no_grad()
            x = x.detach()
        view = self._views.get(x.dtype)
        if view is not None:
            x = x.view(view)
        if stream is not None and device.kind == "cuda":
            return x.__dlpack__(stream=stream or 1)
        # Without synchronisation: the kernels run on torch's own current stream. 3 us less than
        # Tensor.__dlpack__.
        return torch.utils.dlpack.to_dlpack(x)

    def memory(self, x: Any) -> Memory:
        size = x.element_size()
        strides = tuple(stride * size for stride in x.stride())
        return Memory(x.data_ptr(), tuple(x.shape), strides, size)

    def ends(self, x: Any) -> tuple[int, int]:
        if not x.is_contiguous():
            return super().ends(x)
        first = x.data_ptr()
        return first, first + x.nbytes

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        if dtype is None:
            return like.new_empty(shape)
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        torch = sys.modules["torch"]
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        if stream is not None:
            memory.record_stream(_stream(torch, stream, like.device))
        return memory, memory.data_ptr()

    def lengths(
        self, count: int, value: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, Any]:
        if device.kind == "cpu":
            return super().lengths(count, value, like, device, stream)
        torch = sys.modules["torch"]
        numbers = torch.full((count,), value, dtype=torch.int32, device=like.device)
        if stream is not None:
            numbers.record_stream(_stream(torch, stream, like.device))
        return numbers, self.export(numbers, device, stream)

    def draw_seed(self) -> int:
        torch = sys.modules["torch"]  # its default generator is the CPU's
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["torch"].from_numpy(x).to(like.device)


def _stream(torch: Any, handle: int, device: Any) -> Any:
    """PyTorch's object for a cudaStream_t."""
    if handle in _LEGACY_STREAMS:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def _refuse_gradients(instead: str) -> None:
    """Where they would be recorded."""
    from anyflash.torch._dispatch_state import is_grad_enabled

    if is_grad_enabled():
        raise NotImplementedError(
            "requires grad, and nothing is recorded for autograd here; use torch.no_grad(), or "
            f"detach() the tensor; {instead}"
        )
