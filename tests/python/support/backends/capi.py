"""The C ABI through ctypes, and the backends that every case runs on.

A backend is a library and a device: `cpu` (the best instruction set of this machine) and
`cpu-<isa>` for those below it, `emulated-sm80` and `emulated-sm90` (an A100 and an H100 with the
CUDA kernels compiled for the host; what they call CUDA memory is host memory) and `cuda`.
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

from backends.abi import (
    BackwardOptions,
    DLTensor,
    KvCacheOptions,
    MergeOptions,
    Options,
    dl_tensor,
    structure,
)
from backends.cuda_driver import CudaDriver, DriverError
from backends.memory import CudaMemory, HostMemory
from backends.tensors import ALIGNMENT, CANARY, GUARD, Tensor, aligned_bytes
from oracle.attention import DTYPES

OK, INVALID_VALUE, INVALID_TYPE, UNSUPPORTED, DEVICE_ERROR, INTERNAL_ERROR = range(6)
CPU_ISAS = {"auto": 0, "baseline": 1, "avx2": 2, "avx512": 3, "neon": 4, "amx": 5}
KDL_CPU, KDL_CUDA = 1, 2
BACKWARD_TENSORS = ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv")
# Those that come first are preferred; "generic" does what all others do.
VARIANTS = ("plain", "alibi", "softcap", "scored", "dropout", "ranges", "blocks", "generic")
WANTED = os.environ.get("ANYFLASH_TEST_BACKENDS")  # names of backends; the default is all
REPOSITORY = Path(__file__).resolve().parents[4]


class CallError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class Row(NamedTuple):
    """A kernel of the library, as its name tells."""

    name: str
    arch: str  # "sm80", "avx2", ...
    op: str  # "forward", "backward", "decode" or "prefill"
    dtype: str
    head_dim: int = 0  # the largest of q and k; 0: any
    head_dim_v: int = 0
    # One of VARIANTS; for some GPUs "compact" or "wide"; of decoding on a GPU "m16", ...
    variant: str = "plain"

    @classmethod
    def parse(cls, name: str) -> Row:
        found = re.fullmatch(
            r"(?:cpu_)?(\w+?)_(forward|backward|decode|prefill)_(b?f)(\d+)(?:_d(\d+)(?:_(\d+))?)?"
            r"(?:_([a-z]\w*))?",
            name,
        )
        assert found, f"unexpected kernel name {name!r}"
        arch, op, kind, bits, head_dim, head_dim_v, variant = found.groups()
        dtype = f"bf{bits}" if kind == "bf" else f"fp{bits}"
        dims = int(head_dim or 0), int(head_dim_v or head_dim or 0)
        return cls(name, arch, op, dtype, *dims, variant or "plain")


Tensors = Sequence[DLTensor | None]


def _references(structures: Sequence[ctypes.Structure | None]) -> list[Any]:
    return [x and ctypes.byref(x) for x in structures]


class Library:
    """libanyflash, or its emulated twin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lib = ctypes.CDLL(str(path))
        tensor, size = ctypes.POINTER(DLTensor), ctypes.c_size_t
        common = [tensor] * 5 + [ctypes.POINTER(Options)]
        lib.anyflash_forward_workspace_size.argtypes = [*common, ctypes.POINTER(size)]
        lib.anyflash_forward.argtypes = [*common, ctypes.c_void_p, size]
        common.append(ctypes.POINTER(KvCacheOptions))
        lib.anyflash_forward_with_kvcache_workspace_size.argtypes = [*common, ctypes.POINTER(size)]
        lib.anyflash_forward_with_kvcache.argtypes = [*common, ctypes.c_void_p, size]
        common = [tensor] * len(BACKWARD_TENSORS) + [
            ctypes.POINTER(Options),
            ctypes.POINTER(BackwardOptions),
        ]
        lib.anyflash_backward_workspace_size.argtypes = [*common, ctypes.POINTER(size)]
        lib.anyflash_backward.argtypes = [*common, ctypes.c_void_p, size]
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

    def workspace_size(self, tensors: Tensors, *options: ctypes.Structure | None) -> int:
        """`tensors` are q, k, v, out, lse, with one or both of the options that a cache takes; or
        what backward() takes, with both options."""
        op = "forward" if len(options) < 2 else "forward_with_kvcache"
        op = "backward" if len(tensors) == len(BACKWARD_TENSORS) else op
        size = ctypes.c_size_t()
        arguments = [*_references(tensors), *_references(options or (None,))]
        self._check(self.entry(f"anyflash_{op}_workspace_size")(*arguments, ctypes.byref(size)))
        return size.value

    def forward(
        self, tensors: Tensors, options: Options | None, workspace: int | None, bytes_: int
    ) -> None:
        arguments = _references([*tensors, options])
        self._check(self._lib.anyflash_forward(*arguments, workspace, bytes_))

    def backward(
        self,
        tensors: Tensors,
        options: tuple[Options | None, BackwardOptions | None],
        workspace: int | None,
        bytes_: int,
    ) -> None:
        """`tensors` are those of BACKWARD_TENSORS."""
        arguments = _references([*tensors, *options])
        self._check(self._lib.anyflash_backward(*arguments, workspace, bytes_))

    def forward_with_kvcache(
        self,
        tensors: Tensors,
        options: tuple[Options | None, KvCacheOptions | None],
        workspace: int | None,
        bytes_: int,
    ) -> None:
        arguments = _references([*tensors, *options])
        self._check(self._lib.anyflash_forward_with_kvcache(*arguments, workspace, bytes_))

    def merge_states(self, tensors: Tensors, options: MergeOptions | None) -> None:
        """`tensors` are out_a, lse_a, out_b, lse_b, out, lse."""
        self._check(self._lib.anyflash_merge_states(*_references([*tensors, options])))

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
    before: str = ""  # of kernels that run instead, where they can
    expected: str = ""  # the one that must, where it is not the one that row() would find

    @property
    def is_cpu(self) -> bool:
        return self.device[0] == KDL_CPU

    def rows(self, op: str = "forward") -> list[Row]:
        """The kernels of this backend."""
        archs = (self.arch, self.before)
        rows = [row for row in self.library.rows if row.arch in archs and row.op == op]
        if self.arch == "amx":  # what it has no kernel for runs as for AVX-512
            dtypes = {row.dtype for row in rows}
            others = (row for row in self.library.rows if (row.arch, row.op) == ("avx512", op))
            rows += [row for row in others if row.dtype not in dtypes]
        return rows

    def row(
        self,
        dtype: str,
        head_dim: int,
        head_dim_v: int,
        variants: set[str],
        *,
        op: str = "forward",
        positive_scale: bool = True,
    ) -> Row | None:
        """The kernel that must take this: the smallest that is large enough and can do it, of
        the first arch that has one. One for other shared memory may stand in for it (usual())."""

        def fits(row: Row) -> bool:
            if row.head_dim == 0:
                return True
            if row.arch == "sm90" and not positive_scale:
                return False
            if (row.arch, row.variant) == ("sm90", "dropout") and max(head_dim, head_dim_v) <= 64:
                return False  # sm80's are faster there
            large_enough = row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
            return large_enough and row.variant in variants

        def preference(row: Row) -> tuple[bool, int, int]:
            dims = row.head_dim + row.head_dim_v
            return row.arch != self.before, dims, VARIANTS.index(row.variant)

        rows = [row for row in self.rows(op) if row.dtype == dtype]
        if self.expected:
            return next(row for row in rows if row.name == self.expected)
        fitting = [row for row in rows if row.variant in VARIANTS and fits(row)]
        return min(fitting, key=preference, default=None)

    def usual(self, name: str) -> str:
        """The name of the kernel for an A100's shared memory, unless one was expected by name."""
        return name if self.expected else name.removesuffix("_wide").removesuffix("_compact")

    def options(self, **fields: Any) -> Options:
        return structure(Options, {"cpu_isa": CPU_ISAS[self.isa]} | fields)

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
        self._call([q, k, v, out, lse], {Options: fields})

    def backward(
        self, *tensors: Tensor, gradient: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        """`tensors` are those of BACKWARD_TENSORS, `gradient` fields of BackwardOptions, `fields`
        the forward's; like forward()."""
        self._call(tensors, {Options: fields, BackwardOptions: gradient or {}})

    def forward_with_kvcache(
        self, *tensors: Tensor | None, cache: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        """`tensors` are q, k_cache, v_cache, out, lse, `cache` fields of KvCacheOptions, `fields`
        the others; like forward()."""
        self._call(tensors, {Options: fields, KvCacheOptions: cache or {}})

    def _call(self, tensors: Sequence[Tensor | None], fields: dict[Any, dict[str, Any]]) -> None:
        """`fields` by the kind of options they belong to."""
        auxiliary = [
            (kind, name, x)
            for kind, of_kind in fields.items()
            for name, x in of_kind.items()
            if isinstance(x, Tensor)
        ]
        fields[Options] = {"cpu_isa": CPU_ISAS[self.isa]} | fields[Options]
        count = len(tensors)
        with self.on_device([*tensors, *(x for _, _, x in auxiliary)]) as dl:
            for (kind, name, _), tensor in zip(auxiliary, dl[count:], strict=True):
                fields[kind] = fields[kind] | {name: ctypes.pointer(tensor)}
            options = tuple(structure(kind, of_kind) for kind, of_kind in fields.items())
            size = self.library.workspace_size(dl[:count], *options)
            # One byte behind a multiple of ALIGNMENT: where a workspace has most to skip.
            workspace = aligned_bytes(1 + size + GUARD)
            with self.memory.resident([workspace]) as (aligned,):
                assert aligned % ALIGNMENT == 0
                address = aligned + 1
                if BackwardOptions in fields:
                    self.library.backward(dl[:count], options, address, size)
                elif KvCacheOptions in fields:
                    self.library.forward_with_kvcache(dl[:count], options, address, size)
                else:
                    self.library.forward(dl[:count], *options, address, size)
            behind = workspace[1 + size :] != CANARY
            assert not behind.any(), f"workspace: written {behind.argmax()} bytes past its end"
            assert workspace[0] == CANARY, "workspace: written before its beginning"

    def merge_states(self, *tensors: Tensor | None, num_threads: int = 0) -> None:
        """`tensors` are out_a, lse_a, out_b, lse_b, out, lse."""
        options = structure(MergeOptions, {"num_threads": num_threads})
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


def _emulated(arch: str) -> Library:
    return _load(REPOSITORY / "build" / "test" / f"_emulated_{arch}.so", "make build-test")


@functools.cache
def best_isa() -> str:
    """The instruction set that `auto` takes on this machine for bfloat16: seen, not asked for."""
    backend = Backend("cpu", _native(), HostMemory(), (KDL_CPU, 0))
    one = [Tensor(aligned_bytes(2).view(DTYPES["bf16"]), (1, 1, 1, 1), (1, 1, 1, 1), 0)] * 4
    before = backend.library.launches()
    backend.forward(*one)
    (name,) = (name for name, n in backend.library.launches().items() if n != before[name])
    return Row.parse(name).arch


def cpu_isas() -> list[str]:
    """The instruction sets of this build that this machine can run."""
    best = best_isa()
    order = ["neon", "amx", "avx512", "avx2", "baseline"]
    built = {row.arch for row in _native().rows}
    return [best, *(isa for isa in order[order.index(best) + 1 :] if isa in built)]


@functools.cache
def cuda_driver() -> CudaDriver | None:
    try:
        return CudaDriver()
    except DriverError:
        return None


def backend_names() -> list[str]:
    if WANTED:
        return WANTED.split(",")
    cpus = [f"cpu-{isa}" for isa in cpu_isas()[1:]]
    return ["cpu", *cpus, "emulated-sm80", "emulated-sm90", "cuda"]


@functools.cache
def backend(name: str) -> Backend:
    """Raise Unavailable, with what to do about it, where there is none."""
    if name == "emulated-sm80":
        return Backend(name, _emulated("sm80"), HostMemory(), (KDL_CUDA, 0), arch="sm80")
    if name == "emulated-sm90":
        library = _emulated("sm90")
        return Backend(name, library, HostMemory(), (KDL_CUDA, 0), arch="sm80", before="sm90")
    if name == "cuda":
        driver = cuda_driver()
        if driver is None:
            raise Unavailable("no CUDA device in this machine")
        before = "sm90" if driver.compute_capability() == (9, 0) else ""
        memory = CudaMemory(driver)
        return Backend(name, _native(), memory, (KDL_CUDA, 0), arch="sm80", before=before)
    isa = name.removeprefix("cpu").removeprefix("-")
    arch = isa or best_isa()
    return Backend(name, _native(), HostMemory(), (KDL_CPU, 0), isa or "auto", arch)
