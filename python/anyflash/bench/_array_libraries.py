"""Whose arrays a benchmark works on: NumPy's, or PyTorch's on the CPU or a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import anyflash

SEED = 0


class Unsupported(Exception):
    """A contender does not have what a case asks for; the text says what."""


class ArrayLibrary(Protocol):
    """What cases need of a framework. Values are random, standard normal where they are numbers:
    constant data costs a GPU less power, which makes it faster than it is."""

    name: str
    device: str

    def seed(self) -> None: ...
    def normal(self, shape: Sequence[int], dtype: str) -> Any: ...
    def converted(self, x: Any, dtype: str) -> Any: ...
    def devices(self) -> int: ...  # GPUs of this machine, where it works on one
    def coins(self, shape: Sequence[int]) -> Any: ...
    def integers(self, values: Sequence[int]) -> Any: ...
    def floats(self, values: Sequence[float]) -> Any: ...
    def shuffled(self, count: int) -> Any: ...
    def difference(self, a: Any, b: Any) -> float: ...
    def synchronize(self) -> None: ...
    def free_bytes(self) -> int: ...
    def release(self) -> None: ...
    def apart(self) -> AbstractContextManager[Any]: ...


def _available_memory() -> int:
    """Of the host, in bytes."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**33


class NumpyArrays:
    """NumPy; bfloat16 is ml_dtypes'."""

    name = "numpy"
    device = "cpu"

    def __init__(self) -> None:
        self.np: Any = importlib.import_module("numpy")
        self.seed()

    def seed(self) -> None:
        self.random: Any = self.np.random.default_rng(SEED)

    def _dtype(self, name: str) -> Any:
        if not name.startswith(("bfloat16", "float8")):
            return self.np.dtype(name)
        if importlib.util.find_spec("ml_dtypes") is None:
            raise Unsupported(f"NumPy has {name} from ml_dtypes, which is not installed")
        return self.np.dtype(getattr(importlib.import_module("ml_dtypes"), name))

    def devices(self) -> int:
        return 0

    def normal(self, shape: Sequence[int], dtype: str) -> Any:
        return self.random.standard_normal(shape, self.np.float32).astype(self._dtype(dtype))

    def converted(self, x: Any, dtype: str) -> Any:
        return x.astype(self._dtype(dtype))

    def coins(self, shape: Sequence[int]) -> Any:
        return self.random.random(shape) < 0.5

    def integers(self, values: Sequence[int]) -> Any:
        return self.np.array(values, self.np.int32)

    def floats(self, values: Sequence[float]) -> Any:
        return self.np.array(values, self.np.float32)

    def shuffled(self, count: int) -> Any:
        return self.random.permutation(count).astype(self.np.int32)

    def difference(self, a: Any, b: Any) -> float:
        a, b = (x.astype(self.np.float32) for x in (a, b))
        return float(self.np.linalg.norm(a - b) / self.np.linalg.norm(a))

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return _available_memory()

    def release(self) -> None:
        pass

    def apart(self) -> AbstractContextManager[Any]:
        return nullcontext()


class TorchArrays:
    """PyTorch on "cpu" or "cuda"."""

    name = "torch"

    def __init__(self, device: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device = device
        if device == "cpu":  # the same for all
            self.torch.set_num_threads(anyflash.build_info()["cpu"]["threads"])
        self.seed()

    def seed(self) -> None:
        self.torch.manual_seed(SEED)

    def devices(self) -> int:
        return int(self.torch.cuda.device_count()) if self.device == "cuda" else 0

    def normal(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.randn(tuple(shape), device=self.device, dtype=getattr(self.torch, dtype))

    def converted(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.torch, dtype))

    def coins(self, shape: Sequence[int]) -> Any:
        return self.torch.rand(tuple(shape), device=self.device) < 0.5

    def integers(self, values: Sequence[int]) -> Any:
        return self.torch.tensor(values, device=self.device, dtype=self.torch.int32)

    def floats(self, values: Sequence[float]) -> Any:
        return self.torch.tensor(values, device=self.device, dtype=self.torch.float32)

    def shuffled(self, count: int) -> Any:
        return self.torch.randperm(count, device=self.device).to(self.torch.int32)

    def difference(self, a: Any, b: Any) -> float:
        a, b = (x.detach().float() for x in (a, b))
        return float((a - b).norm() / a.norm())

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def free_bytes(self) -> int:
        if self.device == "cpu":
            return _available_memory()
        free, _ = self.torch.cuda.mem_get_info()
        held = self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
        return int(free + held)

    def release(self) -> None:
        """Give memory back that PyTorch keeps for later."""
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def apart(self) -> AbstractContextManager[Any]:
        """A stream that is not the default one: what a CUDA graph captures must run on it from the
        beginning, since a backward runs on its forward's stream."""
        if self.device == "cpu":
            return nullcontext()
        stream: AbstractContextManager[Any] = self.torch.cuda.stream(self.torch.cuda.Stream())
        return stream


def default_backend() -> str:
    """ "cuda" where this build and PyTorch both have a GPU to run on, else "cpu"."""
    if not any(device["supported"] for device in anyflash.build_info()["devices"]):
        return "cpu"
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"


def arrays_for(backend: str) -> ArrayLibrary:
    """The arrays of a backend; ValueError where it is not there."""
    has_torch = importlib.util.find_spec("torch") is not None
    if backend == "cuda":
        if not has_torch:
            raise ValueError("--backend cuda needs PyTorch, which is not installed")
        if default_backend() != "cuda":
            reason = anyflash.build_info()["device_error"] or "PyTorch sees no CUDA device"
            raise ValueError(f"--backend cuda: {reason}")
        return TorchArrays("cuda")
    if has_torch:
        return TorchArrays("cpu")
    if importlib.util.find_spec("numpy") is None:
        raise ValueError("the benchmark needs NumPy or PyTorch; run: python -m pip install numpy")
    return NumpyArrays()
