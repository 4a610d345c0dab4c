"""NumPy's arrays."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from anyflash._arrays.base import CPU, FLOAT8, Device, Instead, WithAttributes, numpy_name
from anyflash._call.overlap import Memory

if TYPE_CHECKING:
    import numpy.typing as npt


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
    as_bits = ("bfloat16", *FLOAT8)

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # of the dtypes that were checked
        # DLPack export knows none of ml_dtypes', and bool only from NumPy 1.25 on.
        self._views: dict[Any, str] = {}
        self._exports_read_only = False

    def device(self, x: Any) -> Device:
        return CPU

    def read(self, x: Any, instead: Instead) -> tuple[tuple[int, ...], str, Device]:
        dtype = x.dtype
        return x.shape, self._names.get(dtype) or self._name(dtype), CPU

    def _name(self, dtype: Any) -> str:
        if not dtype.isnative:
            raise TypeError(f"is {dtype} with foreign byte order; the native order is allowed")
        name: str = dtype.name
        self._names[dtype] = name
        version = sys.modules["numpy"].lib.NumpyVersion(sys.modules["numpy"].__version__)
        self._exports_read_only = version >= "2.1.0"
        if name in ("bfloat16", *FLOAT8, "bool"):
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
        if any(stride % x.itemsize for stride in x.strides):
            raise ValueError(
                f"has strides of {x.strides} bytes; multiples of its elements' {x.itemsize} are "
                "allowed"
            )

    def memory(self, x: Any) -> Memory:
        return Memory(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)

    def lie_apart(self, written: Collection[Any], read: Collection[Any]) -> bool:
        may_share = sys.modules["numpy"].may_share_memory
        arrays = [*written, *read]
        return not any(may_share(x, y) for i, x in enumerate(written) for y in arrays[i + 1 :])

    def export_out(self, x: Any, device: Device) -> Any:
        # A capsule without a version: `check_out` has seen whether x is read-only.
        return self.export(x, device, None).__dlpack__()

    def empty(self, shape: tuple[int, ...], like: Any, dtype: str | None, device: Device) -> Any:
        numpy = sys.modules["numpy"]
        if dtype is None:
            return numpy.empty(shape, like.dtype)
        result = numpy.empty(shape, numpy_name(dtype))
        self.read(result, Instead())  # a dtype that is exported as another one is now known
        return result

    def draw_seed(self) -> int:
        return int(sys.modules["numpy"].random.randint(0, 2**63 - 1, dtype="int64"))

    def from_numpy(self, x: npt.NDArray[Any], like: Any) -> Any:
        return x
