"""Facts about this machine, for reports of bugs and of benchmarks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path


def cpu_model() -> str:
    """As /proc/cpuinfo calls it, where there is one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
