"""Build backend: scikit-build-core, plus an SBOM in every wheel (anyflash_sbom.py), plus build
requirements that depend on the machine.

A pyproject.toml cannot say "the CUDA headers, but only where CUDA kernels are built". This wrapper
adds

* CUTLASS's headers where CUDA kernels will be built,
* nvcc where it is missing although an NVIDIA driver is there,
* pip where XLA's headers will be downloaded (third_party/xla.cmake): an isolated environment has
  none.

The settings are read where CMake reads them: ``cmake.define.ANYFLASH_CUDA`` and ``_JAX`` among the
config settings, ON, OFF or AUTO, or the environment variable
``SKBUILD_CMAKE_DEFINE="ANYFLASH_CUDA=ON;ANYFLASH_JAX=OFF"``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from scikit_build_core.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import (
    build_wheel as _build_wheel,
)
from scikit_build_core.build import (
    get_requires_for_build_editable as _requires_editable,
)
from scikit_build_core.build import (
    get_requires_for_build_wheel as _requires_wheel,
)

from anyflash_sbom import add_sbom

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, "str | list[str]"]

CUTLASS = ["nvidia-cutlass==4.2.0.0"]
TOOLKIT = [
    f"{package}==13.0.*"
    for package in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]


def setting(name: str, settings: Settings | None) -> str:
    """What ANYFLASH_CUDA or ANYFLASH_JAX will be: 'ON', 'OFF' or 'AUTO'."""
    defines = dict(
        item.split("=", 1)
        for item in os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")
        if "=" in item
    )
    given = (settings or {}).get(f"cmake.define.{name}", defines.get(name, "AUTO"))
    value = (given if isinstance(given, str) else given[-1]).upper()
    names = {"1": "ON", "TRUE": "ON", "YES": "ON", "0": "OFF", "FALSE": "OFF", "NO": "OFF"}
    return names.get(value, value)


def has_nvcc() -> bool:
    """Whether CMake will find a toolkit (cmake/cuda.cmake looks in the same places)."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return bool(
        os.environ.get("CUDACXX")
        or shutil.which("nvcc")
        or any(root and (Path(root) / "bin" / "nvcc").exists() for root in roots)
    )


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def cuda_requirements(settings: Settings | None) -> list[str]:
    """The build requirements that CUDA kernels add on this machine."""
    if setting("ANYFLASH_CUDA", settings) == "OFF":
        return []
    if has_nvcc():
        return CUTLASS
    return CUTLASS + TOOLKIT if has_driver() else []


def jax_requirements(settings: Settings | None) -> list[str]:
    """The build requirements that handlers for JAX add."""
    return [] if setting("ANYFLASH_JAX", settings) == "OFF" else ["pip>=23"]


def requirements(settings: Settings | None) -> list[str]:
    return [*cuda_requirements(settings), *jax_requirements(settings)]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return [*_requires_wheel(config_settings), *requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return [*_requires_editable(config_settings), *requirements(config_settings)]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, list[str] | str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = _build_wheel(wheel_directory, config_settings, metadata_directory)
    add_sbom(Path(wheel_directory) / name)
    return name
