"""cmake/cuda.cmake: the architectures of ANYFLASH_ARCHS, for other machines and compilers, too."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from lint import tool

FOLDER = Path(__file__).parents[2] / "cmake"
EVERYWHERE = ["80-real", "90-real", "90a-real", "100-real", "120-real", "80-virtual"]
ORIN, THOR, THOR_OF_CUDA_12 = "87-real", "110-real", "101-real"

# A script has no compiler, which kernels.cmake would ask about the flags of a known processor.
SCRIPT = f"""
include("{FOLDER}/kernels.cmake")
set(CMAKE_SYSTEM_PROCESSOR ${{processor}})
include("{FOLDER}/cuda.cmake")
anyflash_requested_archs(archs)
message(STATUS "archs=${{archs}}")
"""


def run(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    script = folder / "archs.cmake"
    script.write_text(SCRIPT)
    settings = [f"-D{name}={value}" for name, value in given.items()]
    command = [str(tool("cmake")), *settings, "-P", str(script)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("processor", "cuda", "added"),
    [
        ("x86_64", "12.9.86", []),
        ("x86_64", "13.0.48", []),
        ("aarch64", "12.9.86", [ORIN, THOR_OF_CUDA_12]),
        ("aarch64", "13.0.48", [ORIN, THOR]),
        ("arm64", "13.2.0", [ORIN, THOR]),
    ],
)
def test_release(tmp_path: Path, processor: str, cuda: str, added: list[str]) -> None:
    done = run(
        tmp_path,
        ANYFLASH_ARCHS="release",
        processor=processor,
        CMAKE_CUDA_COMPILER_VERSION=cuda,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert sorted(line.removeprefix("-- archs=").split(";")) == sorted(EVERYWHERE + added)


@pytest.mark.parametrize("archs", ["75", "90a", "100f", "80;ninety"])
def test_refused(tmp_path: Path, archs: str) -> None:
    done = run(tmp_path, ANYFLASH_ARCHS=archs)
    assert done.returncode != 0
    given = archs.rpartition(";")[2]
    assert re.search(rf"ANYFLASH_ARCHS (has|is) '{given}'", " ".join(done.stderr.split()))
