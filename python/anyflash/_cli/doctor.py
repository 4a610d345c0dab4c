"""`python -m anyflash doctor`: what a bug report needs, and whether attention computes here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyflash
from anyflash._cli import machine

Facts = list[tuple[str, str]]

PACKAGES = (
    *("numpy", "ml_dtypes", "torch", "triton", "jax", "jaxlib", "jax-cuda12-plugin"),
    *("jax-cuda13-plugin", "cupy-cuda12x", "cupy-cuda13x", "tensorflow", "paddlepaddle"),
    *("transformers", "flash-attn", "nanobind-backend"),
)
VARIABLES = ("CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_NUM", "XLA_", "JAX_", "LD_", "PYTORCH_")
# One query; two keys, whose scores are 2 and 0; two values, 1 and 0.
QUERY, KEYS, VALUES = [[[[2.0]]]], [[[[1.0]], [[0.0]]]], [[[[1.0]], [[0.0]]]]
EXPECTED = 1 / (1 + math.exp(-2))
TOLERANCE = 1e-3  # of float16


def _python() -> Facts:
    build = "free-threaded" if not getattr(sys, "_is_gil_enabled", lambda: True)() else "with GIL"
    return [
        ("anyflash", f"{anyflash.__version__} in {Path(anyflash.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()}, {build})"),
        ("", sys.executable),
        ("system", f"{platform.platform()}, {' '.join(platform.libc_ver())}".rstrip(", ")),
        ("CPU", f"{machine.cpu_model()}, {os.cpu_count()} processors"),
    ]


def _driver() -> Facts:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [("driver", f"nvidia-smi cannot be run: {error}")]
    text = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()
    return [("driver", line) for line in text.splitlines()] or [("driver", "nvidia-smi is silent")]


def _environment() -> Facts:
    return [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)]


def _makers(info: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(where, what makes an array there of a list)."""
    if importlib.util.find_spec("numpy"):
        numpy = importlib.import_module("numpy")
        yield "CPU", lambda x: numpy.array(x, "float32")
    if info["devices"] and importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        for device in info["devices"]:
            options = {"dtype": torch.float16, "device": f"cuda:{device['index']}"}
            yield f"GPU {device['index']}", functools.partial(torch.tensor, **options)


def _checks(info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, "attention computes", or what went wrong)."""
    for where, array in _makers(info):
        try:
            out = anyflash.attention(array(QUERY), array(KEYS), array(VALUES), softmax_scale=1.0)
            value = float(out.reshape(-1)[0])
        except Exception as error:  # whatever it is, it belongs into the report
            yield where, f"{type(error).__name__}: {error}"
            continue
        good = abs(value - EXPECTED) <= TOLERANCE
        yield where, "attention computes" if good else f"attention gives {value}, not {EXPECTED}"


def report(info: dict[str, Any]) -> tuple[str, bool]:
    """The text, and whether all checks were good."""
    checks = list(_checks(info))
    sections = (
        ("machine", _python() + _driver()),
        ("packages", list(machine.versions(PACKAGES).items())),
        ("environment", _environment()),
        ("checks", checks or [("CPU", "numpy is not installed: nothing was computed")]),
    )
    lines = []
    for title, facts in sections:
        lines += [title, *(f"  {name:<18}{value}".rstrip() for name, value in facts), ""]
    return "\n".join(lines).rstrip(), all(text == "attention computes" for _, text in checks)
