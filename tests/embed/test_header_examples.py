"""The code that the public headers begin with, and the guide's program, compiled and run as they
stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from programs import ROOT, output_of

X = np.array([[1, 2], [0, -1], [3, 1]], np.float64)
INCLUDES = "#include <stdio.h>\n#include <stdlib.h>\n"
PRINT = 'for (int i = 0; i < 6; ++i) printf("%.9g ", (double)y[i]);\nreturn 0;\n'


def example(header: str, mark: str) -> str:
    """The indented lines of the comment that the header begins with, as a program."""
    text = (ROOT / "cpp" / "include" / "anyflash" / header).read_text()
    comment = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]
    code = re.findall(rf"^{re.escape(mark)}   (.*)$", comment, re.MULTILINE)
    assert len(code) > 5, f"{header} begins with no example"
    body = "\n".join(code)
    return f"#include <anyflash/{header}>\n{INCLUDES}int main(void) {{\n{body}\n{PRINT}}}\n"


# What begins a line of the header's comment, and how the program is compiled.
HEADERS = {"attention.h": ("//", "c++ -std=c++17 -x c++"), "anyflash.h": (" *", "cc -std=c99 -x c")}


@pytest.mark.parametrize("header", HEADERS)
def test_example(library: Path, tmp_path: Path, header: str) -> None:
    mark, compiler = HEADERS[header]
    source = tmp_path / "source"
    source.write_text(example(header, mark))
    search = {"PKG_CONFIG_PATH": str(library / "pkgconfig")}
    flags = shlex.split(output_of(["pkg-config", "--cflags", "--libs", "anyflash"], search))
    strict = ["-Wall", "-Wextra", "-Werror", f"-Wl,-rpath,{library}"]
    program = tmp_path / "example"
    output_of([*compiler.split(), source, "-x", "none", "-o", program, *strict, *flags])
    check(output_of([program]))


def test_program_of_the_guide(config: Path, build: Callable[..., Path], tmp_path: Path) -> None:
    page = (ROOT / "python" / "docs" / "guide" / "c_cpp.md").read_text()
    for file, language in {"main.cpp": "c\\+\\+", "CMakeLists.txt": "cmake"}.items():
        (code,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / file).write_text(code)
    check(output_of([build(tmp_path, f"-Danyflash_DIR={config}") / "engine"]))


def check(printed: str) -> None:
    found = np.array(printed.split(), np.float64).reshape(X.shape)
    scores = np.where(np.tri(3, dtype=bool), X @ X.T / np.sqrt(2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ X
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
