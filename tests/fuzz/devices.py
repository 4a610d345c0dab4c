"""Where the arrays of random calls lie: on the CPU, on an emulated GPU, or on a GPU.

A GPU's kernels take 16-bit numbers, so right calls there are of bfloat16 (CuPy: float16).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python/support"))
from backends.abi import DL_DTYPES, DLDataType  # noqa: E402
from backends.capsules import tensor_of  # noqa: E402

DEVICES = ("cpu", "emulated-sm80", "emulated-sm90", "cuda")
HAS_JAX = importlib.util.find_spec("jax") is not None
HAS_CUPY = importlib.util.find_spec("cupy") is not None
FLOAT8 = tuple(np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LOST = 3  # exit status


class Kind(NamedTuple):
    """A module's functions, and the arrays that they are given."""

    module: str
    array: Callable[[Any], Any]
    floats: np.dtype[Any] = np.dtype(np.float32)


class OnEmulatedGpu:
    """A NumPy array that says it lies on a GPU: the emulated one's memory is the host's."""

    def __init__(self, x: Any) -> None:
        x = np.asarray(x)
        self.x = x if x.flags.writeable else np.array(x)  # NumPy exports no other
        try:
            self.__dlpack__()
        except BufferError as error:
            raise TypeError(str(error)) from None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def __getitem__(self, index: Any) -> OnEmulatedGpu:
        return OnEmulatedGpu(self.x[index])

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        x, dtype = self.x, self.x.dtype
        if dtype.names is None and dtype in {BFLOAT16, *FLOAT8}:
            x = x.view(f"u{dtype.itemsize}")
        capsule = x.__dlpack__()
        tensor = tensor_of(capsule)
        tensor.device.type = 2
        if dtype in DL_DTYPES:
            tensor.dtype = DLDataType(*DL_DTYPES[dtype], 1)
        return capsule

    def __repr__(self) -> str:
        return f"OnEmulatedGpu({self.x!r})"


def tensor(x: Any, device: str = "cpu") -> Any:
    """PyTorch's, of any dtype that it has."""
    x = np.array(x)
    dtype = x.dtype
    if dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    if dtype in FLOAT8:
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, dtype.name)).to(device)
    return torch.from_numpy(x).to(device)


def cuda_tensor(x: Any) -> Any:
    return tensor(x, "cuda")


def jax_array(x: Any) -> Any:
    return importlib.import_module("jax.numpy").asarray(x)


def cupy_array(x: Any) -> Any:
    return importlib.import_module("cupy").asarray(x)


def modules(device: str = "cpu") -> dict[str, Kind]:
    """By the names that `--modules` takes."""
    if device.startswith("emulated"):
        return {"neutral": Kind("anyflash", OnEmulatedGpu, BFLOAT16)}
    of_torch = {
        "neutral": "anyflash",
        "torch": "anyflash.torch",
        "flash_attn": "anyflash.flash_attn",
        "flash_attn_3": "anyflash.flash_attn_3",
        "bert_padding": "anyflash.flash_attn.bert_padding",
        "rotary": "anyflash.flash_attn.layers.rotary",
        "triton_rotary": "anyflash.flash_attn.ops.triton.rotary",
    }
    if device == "cuda":
        # An index out of range, which nobody waits to read, stops the GPU: PyTorch asserts there.
        del of_torch["bert_padding"]
        found = {name: Kind(x, cuda_tensor, BFLOAT16) for name, x in of_torch.items()}
        if HAS_CUPY:
            found["cupy"] = Kind("anyflash", cupy_array, np.dtype(np.float16))
        if HAS_JAX and importlib.import_module("jax").default_backend() == "gpu":
            found["jax"] = Kind("anyflash.jax", jax_array, BFLOAT16)
        return found
    found = {"numpy": Kind("anyflash", np.array)}
    found |= {name: Kind(x, tensor) for name, x in of_torch.items()}
    return found | ({"jax": Kind("anyflash.jax", jax_array)} if HAS_JAX else {})


# ---- what arrays hold ----


def host(value: Any) -> np.ndarray | None:
    """A copy of what an array holds; None for what is none."""
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else np.array(value)
    if isinstance(value, OnEmulatedGpu):
        return value.x.copy()
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return None
        flat = value.detach().reshape(-1).contiguous()
        bits = flat.view(torch.uint8).cpu().numpy() if flat.numel() else np.zeros(0, np.uint8)
        name = str(value.dtype).removeprefix("torch.")
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        return np.array(bits).view(dtype).reshape(value.shape)
    if type(value).__module__.startswith("cupy") and hasattr(value, "get"):
        return value.get()
    if HAS_JAX and isinstance(value, importlib.import_module("jax").Array):
        return np.asarray(value)
    return None


def described(name: str, value: Any, held: np.ndarray | None) -> str:
    """Asks no device: it may be lost."""
    if held is None:
        return f"{name}={value!r}"
    where = getattr(value, "device", "")
    more = f" {held.tolist()}" if held.size <= 16 else ""
    return f"{name}={type(value).__name__}({held.dtype}, {held.shape}, {where}){more}"


# ---- a device that is lost ----


def wait(device: str) -> None:
    """For what the call has started; raises what went wrong there."""
    if device == "cuda":
        torch.cuda.synchronize()


def end_if_lost(device: str, call: Callable[[], str]) -> None:
    """An error that stays would be every later call's, and hypothesis could make nothing of it: so
    this process ends, after it has said which call did it."""
    try:
        wait(device)
    except Exception as error:  # whatever the framework makes of it
        print(f"{device} is lost: {error}\nby {call()}", file=sys.stderr, flush=True)
        os._exit(LOST)


# ---- the emulated GPU in a process of its own ----


def emulated_library(gpu: str) -> Path:
    """The core with an emulated GPU as its device, for the Python binding.

    The tests' own _emulated_sm80.so shows the C ABI alone, and the binding calls the C++ one. So
    the same objects are linked once more; both come from `make build-test`.
    """
    build = ROOT / "build/test"
    objects = build / "tests/emulator/library"
    target = build / f"_binding_{gpu}.so"
    core = objects / "libemulated_driver_library.a"
    more = [objects / f"CMakeFiles/_emulated_{gpu}.dir/hopper.cpp.o"] if gpu == "sm90" else []
    if not core.exists():
        raise SystemExit(f"{core} does not exist: make build-test")
    if target.exists() and target.stat().st_mtime > core.stat().st_mtime:
        return target
    exports = ROOT / "cpp/src/exports.map"
    new = target.with_suffix(f".{os.getpid()}")
    command = [os.environ.get("CXX", "g++"), "-shared", "-pthread", "-fopenmp", "-o", str(new)]
    command += ["-Wl,--whole-archive", str(core), "-Wl,--no-whole-archive", *map(str, more)]
    command += [str(build / "tests/emulator/libemu.a"), f"-Wl,--version-script={exports}"]
    subprocess.run(command, check=True)
    new.replace(target)
    return target


def restart_on(device: str) -> None:
    """Begins this process anew, so that anyflash has this device: what is loaded first is what
    libanyflash.so's symbols are."""
    library = str(emulated_library(device.removeprefix("emulated-")))
    if os.environ.get("LD_PRELOAD") != library:
        os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": library})
    names = [found["name"] for found in importlib.import_module("anyflash").build_info()["devices"]]
    if names != ["emulated GPU"]:
        raise SystemExit(f"anyflash has the devices {names}, not the emulated GPU")
