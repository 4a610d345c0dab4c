"""Build backend: scikit-build-core, plus an SBOM in every wheel (anyflash_sbom.py), plus build
requirements that depend on the machine.

A pyproject.toml cannot say "the CUDA headers, but only where CUDA kernels are built". This wrapper
adds

* CUTLASS's headers where CUDA kernels will be built,
* nvcc where it is missing although an NVIDIA driver is there,
* pip where XLA's headers will be downloaded (third_party/xla.cmake): an isolated environment has
  none.

The settings ANYFLASH_CUDA and ANYFLASH_JAX, ON, OFF or AUTO, are read where scikit-build-core reads
what it gives CMake. The last of these wins:

* ``cmake.define.ANYFLASH_CUDA=ON`` among the config settings,
* ``SKBUILD_CMAKE_DEFINE="ANYFLASH_CUDA=ON;ANYFLASH_JAX=OFF"`` in the environment,
* ``-DANYFLASH_CUDA=ON`` in ``SKBUILD_CMAKE_ARGS``, or else in the config setting ``cmake.args``,
* ``-DANYFLASH_CUDA=ON`` in ``CMAKE_ARGS``.

A config setting may begin with ``skbuild.``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
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


def of_arguments(arguments: Iterable[str]) -> dict[str, str]:
    """What CMake's arguments define: -DNAME=VALUE, -DNAME:TYPE=VALUE, also in two words."""
    text = "\0".join(["", *arguments])
    return dict(re.findall(r"\0-D\0?([^\0:=]+)(?::[^\0=]*)?=([^\0]*)", text))


def definitions(settings: Settings | None) -> dict[str, str]:
    """What CMake will be given, by name."""
    given = {name.removeprefix("skbuild."): value for name, value in (settings or {}).items()}
    found = {
        name.removeprefix("cmake.define."): value if isinstance(value, str) else value[-1]
        for name, value in given.items()
        if name.startswith("cmake.define.")
    }
    words = os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")
    found |= dict(word.split("=", 1) for word in words if "=" in word)
    arguments = os.environ.get("SKBUILD_CMAKE_ARGS", given.get("cmake.args", ""))
    found |= of_arguments(arguments.split(";") if isinstance(arguments, str) else arguments)
    return found | of_arguments(shlex.split(os.environ.get("CMAKE_ARGS", "")))


def setting(name: str, settings: Settings | None) -> str:
    """What ANYFLASH_CUDA or ANYFLASH_JAX will be: 'ON', 'OFF' or 'AUTO'."""
    value = definitions(settings).get(name, "AUTO").upper()
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
