"""The C ABI through ctypes, and the backends that every case runs on.

A backend is a library and a device: `cpu` (the best instruction set of this machine) and
`cpu-<isa>` for those below it, `emulated-sm80` (the CUDA kernels compiled for the host; what it
calls CUDA memory is host memory) and `cuda`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuda_driver import CudaDriver, DriverError
from memory import CudaMemory, HostMemory
from oracle import DTYPES
from tensors import ALIGNMENT, CANARY, GUARD, Tensor, aligned_bytes

OK, INVALID_VALUE, INVALID_TYPE, UNSUPPORTED, DEVICE_ERROR, INTERNAL_ERROR = range(6)
CPU_ISAS = {"auto": 0, "baseline": 1, "avx2": 2, "avx512": 3, "neon": 4}
KDL_CPU, KDL_CUDA = 1, 2
WANTED = os.environ.get("ANYFLASH_TEST_BACKENDS")  # names of backends; the default is all
REPOSITORY = Path(__file__).resolve().parents[2]


class DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("softmax_scale", ctypes.c_double),
        ("has_softmax_scale", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("cpu_isa", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("has_window_left", ctypes.c_int32),
        ("has_window_right", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("alibi_slopes", ctypes.POINTER(DLTensor)),
        ("bias", ctypes.POINTER(DLTensor)),
        ("block_mask", ctypes.POINTER(DLTensor)),
        ("block_size", ctypes.c_int64 * 2),
        ("sinks", ctypes.POINTER(DLTensor)),
        ("dropout_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("rng_state", ctypes.POINTER(DLTensor)),
        ("dropout_mask", ctypes.POINTER(DLTensor)),
        ("max_logits", ctypes.POINTER(DLTensor)),
        ("cu_seqlens_q", ctypes.POINTER(DLTensor)),
        ("cu_seqlens_k", ctypes.POINTER(DLTensor)),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("seqused_k", ctypes.POINTER(DLTensor)),
        ("validate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class MergeOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


DL_DTYPES = {
    DTYPES["fp64"]: (2, 64),
    DTYPES["fp32"]: (2, 32),
    DTYPES["fp16"]: (2, 16),
    DTYPES["bf16"]: (4, 16),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int64): (0, 64),
    np.dtype(np.uint8): (1, 8),
    np.dtype(np.uint64): (1, 64),
    np.dtype(np.bool_): (6, 8),
}


def int64_array(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def dl_tensor(tensor: Tensor, address: int, device: tuple[int, int]) -> DLTensor:
    """`address` is where the tensor's storage begins on the device."""
    offset = tensor.offset * tensor.storage.itemsize
    return DLTensor(
        data=address + (0 if tensor.byte_offset else offset),
        device=DLDevice(*device),
        ndim=len(tensor.shape),
        dtype=DLDataType(*DL_DTYPES[tensor.storage.dtype], lanes=1),
        shape=int64_array(tensor.shape),
        strides=int64_array(tensor.strides),
        byte_offset=offset if tensor.byte_offset else 0,
    )


class CallError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class Row(NamedTuple):
    """A kernel of the library, as its name tells."""

    name: str
    arch: str  # "sm80", "avx2", ...
    dtype: str
    head_dim: int = 0  # the largest of q and k; 0: any
    head_dim_v: int = 0
    variant: str = "plain"  # or "scored", "generic"

    @classmethod
    def parse(cls, name: str) -> Row:
        found = re.fullmatch(
            r"(?:cpu_)?(\w+?)_forward_(b?f)(\d+)(?:_d(\d+)(?:_(\d+))?)?(?:_([a-z]+))?", name
        )
        assert found, f"unexpected kernel name {name!r}"
        arch, kind, bits, head_dim, head_dim_v, variant = found.groups()
        dtype = f"bf{bits}" if kind == "bf" else f"fp{bits}"
        dims = int(head_dim or 0), int(head_dim_v or head_dim or 0)
        return cls(name, arch, dtype, *dims, variant or "plain")


class Library:
    """libanyflash, or its emulated twin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lib = ctypes.CDLL(str(path))
        tensor, size = ctypes.POINTER(DLTensor), ctypes.c_size_t
        common = [tensor] * 5 + [ctypes.POINTER(Options)]
        lib.anyflash_forward_workspace_size.argtypes = [*common, ctypes.POINTER(size)]
        lib.anyflash_forward.argtypes = [*common, ctypes.c_void_p, size]
        lib.anyflash_merge_states.argtypes = [tensor] * 6 + [ctypes.POINTER(MergeOptions)]
        lib.anyflash_last_error.restype = ctypes.c_char_p
        lib.anyflash_version.restype = ctypes.c_char_p
        lib.anyflash_kernel_count.restype = size
        lib.anyflash_kernel_name.argtypes = [size]
        lib.anyflash_kernel_name.restype = ctypes.c_char_p
        lib.anyflash_kernel_launches.argtypes = [size]
        lib.anyflash_kernel_launches.restype = ctypes.c_uint64
        self._lib = lib
        self.rows = tuple(
            Row.parse(lib.anyflash_kernel_name(i).decode())
            for i in range(lib.anyflash_kernel_count())
        )

    @property
    def version(self) -> str:
        return self._lib.anyflash_version().decode()

    @property
    def last_error(self) -> str:
        return self._lib.anyflash_last_error().decode()

    def entry(self, name: str) -> Any:
        """A function of the C ABI, for calls that no wrapper here would make."""
        return getattr(self._lib, name)

    def _check(self, status: int) -> None:
        if status != OK:
            raise CallError(status, self.last_error)

    def workspace_size(
        self, tensors: Sequence[DLTensor | None], options: Options | None = None
    ) -> int:
        """`tensors` are q, k, v, out, lse."""
        size = ctypes.c_size_t()
        pointers = [t and ctypes.byref(t) for t in tensors]
        arguments = (*pointers, options and ctypes.byref(options), ctypes.byref(size))
        self._check(self._lib.anyflash_forward_workspace_size(*arguments))
        return size.value

    def forward(
        self,
        tensors: Sequence[DLTensor | None],
        options: Options | None,
        workspace: int | None,
        workspace_bytes: int,
    ) -> None:
        pointers = [t and ctypes.byref(t) for t in tensors]
        arguments = (*pointers, options and ctypes.byref(options), workspace, workspace_bytes)
        self._check(self._lib.anyflash_forward(*arguments))

    def merge_states(
        self, tensors: Sequence[DLTensor | None], options: MergeOptions | None
    ) -> None:
        """`tensors` are out_a, lse_a, out_b, lse_b, out, lse."""
        pointers = [t and ctypes.byref(t) for t in tensors]
        self._check(self._lib.anyflash_merge_states(*pointers, options and ctypes.byref(options)))

    def launches(self) -> dict[str, int]:
        counts = map(self._lib.anyflash_kernel_launches, range(len(self.rows)))
        return {row.name: n for row, n in zip(self.rows, counts, strict=True)}


@dataclass(frozen=True)
class Backend:
    name: str
    library: Library
    memory: HostMemory | CudaMemory
    device: tuple[int, int]
    isa: str = "auto"  # what options.cpu_isa asks for
    arch: str = ""  # of the kernels that must then run

    @property
    def is_cpu(self) -> bool:
        return self.device[0] == KDL_CPU

    def row(self, dtype: str, head_dim: int, head_dim_v: int, variant: str) -> Row | None:
        """The kernel that must take this: the smallest that is large enough."""

        def fits(row: Row) -> bool:
            if row.head_dim == 0:
                return True
            large_enough = row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
            return large_enough and row.variant == variant

        rows = [row for row in self.library.rows if (row.arch, row.dtype) == (self.arch, dtype)]
        fitting = [row for row in rows if fits(row)]
        return min(fitting, key=lambda row: row.head_dim + row.head_dim_v, default=None)

    def options(self, **fields: Any) -> Options:
        options = Options(size=ctypes.sizeof(Options), cpu_isa=CPU_ISAS[self.isa])
        for name, value in fields.items():
            if value is None:
                continue
            setattr(options, name, int64_array(value) if name == "block_size" else value)
            if hasattr(options, f"has_{name}"):
                setattr(options, f"has_{name}", 1)
        return options

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Run with a workspace of exactly the size asked for; check the canaries behind it.

        `fields` are those of Options, tensors among them; None: not set.
        """
        auxiliary = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
        options = self.options(**{n: x for n, x in fields.items() if n not in auxiliary})
        with self.on_device([q, k, v, out, lse, *auxiliary.values()]) as dl:
            for name, tensor in zip(auxiliary, dl[5:], strict=True):
                setattr(options, name, ctypes.pointer(tensor))
            size = self.library.workspace_size(dl[:5], options)
            workspace = aligned_bytes(size + GUARD)
            with self.memory.resident([workspace]) as (address,):
                assert address % ALIGNMENT == 0
                self.library.forward(dl[:5], options, address, size)
            behind = workspace[size:] != CANARY
            assert not behind.any(), f"workspace: written {behind.argmax()} bytes past its end"

    def merge_states(self, *tensors: Tensor | None, num_threads: int = 0) -> None:
        """`tensors` are out_a, lse_a, out_b, lse_b, out, lse."""
        options = MergeOptions(size=ctypes.sizeof(MergeOptions), num_threads=num_threads)
        with self.on_device(tensors) as dl:
            self.library.merge_states(dl, options)

    @contextlib.contextmanager
    def on_device(self, tensors: Sequence[Tensor | None]) -> Iterator[list[Any]]:
        """The tensors as DLTensor, None as None; those that share a storage share it there too."""
        storages = {id(t.storage): t.storage for t in tensors if t is not None}
        with self.memory.resident(list(storages.values())) as addresses:
            where = dict(zip(storages, addresses, strict=True))
            yield [t and dl_tensor(t, where[id(t.storage)], self.device) for t in tensors]


class Unavailable(Exception):
    """Why a backend cannot be had here."""


def _library_path() -> Path:
    if path := os.environ.get("ANYFLASH_LIBRARY"):
        return Path(path)
    spec = importlib.util.find_spec("anyflash")
    if spec is None or spec.origin is None:
        raise Unavailable("anyflash is not installed: pip install .")
    return Path(spec.origin).parent / "lib" / "libanyflash.so"


@functools.cache
def _load(path: Path, hint: str) -> Library:
    if not path.exists():
        raise Unavailable(f"{path} does not exist: {hint}")
    return Library(path)


def _native() -> Library:
    return _load(_library_path(), "pip install .")


def _emulated() -> Library:
    default = REPOSITORY / "build" / "test" / "_emulated_sm80.so"
    path = Path(os.environ.get("ANYFLASH_EMULATED_SM80", default))
    return _load(path, "make build-test")


@functools.cache
def best_isa() -> str:
    """The instruction set that `auto` takes on this machine: seen, not asked for."""
    backend = Backend("cpu", _native(), HostMemory(), (KDL_CPU, 0))
    one = [Tensor(aligned_bytes(4).view(np.float32), (1, 1, 1, 1), (1, 1, 1, 1), 0)] * 4
    before = backend.library.launches()
    backend.forward(*one)
    (name,) = (name for name, n in backend.library.launches().items() if n != before[name])
    return Row.parse(name).arch


def cpu_isas() -> list[str]:
    """The instruction sets of this build that this machine can run."""
    best = best_isa()
    below = {"avx512": ["avx2", "baseline"], "avx2": ["baseline"], "neon": ["baseline"]}
    built = {row.arch for row in _native().rows}
    return [best, *(isa for isa in below.get(best, []) if isa in built)]


@functools.cache
def cuda_driver() -> CudaDriver | None:
    try:
        return CudaDriver()
    except DriverError:
        return None


def backend_names() -> list[str]:
    if WANTED:
        return WANTED.split(",")
    return ["cpu", *(f"cpu-{isa}" for isa in cpu_isas()[1:]), "emulated-sm80", "cuda"]


@functools.cache
def backend(name: str) -> Backend:
    """Raise Unavailable, with what to do about it, where there is none."""
    if name == "emulated-sm80":
        return Backend(name, _emulated(), HostMemory(), (KDL_CUDA, 0), arch="sm80")
    if name == "cuda":
        driver = cuda_driver()
        if driver is None:
            raise Unavailable("no CUDA device in this machine")
        return Backend(name, _native(), CudaMemory(driver), (KDL_CUDA, 0), arch="sm80")
    isa = name.removeprefix("cpu").removeprefix("-")
    arch = isa or best_isa()
    return Backend(name, _native(), HostMemory(), (KDL_CPU, 0), isa or "auto", arch)
