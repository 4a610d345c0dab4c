"""Frameworks: how each one's arrays are read, allocated and ordered. No framework is imported here
unless one of its arrays was passed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, FLOAT8, Device, Framework, Immutable, WithAttributes
from anyflash._arrays.paddle import Paddle
from anyflash._arrays.tensorflow import TensorFlow

if TYPE_CHECKING:
    import numpy.typing as npt


def _named(dtype: str) -> str:
    """NumPy knows bfloat16 only once ml_dtypes is there."""
    if dtype == "bfloat16":
        importlib.import_module("ml_dtypes")
    return dtype


class _Interface:
    """What NumPy makes an array of: a read-only one's memory, as if it could be written."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self.x = x
        address, _ = x.__array_interface__["data"]
        self.__array_interface__ = {**x.__array_interface__, "data": (address, False)}


def _writable(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = sys.modules["numpy"].asarray(_Interface(x))
    return result


class NumPy(WithAttributes):
    name = "NumPy"
    as_bits = ("bfloat16", FLOAT8)

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # of the dtypes that were checked
        # DLPack export knows neither of ml_dtypes', and bool only from NumPy 1.25 on.
        self._views: dict[Any, str] = {}
        self._exports_read_only = False

    def device(self, x: Any) -> Device:
        return CPU

    def read(self, x: Any, gradients: str) -> tuple[tuple[int, ...], str, Device]:
        dtype = x.dtype
        return x.shape, self._names.get(dtype) or self._name(dtype), CPU

    def _name(self, dtype: Any) -> str:
        if not dtype.isnative:
            raise TypeError(f"is {dtype} with foreign byte order; the native order is allowed")
        name: str = dtype.name
        self._names[dtype] = name
        version = sys.modules["numpy"].lib.NumpyVersion(sys.modules["numpy"].__version__)
        self._exports_read_only = version >= "2.1.0"
        if name in ("bfloat16", FLOAT8, "bool"):
            self._views[dtype] = "uint16" if name == "bfloat16" else "uint8"
        return name

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        view = self._views.get(x.dtype)
        if view is not None:
            x = x.view(view)
        return x if self._exports_read_only or x.flags.writeable else _writable(x)

    def check_out(self, x: Any) -> None:
        if not x.flags.writeable:
            raise ValueError("is read-only")

    def export_out(self, x: Any, device: Device) -> Any:
        # A capsule without a version: `check_out` has seen whether x is read-only.
        return self.export(x, device, None).__dlpack__()

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        numpy = sys.modules["numpy"]
        if dtype is None:
            return numpy.empty(shape, like.dtype)
        result = numpy.empty(shape, _named(dtype))
        self.read(result, "")  # a dtype that is exported as another one is now known
        return result

    def draw_seed(self) -> int:
        return int(sys.modules["numpy"].random.randint(0, 2**63 - 1, dtype="int64"))

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return x


class Torch(WithAttributes):
    name = "PyTorch"
    as_bits = (FLOAT8,)  # which DLPack export knows only in some of the versions that have it
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

    def read(self, x: Any, gradients: str) -> tuple[tuple[int, ...], str, Device]:
        torch = sys.modules["torch"]
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "requires grad, and nothing is recorded for autograd here; use "
                f"torch.no_grad(), or detach() the tensor; {gradients}"
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
        self._views = {torch.bool: torch.uint8, getattr(torch, FLOAT8, None): torch.uint8}
        return name

    def stream(self, x: Any, device: Device) -> int:
        if device.kind == "cpu":
            return 0
        stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(x.get_device())
        return stream

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
            memory.record_stream(torch.cuda.ExternalStream(stream, device=like.device))
        return memory, memory.data_ptr()

    def lengths(
        self, count: int, value: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, Any]:
        if device.kind == "cpu":
            return super().lengths(count, value, like, device, stream)
        torch = sys.modules["torch"]
        numbers = torch.full((count,), value, dtype=torch.int32, device=like.device)
        if stream is not None:
            numbers.record_stream(torch.cuda.ExternalStream(stream, device=like.device))
        return numbers, self.export(numbers, device, stream)

    def draw_seed(self) -> int:
        torch = sys.modules["torch"]  # its default generator is the CPU's
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["torch"].from_numpy(x).to(like.device)


class CuPy(WithAttributes):
    name = "CuPy"
    as_bits = ("bfloat16", FLOAT8)

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

    def export_out(self, x: Any, device: Device) -> Any:
        return self.export(x, device, None)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device.number):
            return cupy.empty(shape, _named(dtype) if dtype else like.dtype)

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


class Jax(Immutable):
    """Concrete arrays on the CPU."""

    name = "JAX"
    array = "a JAX array"

    def read(self, x: Any, gradients: str) -> tuple[tuple[int, ...], str, Device]:
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                "is a JAX tracer; anyflash does not run inside jax.jit, grad or vmap yet, on "
                f"concrete arrays only; {gradients}"
            )
        devices = x.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu":
            raise NotImplementedError(
                "is a JAX array that is not on one CPU device; anyflash takes JAX arrays on the "
                "CPU only"
            )
        x.block_until_ready()
        return x.shape, x.dtype.name, CPU

    def finish(self, result: Any) -> Any:
        return sys.modules["jax"].dlpack.from_dlpack(result)

    def draw_seed(self) -> int:
        raise ValueError(
            "needs a seed: JAX has no global random state to draw one from; pass seed=<int>, for "
            "example int(jax.random.bits(key, dtype='uint32')), or rng_state=(seed, offset)"
        )

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(x, device=next(iter(like.devices())))


_FRAMEWORKS: dict[str, Framework] = {
    "numpy": NumPy(),
    "torch": Torch(),
    "cupy": CuPy(),
    "jax": (_jax := Jax()),
    "jaxlib": _jax,
    "tensorflow": TensorFlow(),
    "paddle": Paddle(),
}
_OTHER = Framework()


_by_type: dict[type, Framework] = {}


def _framework_of_type(kind: type) -> Framework:
    nearest = _OTHER
    for base in kind.__mro__:  # subclasses of a framework's array count
        framework = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if framework is not None and hasattr(base, "__dlpack__"):
            return framework
        nearest = framework or nearest
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _OTHER
    raise TypeError(f"is {kind.__name__}; {nearest.arrays}")


def framework_of(x: Any) -> Framework:
    """The framework that x belongs to; TypeError for what is not an array."""
    framework = _by_type.get(type(x))
    if framework is None:
        framework = _by_type[type(x)] = _framework_of_type(type(x))
    return framework


def dtype_name(dtype: Any) -> str:
    """Of a dtype object of any framework, or of a name."""
    if isinstance(dtype, str):
        return dtype
    # torch.float32 has neither attribute; numpy.float32 is a class; paddle.float32 is in capitals.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.").lower()
