"""`python -m anyflash doctor`: what a bug report needs, whether attention computes here, and the
one thing to do next."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyflash
from anyflash import _core
from anyflash._arrays.base import CPU
from anyflash._cli import machine
from anyflash._cli.terminal import Section

# Where arrays on a GPU can come from, beside PyTorch, which says by itself whether it can.
GPU_PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "cupy-cuda12x", "cupy-cuda13x"),
    *("tensorflow", "paddlepaddle-gpu"),
)
PACKAGES = (
    *("numpy", "ml_dtypes", "torch", "triton", "jax", "jaxlib", *GPU_PACKAGES, "paddlepaddle"),
    *("transformers", "flash-attn", "nanobind-backend"),
)
VARIABLES = ("CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_NUM", "XLA_", "JAX_", "LD_", "PYTORCH_")
# Queries, keys (whose scores are 2 and 0), values; the head dim is 1, and so is the scale.
PROBLEM = ([2.0], [1.0, 0.0], [1.0, 0.0])
EXPECTED = 1 / (1 + math.exp(-2))
TOLERANCE = 5e-3  # of bfloat16, to which a GPU rounds weights and result
GOOD = "attention computes"
OLD_DRIVER = "the NVIDIA driver supports CUDA up to"  # of the core's message
OLDEST_GPU = 8  # its major compute capability

# The guide's page on troubleshooting has each of them.
NEXT = {
    "report": "Report this as a bug of anyflash, with all that this command printed.",
    "build": "Build anyflash on this machine, so that it has CUDA kernels for its GPU: run "
    "`python -m pip install .` in its source.",
    "driver": "Update the NVIDIA driver, or build anyflash with an older CUDA toolkit.",
    "old GPU": "Use a GPU of compute capability 8.0 or later; or hide this one by "
    "`CUDA_VISIBLE_DEVICES=-1`, and compute on the CPU.",
    "device": "Look why CUDA can use no GPU that nvidia-smi lists: at CUDA_VISIBLE_DEVICES, and "
    "for a libcuda.so.1 in a container.",
    "arrays": "Install a library that holds arrays on the GPU: PyTorch, JAX or CuPy, each with "
    "CUDA.",
    "numpy": "Install NumPy, in which the demonstration computes: run "
    "`python -m pip install numpy`.",
    "demo": "All is well. See a real transformer run: `python -m anyflash demo`.",
}


@dataclass(frozen=True)
class Check:
    """What came of attention at one place; `next` is a key of NEXT, or empty if it is good."""

    where: str
    said: str
    next: str = ""


def _machine() -> dict[str, str]:
    build = "free-threaded" if not getattr(sys, "_is_gil_enabled", lambda: True)() else "with GIL"
    return {
        "anyflash": f"{anyflash.__version__} in {Path(anyflash.__file__).parent}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()}, {build})",
        "executable": sys.executable,
        "system": f"{platform.platform()}, {' '.join(platform.libc_ver())}".rstrip(", "),
        "CPU": f"{machine.cpu_model()}, {os.cpu_count()} processors",
    }


def _driver() -> tuple[list[str], bool]:
    """What nvidia-smi says, and whether these are GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi cannot be run: {error}"], False
    text = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()
    return text.splitlines() or ["nvidia-smi is silent"], done.returncode == 0 and bool(text)


def _attention(array: Callable[[list[float]], Any]) -> Any:
    return anyflash.attention(*map(array, PROBLEM))


def _by_numpy(attention: Callable[..., Any]) -> float:
    numpy = importlib.import_module("numpy")
    arrays = [numpy.array(x, "float32").reshape(1, -1, 1, 1) for x in PROBLEM]
    return float(attention(*arrays).item())


def _on_cpu() -> float:
    """By NumPy; where it is missing, in memory that anyflash allocates."""
    if importlib.util.find_spec("numpy"):
        return _by_numpy(anyflash.attention)

    def array(values: list[float]) -> anyflash.Array:
        made = anyflash.Array((1, len(values), 1, 1), "float32", CPU)
        source = (ctypes.c_float * len(values))(*values)
        ctypes.memmove(_core.address(made), source, ctypes.sizeof(source))
        return made

    out = _attention(array)
    return ctypes.c_float.from_address(_core.address(out)).value


def _torch_on_gpu() -> Any:
    """PyTorch, if it is installed and can use a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def _on_gpu(index: int) -> float:
    """By PyTorch; where it cannot, by NumPy and the driver."""
    torch = _torch_on_gpu()
    if torch is None:
        return _by_numpy(importlib.import_module("anyflash._cli.gpu").Gpu(index).attention)
    options = {"dtype": torch.bfloat16, "device": f"cuda:{index}"}
    return float(_attention(lambda x: torch.tensor(x, **options).reshape(1, -1, 1, 1)).item())


def _check(where: str, compute: Callable[[], float]) -> Check:
    try:
        value = compute()
    except Exception as error:  # whatever it is, it belongs into the report
        no_numpy = isinstance(error, ModuleNotFoundError) and error.name == "numpy"
        return Check(where, f"{type(error).__name__}: {error}", "numpy" if no_numpy else "report")
    if abs(value - EXPECTED) <= TOLERANCE:
        return Check(where, GOOD)
    return Check(where, f"attention gives {value}, not {EXPECTED}", "report")


def _checks(info: dict[str, Any], gpus_listed: bool) -> Iterator[Check]:
    yield _check("CPU", _on_cpu)
    for device in info["devices"]:
        where = f"GPU {device['index']}"
        if device["supported"]:
            yield _check(where, functools.partial(_on_gpu, device["index"]))
        else:
            old = int(device["compute_capability"].partition(".")[0]) < OLDEST_GPU
            yield Check(where, "no kernels for it in this build", "old GPU" if old else "build")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if info["device_error"] and gpus_listed and not hidden:
        too_old = OLD_DRIVER in info["device_error"]
        step = "build" if info["cuda"] is None else "driver" if too_old else "device"
        yield Check("GPU", info["device_error"], step)


def _next(info: dict[str, Any], checks: Sequence[Check], packages: Container[str]) -> str:
    """The key in NEXT."""
    for check in checks:
        if check.next:
            return check.next
    elsewhere = any(name in packages for name in GPU_PACKAGES)
    if info["devices"] and not elsewhere and _torch_on_gpu() is None:
        return "arrays"
    return "demo" if importlib.util.find_spec("numpy") else "numpy"


def examine(info: dict[str, Any]) -> dict[str, Any]:
    """What the command prints, as `--json` has it."""
    driver, gpus_listed = _driver()
    packages = machine.versions(PACKAGES)
    checks = list(_checks(info, gpus_listed))
    return {
        "machine": {**_machine(), "driver": driver},
        "packages": packages,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
        "checks": [{"where": c.where, "said": c.said, "good": not c.next} for c in checks],
        "good": not any(check.next for check in checks),
        "next": NEXT[_next(info, checks, packages)],
    }


def sections(found: dict[str, Any]) -> list[Section]:
    """The same for a reader."""
    facts = {**found["machine"]}
    driver = facts.pop("driver")
    rows = [*facts.items(), *(("" if i else "driver", line) for i, line in enumerate(driver))]
    checks = found["checks"]
    return [
        Section("machine", rows),
        Section("packages", list(found["packages"].items())),
        Section("environment", list(found["environment"].items())),
        Section(
            "checks",
            [(check["where"], check["said"]) for check in checks],
            good=[check["good"] for check in checks],
        ),
        Section("next", [(found["next"],)]),
    ]
