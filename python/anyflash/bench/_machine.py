"""On what a benchmark ran: machine, versions, commit; and the GPU's clocks while it ran."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyflash
from anyflash._cli import machine
from anyflash.bench._array_libraries import ArrayLibrary
from anyflash.bench._nvml import REASONS, Nvml

PACKAGES = (
    "numpy", "ml_dtypes", "torch", "triton", "jax", "flash_attn", "flash_attn_3", "flash-attn-4",
    "flashinfer-python", "xformers",
)  # fmt: skip
WATCH_SECONDS = 0.05
# Facts that make the times of two runs comparable.
MACHINE_FACTS = ("gpu", "cpu", "threads", "driver", "power_limit_watts", "isa")


def commit() -> str | None:
    """Of anyflash's checkout, where this package lies in one; with -dirty if it is changed."""
    folder = Path(__file__).resolve().parent
    root = next((p for p in folder.parents if (p / ".git").exists()), None)
    if root is None or not (root / "python/anyflash").is_dir():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()
    return None


def versions() -> dict[str, str]:
    found = {"anyflash": anyflash.__version__, "python": platform.python_version()}
    found |= machine.versions(PACKAGES)
    cuda = anyflash.build_info()["cuda"]
    if cuda:
        found["cuda (anyflash)"] = str(cuda["runtime_version"])
    return found


class Monitor:
    """Samples the GPU while it works. Without NVML, or on the CPU, it has nothing to say."""

    def __init__(self, arrays: ArrayLibrary) -> None:
        self.nvml: Nvml | None = None
        self.samples: list[dict[str, Any]] = []
        self.last = 0.0
        if arrays.device == "cuda":
            torch = importlib.import_module("torch")
            uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
            with contextlib.suppress(OSError, AttributeError):
                self.nvml = Nvml(str(uuid) if uuid else None)

    def watch(self) -> None:
        """Called often, while the GPU is busy."""
        now = time.monotonic()
        if self.nvml is not None and now - self.last >= WATCH_SECONDS:
            self.last = now
            self.samples.append(self.nvml.now())

    def told(self) -> dict[str, Any]:
        """What was seen since the last call: medians, the lowest clock, why clocks were lower."""
        samples, self.samples = self.samples, []
        told: dict[str, Any] = {}
        for name in ("sm_mhz", "memory_mhz", "watts", "celsius"):
            values = [sample[name] for sample in samples if sample[name] is not None]
            if values:
                told[name] = statistics.median(values)
        clocks = [sample["sm_mhz"] for sample in samples if sample["sm_mhz"] is not None]
        if clocks:
            told["lowest_sm_mhz"] = min(clocks)
        bits = 0
        for sample in samples:
            bits |= sample["reasons"] or 0
        reasons = [text for bit, text in REASONS.items() if bits & bit]
        return {**told, "slowed_by": reasons} if reasons else told


def facts(arrays: ArrayLibrary, monitor: Monitor, command: Sequence[str]) -> dict[str, Any]:
    """Machine, versions, commit, command and date of a run."""
    cpu = anyflash.build_info()["cpu"]
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "anyflash", *command]),
        "commit": commit(),
        "backend": arrays.device,
        "arrays": arrays.name,
        "system": platform.platform(),
        "cpu": machine.cpu_model(),
        "cores": os.cpu_count(),
        "threads": cpu["threads"],
        "isa": cpu["isa"],
        "versions": versions(),
    }
    if arrays.device == "cuda":
        torch = importlib.import_module("torch")
        gpu = torch.cuda.get_device_properties(0)
        about |= {
            "gpu": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "gpu_memory_gb": round(gpu.total_memory / 1e9, 1),
        }
        about["versions"] |= {
            "cuda (torch)": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
        if monitor.nvml is not None:
            about |= {"driver": monitor.nvml.driver(), **monitor.nvml.limits()}
    return {name: value for name, value in about.items() if value is not None}
