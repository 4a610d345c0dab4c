"""Programs that use the installed library, configured, built and run as their owners would do it.

ANYFLASH_PREFIX names an installation (`cmake --install build/test --prefix ...`) with a shared and
a static library; the other one is the anyflash package of this Python.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import output_of

import anyflash


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installation, at another place than it was installed to: nothing names that one."""
    installed = os.environ.get("ANYFLASH_PREFIX")
    assert installed, "set ANYFLASH_PREFIX to an installation: make check-embed"
    moved = tmp_path_factory.mktemp("moved") / "a prefix"
    shutil.copytree(installed, moved, symlinks=True)
    return moved


@pytest.fixture(scope="session")
def library(prefix: Path) -> Path:
    """The folder of the installed library."""
    return next(prefix.glob("lib*/**/libanyflash.so")).parent


@pytest.fixture(scope="session", params=["prefix", "package"])
def config(request: pytest.FixtureRequest) -> Path:
    """anyflash-config.cmake's folder: of the installation, and of the Python package."""
    if request.param == "package":
        return Path(anyflash.get_cmake_dir())
    return request.getfixturevalue("library") / "cmake" / "anyflash"


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build(source, *options) configures and builds a CMake project and returns its folder."""

    def run(source: Path, *options: str) -> Path:
        folder = tmp_path_factory.mktemp("build")
        configure = ("cmake", "-S", source, "-B", folder, "-G", "Ninja")
        output_of([*configure, "-DCMAKE_BUILD_TYPE=Release", *options])
        output_of(["cmake", "--build", folder])
        return folder

    return run
