"""DLPack by hand: a producer whose capsules may be as odd as one likes, and a reader."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from backends.abi import DLDataType, DLDevice, DLTensor
from oracle.attention import Array

READ_ONLY, IS_COPIED = 1, 2  # flags of a versioned capsule
CODES = {
    "float64": (2, 64, 1),
    "float32": (2, 32, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "bool": (6, 8, 1),
    "int32": (0, 32, 1),
    "int8": (0, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
}
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, DELETER)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

_exports: dict[int, tuple[Any, ...]] = {}  # what must live until a deleter was called
_deleted: dict[int, int] = {}  # calls of the deleter, by address


@DELETER
def _delete(address: int) -> None:
    _deleted[address] += 1


@DELETER
def _drop(capsule: int) -> None:
    """A capsule that nobody took the tensor out of frees it."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _delete(_pointer(capsule, name))


class Handmade:
    """An array with __dlpack__ and __dlpack_device__ and nothing else.

    `x` is shown as it lies; `protocol` says which keywords __dlpack__ takes: "any" (what they ask
    for is given), "none", "version" and "copy" (they are needed). `dtype` (code, bits, lanes),
    `shape` and `device` may differ from the truth. `offset`: bytes from data to the first element.
    """

    def __init__(
        self,
        x: Array,
        protocol: str = "any",
        *,
        dtype: tuple[int, int, int] | None = None,
        shape: tuple[int, ...] | None = None,
        device: tuple[int, int] = (1, 0),
        exported_device: tuple[int, int] | None = None,
        offset: int = 0,
        strides: bool = True,
        flags: int = 0,
        version: tuple[int, int] = (1, 0),
    ) -> None:
        self._x = x
        self._protocol = protocol
        self._dtype = dtype or CODES[x.dtype.name]
        self._shape = x.shape if shape is None else shape
        self._device = device
        self._exported_device = exported_device or device
        self._offset = offset
        self._strides = strides
        self._flags = flags
        self._version = version
        self.addresses: list[int] = []
        self.asked: list[dict[str, Any]] = []  # the keywords of each call

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **keywords: Any) -> Any:
        self.asked.append(keywords)
        needed = {"none": set(), "version": {"max_version"}, "copy": {"max_version", "copy"}}
        if self._protocol != "any" and set(keywords) != needed[self._protocol]:
            raise TypeError(f"not {sorted(keywords)}, but {sorted(needed[self._protocol])}")
        return self._export((keywords.get("max_version") or (0, 0)) >= (1, 0))

    def _export(self, versioned: bool) -> Any:
        shape = (ctypes.c_int64 * len(self._shape))(*self._shape)
        strides = (ctypes.c_int64 * len(self._shape))(
            *(s // self._x.itemsize for s in self._x.strides)
        )
        tensor = DLTensor(
            self._x.ctypes.data - self._offset,
            DLDevice(*self._exported_device),
            len(self._shape),
            DLDataType(*self._dtype),
            shape,
            strides if self._strides else None,
            self._offset,
        )
        if versioned:
            managed: Any = Versioned(*self._version, None, _delete, self._flags, tensor)
        else:
            managed = Managed(tensor, None, _delete)
        address = ctypes.addressof(managed)
        self.addresses.append(address)
        _exports[address] = (self._x, shape, strides, managed)
        _deleted[address] = 0
        return _new(address, b"dltensor_versioned" if versioned else b"dltensor", _drop)

    def verify_freed(self) -> None:
        """Every capsule's deleter was called once."""
        assert self.addresses
        assert [_deleted[address] for address in self.addresses] == [1] * len(self.addresses)


def tensor_of(capsule: Any) -> DLTensor:
    """What an unversioned capsule holds; it may be changed."""
    tensor: DLTensor = Managed.from_address(_pointer(id(capsule), b"dltensor")).tensor
    return tensor


def read(x: Any) -> Array:
    """A copy of what an object that speaks DLPack holds, of any dtype; C order."""
    capsule = x.__dlpack__()
    tensor = tensor_of(capsule)
    kind = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    name = next(name for name, code in CODES.items() if code == kind)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = tensor.shape[: tensor.ndim]
    expected = [int(np.prod(shape[i + 1 :])) for i in range(tensor.ndim)]
    assert not tensor.strides or tensor.strides[: tensor.ndim] == expected
    size = int(np.prod(shape)) * dtype.itemsize
    data = ctypes.string_at(tensor.data + tensor.byte_offset, size) if size else b""
    return np.frombuffer(data, dtype).reshape(shape).copy()
