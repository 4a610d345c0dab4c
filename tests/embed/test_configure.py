"""What CMake says and writes for settings, parents and compilers; nothing is compiled."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, output_of

NVCC = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
SMALL = ("-DANYFLASH_CUDA=OFF", "-DANYFLASH_KERNEL_SET=minimal")


def configured(source: Path, folder: Path, *options: str) -> str:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    return output_of(["cmake", "-S", source, "-B", folder, "-G", "Ninja", python, *options])


def script(folder: Path, code: str, **given: str) -> subprocess.CompletedProcess[str]:
    """CMake's functions alone: a script has no compiler."""
    file = folder / "script.cmake"
    files = "".join(f'include("{ROOT}/cmake/{name}.cmake")\n' for name in ("kernels", "cuda"))
    file.write_text("cmake_minimum_required(VERSION 3.24)\n" + files + code)
    settings = [f"-D{name}={value}" for name, value in given.items()]
    command = ["cmake", *settings, "-P", str(file)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.skipif(not any(NVCC), reason="no nvcc")
@pytest.mark.parametrize("where", ["parent", "command line"])
def test_architectures_of_others(tmp_path: Path, where: str) -> None:
    """They reach no file of ours, and those of the project around stay."""
    archs = "set(CMAKE_CUDA_ARCHITECTURES 75)\n" if where == "parent" else ""
    (tmp_path / "theirs.cu").write_text("\n")
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.24...3.31)\n{archs}project(p LANGUAGES CXX CUDA)\n"
        f'add_subdirectory("{ROOT}" anyflash)\nadd_library(theirs STATIC theirs.cu)\n'
    )
    settings = ["-DANYFLASH_KERNEL_SET=minimal", "-DANYFLASH_ARCHS=80-real"]
    if where == "command line":
        settings.append("-DCMAKE_CUDA_ARCHITECTURES=75")
    configured(tmp_path, tmp_path / "build", *settings)
    rules = (tmp_path / "build" / "build.ninja").read_text().split("\n\n")
    built = {r.split()[1]: r for r in rules if re.match(r"(#.*\n)*build \S+\.cu\.o: CUDA", r)}
    assert len(built) > 10
    for name, rule in built.items():
        ours = "theirs.cu" not in name
        assert ("compute_75" in rule, "code=sm_80" in rule) == (not ours, ours), rule


@pytest.mark.parametrize(
    ("wanted", "version", "status"),
    [
        ("AUTO", "12.3.107", "has OFF"),
        ("AUTO", "12.4.99", "has ON"),
        ("ON", "13.0.88", "has ON"),
        ("ON", "11.8.89", "Error"),
    ],
)
def test_version_of_nvcc(tmp_path: Path, wanted: str, version: str, status: str) -> None:
    code = 'anyflash_check_nvcc(has)\nmessage(STATUS "has ${has}")\n'
    done = script(tmp_path, code, ANYFLASH_CUDA=wanted, CMAKE_CUDA_COMPILER_VERSION=version)
    said = words(done.stdout + done.stderr)
    assert status in said
    assert (done.returncode != 0) == (status == "Error")
    if status != "has ON":
        for part in (
            f"nvcc {version}",
            "12.4 and later",
            "CMAKE_CUDA_COMPILER",
            "ANYFLASH_CUDA=OFF",
        ):
            assert part in said


@pytest.mark.parametrize("archs", ["release", "80;100-real", "120"])
def test_new_architectures_need_a_new_nvcc(tmp_path: Path, archs: str) -> None:
    code = "anyflash_requested_archs(archs)\n"
    given = {"ANYFLASH_ARCHS": archs, "CMAKE_CUDA_COMPILER_VERSION": "12.6.20"}
    said = words(script(tmp_path, code, **given).stderr)
    assert re.search(r"'1[02]0(-real)?' needs nvcc 12\.8 or later; this one is 12\.6\.20", said)
    given["CMAKE_CUDA_COMPILER_VERSION"] = "12.8.61"
    assert script(tmp_path, code, **given).returncode == 0


def isas(folder: Path) -> set[str]:
    return {path.stem.split("_")[-1] for path in (folder / "cpp/generated").glob("cpu_forward_*")}


def test_instruction_sets_follow_the_kernel_set(tmp_path: Path) -> None:
    """In one folder: minimal, then full."""
    for kernels in ("minimal", "full"):
        shutil.rmtree(tmp_path / "cpp", ignore_errors=True)
        configured(ROOT, tmp_path, "-DANYFLASH_CUDA=OFF", f"-DANYFLASH_KERNEL_SET={kernels}")
        assert (len(isas(tmp_path)) == 1) == (kernels == "minimal" or isas(tmp_path) == {"neon"})


@pytest.mark.parametrize("given", ["baseline;avx10", "avx", "ON"])
def test_instruction_sets_that_there_are_not(tmp_path: Path, given: str) -> None:
    done = script(tmp_path, "", ANYFLASH_CPU_ISAS=given)
    assert done.returncode != 0
    said = words(done.stderr)
    assert f"has '{given.rpartition(';')[2]}'" in said and "a list of baseline" in said


@pytest.fixture(scope="module")
def dlpack() -> str:
    found = importlib.util.find_spec("tvm_ffi")
    assert found is not None and found.submodule_search_locations
    return f"-DANYFLASH_DLPACK_INCLUDE_DIR={found.submodule_search_locations[0]}/include"


def test_absolute_folders_and_a_version_before_a_release(tmp_path: Path, dlpack: str) -> None:
    source, folder = tmp_path / "source", tmp_path / "build"
    source.mkdir()
    for name in ("CMakeLists.txt", "LICENSE", "cmake", "cpp", "third_party"):
        (source / name).symlink_to(ROOT / name)
    text = (ROOT / "pyproject.toml").read_text()
    text, count = re.subn(r'^version = ".*"$', 'version = "0.2.0rc1"', text, flags=re.MULTILINE)
    assert count == 1
    (source / "pyproject.toml").write_text(text)
    folders = ["-DCMAKE_INSTALL_LIBDIR=/opt/a/lib", "-DCMAKE_INSTALL_INCLUDEDIR=/opt/b/include"]
    configured(source, folder, *SMALL, *folders, dlpack, "-DCMAKE_INSTALL_PREFIX=/opt/c")
    package = (folder / "cpp" / "install" / "anyflash.pc").read_text()
    for line in ("prefix=/opt/c", "libdir=/opt/a/lib", "includedir=/opt/b/include"):
        assert f"{line}\n" in package
    assert "Version: 0.2.0\n" in package
    # The licences of what is installed.
    installed = (folder / "cpp" / "cmake_install.cmake").read_text()
    assert re.findall(r"licenses/(\w+)\.txt", installed) == ["DLPack"]
