"""What anyflash asks of a framework, and the answers for any object that speaks DLPack."""

from __future__ import annotations

import importlib
import secrets
from array import array
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from anyflash import _core
from anyflash._call.overlap import Memory

if TYPE_CHECKING:
    import numpy.typing as npt

FLOATS = ("float64", "float32", "float16", "bfloat16")
BOOL = ("bool",)
INT32 = ("int32",)
INT64 = ("int64", "uint64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CACHES = (*FLOATS, "int8", *FLOAT8)
# DLPack's type codes of what is exported as unsigned integers.
DLPACK_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
BYTES = ("uint8", "bool")  # DLPack producers that tell no dtype: bool stands for both

# DLPack device types.
_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_OTHER_DEVICES = {
    4: "opencl",
    7: "vulkan",
    8: "metal",
    9: "vpi",
    10: "rocm",
    11: "rocm_host",
    12: "ext_dev",
    14: "oneapi",
    15: "webgpu",
    16: "hexagon",
    17: "maia",
    18: "trn",
}


class Device(NamedTuple):
    """``kind`` is 'cpu' or 'cuda'."""

    kind: str
    number: int


CPU = Device("cpu", 0)


class Instead(NamedTuple):
    """What a function says of arrays that autograd or a tracer has to see."""

    gradients: str = "anyflash.attention_backward computes the gradients of attention"
    traced: str = (
        "use anyflash.jax inside jax.jit, grad or vmap, or anyflash.attention_backward outside"
    )


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
        self._memory: Any = _core.new_array(shape, dtype, device.kind, device.number)

    @classmethod
    def around(cls, x: npt.NDArray[Any]) -> Array:
        """A NumPy array's memory."""
        array = cls.__new__(cls)
        array.shape = x.shape
        array.dtype = x.dtype.name
        array.device = CPU
        array._memory = x
        return array

    def fill(self, value: int) -> None:
        """Of int32, on the CPU."""
        memoryview(self._memory)[:] = array("i", [value]) * self.shape[0]

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._memory.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._memory.__dlpack_device__()
        return int(kind), number

    def __repr__(self) -> str:
        return f"anyflash.Array(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def listed(names: tuple[str, ...]) -> str:
    """'a, b and c are allowed'"""
    if len(names) == 1:
        return f"{names[0]} is allowed"
    return f"{', '.join(names[:-1])} and {names[-1]} are allowed"


def numpy_name(dtype: str) -> str:
    """NumPy knows bfloat16 only once ml_dtypes is there."""
    if dtype == "bfloat16":
        importlib.import_module("ml_dtypes")
    return dtype


class Framework:
    """Any object with ``__dlpack__`` and ``__dlpack_device__``."""

    name = "DLPack"
    # What is allowed in place of the framework's objects that are no arrays.
    arrays = (
        "arrays of NumPy, PyTorch, JAX, CuPy, TensorFlow, Paddle, or any object with __dlpack__ "
        "and __dlpack_device__ are allowed"
    )
    as_bits: tuple[str, ...] = ()  # dtypes that ``export`` shows as unsigned integers
    to_int32 = ""  # the method call that converts an array

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        """Shape, the dtype's name and device of an array.

        Raises TypeError or NotImplementedError for one that may not be read, with what ``instead``
        says.
        """
        # An object that is only known to speak DLPack need not have these as attributes.
        device = self.device(x)
        if device.kind == "cpu":
            return *_core.describe(x), device
        capsule = x.__dlpack__(stream=-1)
        if type(capsule).__name__ != "PyCapsule":
            raise TypeError(
                f"cannot be read through DLPack: its __dlpack__ gives {type(capsule).__name__}, "
                "no capsule of a tensor"
            )
        return *_core.describe(capsule), device

    def device(self, x: Any) -> Device:
        kind, index = x.__dlpack_device__()
        if int(kind) in _CPU_DEVICES:
            return CPU
        if int(kind) in _CUDA_DEVICES:
            return Device("cuda", index)
        name = _OTHER_DEVICES.get(int(kind), f"DLPack {int(kind)}")
        raise TypeError(f"is on a device of type {name}; CPU and CUDA are allowed")

    def stream(self, x: Any, device: Device) -> int:
        """The framework's current stream, as cudaStream_t."""
        return 0

    def check_stream(self, stream: int) -> None:
        """Raises ValueError for a stream of a GPU that arrays cannot be made ready for."""

    def export(self, x: Any, device: Device, stream: int | None) -> Any:
        """What the binding reads: a capsule, or x itself.

        ``stream`` is the stream that the user named, if any: then x is made ready for it.
        """
        if device.kind == "cpu":
            return x
        return x.__dlpack__(stream=stream or 1)  # 1: the legacy default stream

    def check_out(self, x: Any) -> None:
        """Raises TypeError or ValueError for a user's array that may not be written."""

    def memory(self, x: Any) -> Memory | None:
        """Where x lies, if that can be asked."""
        return None

    def lie_apart(self, written: Collection[Any], read: Collection[Any]) -> bool:
        """Whether a quick look shows that what is written shares no memory with any other of these;
        else `memory` tells."""
        ends = [self.ends(x) for x in (*written, *read)]
        for i, (first, end) in enumerate(ends[: len(written)]):
            if any(first < other_end and other < end for other, other_end in ends[i + 1 :]):
                return False
        return True

    def ends(self, x: Any) -> tuple[int, int]:
        """The addresses of x's first byte and of the one behind its last; (0, 0) if unknown."""
        memory = self.memory(x)
        return (0, 0) if memory is None else memory.ends()

    def check_cache(self, x: Any) -> None:
        """Likewise for a cache that new keys or values are appended to."""
        self.check_out(x)

    def export_out(self, x: Any, device: Device) -> Any:
        """``export`` for an array that is written. Work is ordered by the stream alone."""
        return x if device.kind == "cpu" else x.__dlpack__(stream=-1)

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        """An uninitialised array; dtype None: like's."""
        return Array(shape, dtype or self.read(like, Instead())[1], device)

    def finish(self, result: Any) -> Any:
        """Turns what ``empty`` gave into the framework's array."""
        return result

    def workspace(
        self, size: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, int]:
        """GPU memory and its address, which the framework will not reuse before the work on its
        current stream, or on ``stream``, is done.

        What only speaks DLPack cannot allocate: here anyflash does. To free this memory waits for
        the GPU.
        """
        memory = Array((size,), "int8", device)
        return memory, _core.address(memory)

    def lengths(
        self, count: int, value: int, like: Any, device: Device, stream: int | None
    ) -> tuple[Any, Any]:
        """(owner, exported) of an array of int32 that holds ``value`` ``count`` times."""
        if device.kind != "cpu":
            raise NotImplementedError(
                f"is an int, which {type(like).__name__} cannot bring to a GPU; an array of int32 "
                "is allowed"
            )
        numbers = Array((count,), INT32[0], device)
        numbers.fill(value)
        return numbers, numbers

    def draw_seed(self) -> int:
        """A seed for dropout; repeatable where the framework has a generator that can be seeded
        and read without waiting for a device."""
        return secrets.randbits(63)

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        """A NumPy array as one of the framework, on like's device."""
        device = self.device(like)
        if device.kind != "cpu":
            raise NotImplementedError(
                f"is a {type(like).__name__} on a GPU; arrays of NumPy, PyTorch, JAX and CuPy, and "
                "others on the CPU, are allowed"
            )
        return Array.around(x)


class WithAttributes(Framework):
    """Arrays with ``shape`` and ``dtype``."""

    to_int32 = ".astype('int32')"

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        return tuple(x.shape), x.dtype.name, self.device(x)


class Immutable(WithAttributes):
    """Results are new arrays, in memory that anyflash allocated."""

    array = ""  # what one is called

    def check_out(self, x: Any) -> None:
        raise TypeError(f"is {self.array}, which is immutable; leave it away and use the result")

    def check_cache(self, x: Any) -> None:
        raise TypeError(
            f"is {self.array}, which is immutable, and k is written to it; append to the cache "
            "before the call, and leave k and v away"
        )

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        return Array(shape, dtype or like.dtype.name, device)
