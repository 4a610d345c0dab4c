"""Where figures come from: the GPU, the commit, the command, and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

PACKAGES = ("anyflash", "torch", "triton", "jax", "jaxlib", "numpy")


def commit() -> str | None:
    """Of the checkout that this file lies in, with -dirty if it is changed; None: not known."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()
    return None


def run(command: Sequence[str]) -> dict[str, Any]:
    """Of a run of this program, whatever it runs on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *command]),
        "commit": commit(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
    }


def driver() -> dict[str, Any]:
    """Of the first NVIDIA GPU, and what power it may take; empty where nvidia-smi is missing."""
    query = "--query-gpu=driver_version,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        version, watts = done.stdout.splitlines()[0].split(", ")
        return {"driver": version, "power_limit_watts": float(watts)}
    return {}


def hardware(gpu: str | None, more_versions: dict[str, str]) -> dict[str, Any]:
    """What it runs on; `gpu` is its name, or None on a CPU."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"gpu": gpu, **(driver() if gpu else {}), "versions": versions | more_versions}


def device(gpt: Any, name: str) -> dict[str, Any]:
    """By gpt_torch or gpt_jax; `name` is cpu or cuda."""
    return hardware(gpt.gpu() if name == "cuda" else None, gpt.versions())
