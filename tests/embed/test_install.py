"""find_package, pkg-config, shared and static, from C and Rust; projects that build anyflash."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import EXAMPLES, ROOT, output_of

Build = Callable[..., Path]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"]


def test_c_program(build: Build, config: Path) -> None:
    folder = build(EXAMPLES / "c", f"-Danyflash_DIR={config}")
    assert "difference of the output" in output_of([folder / "attention"])


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_pkg_config(prefix: Path, library: Path, tmp_path: Path, static: bool) -> None:
    """The static library needs what pkg-config names, and then no file of ours."""
    search = {"PKG_CONFIG_PATH": str(library / "pkgconfig")}
    arguments = ["--static"] * static + ["--cflags", "--libs", "anyflash"]
    flags = shlex.split(output_of(["pkg-config", *arguments], search))
    if static:
        flags = [f"-l:lib{flag[2:]}.a" if flag == "-lanyflash" else flag for flag in flags]
    program = tmp_path / "attention"
    output_of(["cc", *STRICT, EXAMPLES / "c" / "attention.c", "-o", program, *flags, "-lm"])
    found = {"LD_LIBRARY_PATH": "" if static else str(library)}
    assert "difference" in output_of([program], found)
    assert ("libanyflash.so" in output_of(["ldd", program], found)) is not static
    assert output_of(["pkg-config", "--modversion", "anyflash"], search).startswith("0.1.")


def test_what_is_found(tmp_path: Path, prefix: Path) -> None:
    """Another minor version is not taken, nor the static library by a project without C++."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(p LANGUAGES C)\n"
        "foreach(version IN ITEMS 0.1 0.2 1)\n"
        "  find_package(anyflash ${version} CONFIG QUIET)\n"
        '  message("${version}=${anyflash_FOUND}")\nendforeach()\n'
        "find_package(anyflash CONFIG REQUIRED COMPONENTS shared)\n"
        "get_target_property(kind anyflash::anyflash TYPE)\n"
        'message("kind=${kind}")\n'
        "find_package(anyflash CONFIG COMPONENTS static)\n"
    )
    options = ["-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"]
    printed = output_of(["cmake", "-S", tmp_path, *options])
    facts = {line for line in printed.splitlines() if "=" in line}
    assert {"0.1=1", "0.2=0", "1=0", "kind=SHARED_LIBRARY"} <= facts
    assert "add CXX to the languages" in " ".join(printed.split())


def test_one_kind_in_a_directory(tmp_path: Path, prefix: Path) -> None:
    """The other one is not found after it; the same one, or any, is."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(p LANGUAGES CXX)\n"
        "foreach(kinds IN ITEMS shared static static shared)\n"
        "  find_package(anyflash CONFIG COMPONENTS ${kinds})\n"
        '  message("${kinds}=${anyflash_FOUND}")\nendforeach()\n'
        'find_package(anyflash CONFIG)\nmessage("any=${anyflash_FOUND}")\n'
    )
    options = ["-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"]
    printed = output_of(["cmake", "-S", tmp_path, *options])
    facts = [line for line in printed.splitlines() if re.fullmatch(r"\w+=\w+", line)]
    assert facts == ["shared=1", "static=0", "static=0", "shared=1", "any=1"]
    assert "the static library is asked for" in " ".join(printed.split())


@pytest.mark.parametrize("language", ["C", "CXX"])
def test_the_headers_ask_for_their_standard(tmp_path: Path, prefix: Path, language: str) -> None:
    """Of a project of an older one; a project without C++ is asked for nothing."""
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.24)\nproject(p LANGUAGES {language})\n"
        "set(CMAKE_CXX_STANDARD 14)\nfind_package(anyflash CONFIG REQUIRED)\n"
        f"set_source_files_properties(main.c PROPERTIES LANGUAGE {language})\n"
        "add_executable(p main.c)\ntarget_link_libraries(p PRIVATE anyflash::anyflash)\n"
    )
    options = ["-B", tmp_path / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"]
    output_of(["cmake", "-S", tmp_path, *options])
    # The compiler's own standard is newer, or it is given one.
    found = re.findall(r"-std=\S+", (tmp_path / "build" / "build.ninja").read_text())
    assert found in ([], ["-std=gnu++17"])


def test_rust_program(tmp_path: Path, library: Path) -> None:
    program = tmp_path / "attention"
    source = EXAMPLES / "rust" / "attention.rs"
    options = ["--edition", "2021", "-L", f"native={library}", "-o", program]
    output_of(["rustc", source, *options])
    printed = output_of([program], {"LD_LIBRARY_PATH": str(library)})
    assert "k has 3 heads, which does not divide q's 4" in printed


def test_in_tree(build: Build, tmp_path: Path) -> None:
    """FetchContent, without Python: a static library with sanitizers. Wrong calls are refused."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    python.chmod(0o755)
    dlpack = importlib.util.find_spec("tvm_ffi")
    assert dlpack is not None and dlpack.submodule_search_locations
    folder = build(
        ROOT / "tests" / "embed" / "in_tree",
        "-DCMAKE_BUILD_TYPE=",
        "-DCMAKE_CXX_FLAGS=-O1",
        f"-DANYFLASH_SOURCE={ROOT}",
        "-DANYFLASH_CUDA=OFF",
        "-DANYFLASH_CPU_ISAS=baseline",
        f"-DANYFLASH_PYTHON_PROGRAM={python}",
        f"-DANYFLASH_DLPACK_INCLUDE_DIR={dlpack.submodule_search_locations[0]}/include",
    )
    assert not (tmp_path / "asked").exists()
    printed = output_of([folder / "bad_input"])
    refused = int(printed.split()[0])
    assert refused > 1000 and printed.endswith(", 0 failures\n"), printed
    # Nothing of anyflash is installed with the project around it.
    output_of(["cmake", "--install", folder, "--prefix", tmp_path / "prefix"])
    assert not any(path.is_file() for path in (tmp_path / "prefix").rglob("*"))
    assert os.access(folder / "engine" / "engine", os.X_OK)
