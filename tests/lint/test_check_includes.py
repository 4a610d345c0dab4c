"""The checker finds what it is there for, and nothing in a tree that keeps the rules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checker_runs import status_and_lines

CHECKER = Path(__file__).with_name("check_includes.py")

GOOD = {
    "cpp/include/anyflash/error.h": "#include <string>\n",
    "cpp/include/anyflash/anyflash.h": '#include <dlpack/dlpack.h>\n#include "anyflash/error.h"\n',
    "cpp/include/anyflash/version.h.in": "#define VERSION 1\n",
    "cpp/src/params.h": "#include <cstdint>\n",
    "cpp/src/validate.h": '#include "params.h"\n',
    "cpp/src/memory.h": "#include <cstddef>\n",
    "cpp/src/info.cpp": '#include <omp.h>\n#include "anyflash/version.h"\n#include "validate.h"\n',
    "cpp/src/device.cu": "#include <cuda_runtime_api.h>\n",
    "cpp/kernels/common/macros.h": "// cpu::avx2 is built elsewhere\n",
    "cpp/kernels/variant/mask.h": '#include "common/macros.h"\n#include "params.h"\n',
    "cpp/kernels/sm80/fwd.h": '#include <cute/tensor.hpp>\n#include "variant/mask.h"\n',
    "cpp/kernels/sm90/fwd.h": "#include <cuda_fp16.h>\n",
    "cpp/kernels/cpu/fwd.h": '#include <immintrin.h>\n#include "params.h"\n',
    "python/src/module.cpp": '#include <nanobind/nanobind.h>\n#include "memory.h"\n',
    "README.md": "See https://example.org/home/a/shared/b and /usr/local/cuda.\n",
}


def run(root: Path, **changes: str) -> tuple[int, list[str]]:
    for name, text in {**GOOD, **changes}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return status_and_lines(CHECKER, root)


def test_a_tree_that_keeps_the_rules(tmp_path: Path) -> None:
    assert run(tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("name", "include"),
    [
        ("cpp/kernels/sm80/fwd.h", '"sm90/fwd.h"'),
        ("cpp/kernels/sm90/fwd.h", '"sm80/fwd.h"'),
        ("cpp/kernels/cpu/fwd.h", '"sm80/fwd.h"'),
        ("cpp/kernels/cpu/fwd.h", '"../sm80/fwd.h"'),
        ("cpp/kernels/cpu/fwd.h", "<cuda_runtime.h>"),
        ("cpp/kernels/common/macros.h", '"variant/mask.h"'),
        ("cpp/kernels/common/macros.h", '"cpu/fwd.h"'),
        ("cpp/kernels/variant/mask.h", '"sm80/fwd.h"'),
        ("cpp/kernels/sm80/fwd.h", '"validate.h"'),
        ("cpp/src/info.cpp", '"variant/mask.h"'),
        ("cpp/src/info.cpp", "<cute/tensor.hpp>"),
        ("cpp/src/device.cu", "<cuda_fp16.h>"),
        ("cpp/include/anyflash/error.h", '"params.h"'),
        ("cpp/include/anyflash/error.h", "<cuda_runtime_api.h>"),
        ("cpp/include/anyflash/error.h", "<omp.h>"),
        ("python/src/module.cpp", '"validate.h"'),
        ("python/src/module.cpp", "<torch/torch.h>"),
        ("cpp/src/info.cpp", '"missing.h"'),
    ],
)
def test_an_include_against_the_arrows(tmp_path: Path, name: str, include: str) -> None:
    status, lines = run(tmp_path, **{name: f"\n#include {include}\n"})
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}:2: includes {include}")


def test_an_architecture_named_in_shared_code(tmp_path: Path) -> None:
    status, lines = run(tmp_path, **{"cpp/kernels/common/macros.h": "using sm80::Traits;\n"})
    assert status == 1
    assert lines == [
        "cpp/kernels/common/macros.h: names the architecture sm80; "
        "cpp/kernels/common/ serves all of them"
    ]


def test_long_files_and_lines(tmp_path: Path) -> None:
    status, lines = run(tmp_path, **{"cpp/src/params.h": "\n" * 401})
    assert (status, lines) == (1, ["cpp/src/params.h: has 401 lines; at most 400 are allowed"])
    status, lines = run(tmp_path, **{"cpp/src/params.h": "// " + "x" * 98 + "\n"})
    assert (status, lines) == (1, ["cpp/src/params.h:1: has 101 columns; at most 100 are allowed"])


@pytest.mark.parametrize("folder", ["home", "root", "tmp", "Users"])
def test_a_path_of_one_machine(tmp_path: Path, folder: str) -> None:
    status, lines = run(tmp_path, **{"docs/use.md": f"Open '/{folder}/me/file'.\n"})
    assert status == 1
    assert lines == [f"docs/use.md:1: names a path of one machine: /{folder}/me/file'."]


@pytest.mark.parametrize("above", ["", "./", "../", "../../"])
def test_a_path_beside_the_repository(tmp_path: Path, above: str) -> None:
    path = above + "shared" + "/notes.md"
    _, lines = run(tmp_path, **{"docs/use.md": f"See ({path}\n"})
    assert lines == [f"docs/use.md:1: names a path of one machine: {path}"]


def test_what_git_ignores_is_not_checked(tmp_path: Path) -> None:
    run(tmp_path, **{".gitignore": "/build/\n", "build/log.txt": "/" + "home/me/build\n"})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert run(tmp_path) == (0, [])
    status, lines = run(tmp_path, **{"log.txt": "/" + "home/me/build\n"})
    assert status == 1
    assert lines[0].startswith("log.txt:1:")
