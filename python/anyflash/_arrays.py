"""Frameworks: how each one's arrays are read, allocated and ordered. No framework is imported here
unless one of its arrays was passed."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from anyflash import _core

# Order of the DType enumeration of tensor_view.h.
_DTYPES = ("float64", "float32", "float16", "bfloat16")

# DLPack device types.
_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


class Device(NamedTuple):
    """``kind`` is 'cpu' or 'cuda'."""

    kind: str
    number: int


_CPU = Device("cpu", 0)


class Array:
    """Memory that anyflash allocated, for inputs whose framework cannot allocate.

    Speaks DLPack: ``numpy.from_dlpack(array)``, ``torch.from_dlpack(array)`` and the like take it
    without a copy. ``shape`` is a tuple of int, ``dtype`` a name ("float32"), ``device`` a pair
    (kind, index).
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: Device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._memory = _core.new_array(
            shape, _DTYPES.index(dtype), 0 if device.kind == "cpu" else 1, device.number
        )

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._memory.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._memory.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"anyflash.Array(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class Framework:
    """Any object with ``__dlpack__`` and ``__dlpack_device__``."""

    name = "DLPack"

    def device(self, x: Any) -> Device:
        kind, index = x.__dlpack_device__()
        if int(kind) in _CPU_DEVICES:
            return _CPU
        if int(kind) in _CUDA_DEVICES:
            return Device("cuda", index)
        raise TypeError(f"is on a device of DLPack type {int(kind)}; CPU and CUDA are allowed")

    def check(self, x: Any) -> None:
        """Raises TypeError or NotImplementedError for arrays that may not be read."""

    def describe(self, x: Any, device: Device) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype."""
        # An object that is only known to speak DLPack need not have these as attributes.
        return _core.describe(x if device.kind == "cpu" else x.__dlpack__(stream=-1))

    def bf16_bits(self, x: Any) -> bool:
        """Whether ``export`` shows x's bfloat16 elements as uint16."""
        return False

    def stream(self, x: Any, device: Device) -> int:
        """The framework's current stream, as cudaStream_t."""
        return 0

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        """What the binding reads: a capsule, or x itself.

        ``stream`` is the stream that the user named, if any: then x is made ready for it.
        """
        if device.kind == "cpu":
            return x
        return x.__dlpack__(stream=stream or 1)  # 1: the legacy default stream

    def check_out(self, x: Any) -> None:
        """Raises TypeError or ValueError for a user's array that may not be written."""

    def export_out(self, x: Any, device: Device) -> Any:
        """``export`` for an array that is written. Work is ordered by the stream alone."""
        return x if device.kind == "cpu" else x.__dlpack__(stream=-1)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        """An uninitialised array; dtype None: like's."""
        return Array(shape, dtype or self.describe(like, device)[1], device)

    def finish(self, result: Any) -> Any:
        """Turns what ``empty`` gave into the framework's array."""
        return result

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        """GPU memory and its address, which the framework will not reuse before the work on its
        current stream, or on ``stream``, is done."""
        raise NotImplementedError(
            f"{type(like).__name__} cannot allocate GPU memory for anyflash; this problem needs "
            f"{size} bytes of workspace because an array's rows do not begin at multiples of 16 "
            "bytes; pass contiguous arrays with a head dim that is a multiple of 8"
        )


class _WithAttributes(Framework):
    """Arrays with ``shape`` and ``dtype``."""

    def describe(self, x: Any, device: Device) -> tuple[tuple[int, ...], Any]:
        return tuple(x.shape), x.dtype


class NumPy(_WithAttributes):
    name = "NumPy"

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}  # dtypes that were checked: is it bfloat16?

    def device(self, x: Any) -> Device:
        return _CPU

    def check(self, x: Any) -> None:
        dtype = x.dtype
        if dtype in self._known:
            return
        if dtype.name not in _DTYPES:
            raise TypeError(f"is {dtype.name}; {_allowed()}")
        if not dtype.isnative:
            raise TypeError(f"is {dtype} with foreign byte order; {_allowed()} in native order")
        self._known[dtype] = dtype.name == "bfloat16"

    def bf16_bits(self, x: Any) -> bool:
        return self._known.get(x.dtype, False)

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        return x.view("uint16") if self.bf16_bits(x) else x

    def check_out(self, x: Any) -> None:
        if not x.flags.writeable:
            raise ValueError("is read-only")

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        return sys.modules["numpy"].empty(shape, dtype or like.dtype)


class Torch(_WithAttributes):
    name = "PyTorch"

    def device(self, x: Any) -> Device:
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"is on {x.device}; CPU and CUDA tensors are allowed")
        return Device(x.device.type, x.device.index or 0)

    def check(self, x: Any) -> None:
        torch = sys.modules["torch"]
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "requires grad, and anyflash.attention has no gradient yet; use torch.no_grad(), "
                "or detach() the tensor"
            )
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise TypeError(f"is a tensor of layout {x.layout}; plain strided tensors are allowed")

    def stream(self, x: Any, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        stream: int = sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
        return stream

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        if x.requires_grad:  # within torch.no_grad()
            x = x.detach()
        if stream is not None and device.kind == "cuda":
            return x.__dlpack__(stream=stream or 1)
        # Without synchronisation: the kernels run on torch's own current stream. 3 us less than
        # Tensor.__dlpack__.
        return sys.modules["torch"].utils.dlpack.to_dlpack(x)

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype) if dtype else like.dtype
        return torch.empty(shape, dtype=kind, device=like.device)

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        torch = sys.modules["torch"]
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        if stream is not None:
            memory.record_stream(torch.cuda.ExternalStream(stream, device=like.device))
        return memory, memory.data_ptr()


class CuPy(_WithAttributes):
    name = "CuPy"

    def device(self, x: Any) -> Device:
        return Device("cuda", x.device.id)

    def check(self, x: Any) -> None:
        if x.dtype.name not in _DTYPES:
            raise TypeError(f"is {x.dtype.name}; {_allowed()}")

    def stream(self, x: Any, device: Device) -> int:
        stream: int = sys.modules["cupy"].cuda.get_current_stream(device.number).ptr
        return stream

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        return x.__dlpack__(stream=-1 if stream is None else stream or 1)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device.number):
            return cupy.empty(shape, dtype or like.dtype)

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device.number):
            # Its pool keeps memory apart by the stream that is current at the allocation.
            current = cuda.get_current_stream() if stream is None else cuda.ExternalStream(stream)
            with current:
                memory = sys.modules["cupy"].empty(size, "uint8")
        return memory, memory.data.ptr


class Jax(_WithAttributes):
    """Concrete arrays on the CPU. They are immutable: results are new arrays."""

    name = "JAX"

    def device(self, x: Any) -> Device:
        return _CPU

    def check(self, x: Any) -> None:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                "is a JAX tracer; anyflash.attention does not run inside jax.jit, grad or vmap yet"
            )
        devices = x.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu":
            raise NotImplementedError(
                "is a JAX array that is not on one CPU device; anyflash.attention takes JAX arrays "
                "on the CPU only"
            )
        x.block_until_ready()

    def check_out(self, x: Any) -> None:
        raise TypeError("is a JAX array, which is immutable; leave out= away and use the result")

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        return Array(shape, dtype or like.dtype.name, device)

    def finish(self, result: Any) -> Any:
        return sys.modules["jax"].dlpack.from_dlpack(result)


_FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(),
    "torch": Torch(),
    "cupy": CuPy(),
    "jax": Jax(),
    "jaxlib": Jax(),
}
_OTHER = Framework()


_by_type: dict[type, Framework | None] = {}


def _framework_of_type(kind: type) -> Framework | None:
    for base in kind.__mro__:  # subclasses of a framework's array count
        framework = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None and hasattr(base, "__dlpack__"):
            return framework
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _OTHER
    return None


def framework_of(x: Any) -> Framework:
    """The framework that x belongs to; TypeError for what is not an array."""
    kind = type(x)
    if kind not in _by_type:
        _by_type[kind] = _framework_of_type(kind)
    framework = _by_type[kind]
    if framework is None:
        raise TypeError(
            f"is {type(x).__name__}; arrays of NumPy, PyTorch, JAX, CuPy, or any object with "
            "__dlpack__ and __dlpack_device__ are allowed"
        )
    return framework


def _allowed() -> str:
    return "float64, float32, float16 and bfloat16 are allowed"
