"""Programs compiled against the header of an earlier version, and what the libraries export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from abi3info import DATAS, FUNCTIONS
from abi3info.models import PyVersion, Symbol
from programs import ROOT, output_of

from anyflash import _core

ABI = Path(__file__).parent / "abi"
VERSIONS = sorted(path.name for path in ABI.iterdir())
HEADERS = ROOT / "cpp" / "include"


def consumer(version: str, header: Path, prefix: Path, library: Path, program: Path) -> Path:
    """The version's program, compiled with the header of a folder."""
    output_of(
        [
            *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", program),
            *(ABI / version / "consumer.c", "-I", header, "-isystem", prefix / "include"),
            *("-L", library, "-lanyflash", "-lm", f"-Wl,-rpath,{library}"),
        ]
    )
    return program


@pytest.mark.parametrize("version", VERSIONS)
def test_frozen_header(version: str, prefix: Path, library: Path, tmp_path: Path) -> None:
    old = consumer(version, ABI / version, prefix, library, tmp_path / "old")
    assert f"{version} runs with" in output_of([old])
    new = consumer(version, HEADERS, prefix, library, tmp_path / "new")
    assert f"{version} runs with" in output_of([new])
    layout = output_of([old, "layout"])
    assert layout.count("\n") > 60
    assert output_of([new, "layout"]) == layout


def fields(header: Path) -> dict[str, list[str]]:
    """The fields of each struct, in order."""
    structs: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in header.read_text().splitlines():
        code = line.split("/*")[0].strip()
        if code.startswith("typedef struct"):
            lines = []
        elif code.startswith("} anyflash_"):
            structs[code[2:-1]], lines = lines, []
        elif code.endswith(";"):
            lines.append(code)
    return structs


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_come_at_the_end(version: str) -> None:
    today = fields(HEADERS / "anyflash" / "anyflash.h")
    frozen = fields(ABI / version / "anyflash" / "anyflash.h")
    assert len(frozen) >= 4
    for name, known in frozen.items():
        assert today[name][: len(known)] == known, name
    program = (ABI / version / "consumer.c").read_text()
    for name, known in frozen.items():
        for field in known:
            word = field.rstrip(";").split("[")[0].split()[-1].lstrip("*")
            assert f"FIELD({name}, {word});" in program, f"consumer.c does not know {name}.{word}"


def exported(library: Path) -> Iterator[str]:
    for line in output_of(["nm", "-D", "-C", "--defined-only", library]).splitlines():
        yield line.split(maxsplit=2)[2]


def test_exported_symbols(library: Path) -> None:
    """The list is sorted; the package's library and the installed one export just that."""
    names = (ROOT / "cpp" / "src" / "exports.txt").read_text().splitlines()
    assert names == sorted(set(names))
    module = Path(_core.__file__)
    for path in (library / "libanyflash.so", module.parent / "lib" / "libanyflash.so"):
        assert sorted(set(exported(path))) == names, path
    assert list(exported(module)) == ["PyInit__core"]


def needed_of_python(module: Path) -> list[Symbol]:
    lines = output_of(["nm", "-D", "--undefined-only", module]).splitlines()
    names = [line.split()[-1].partition("@")[0] for line in lines]
    return [Symbol(name) for name in names if name.startswith(("Py", "_Py"))]


def test_the_module_needs_the_stable_abi_alone() -> None:
    """That of CPython 3.10, so that the wheel runs with Pythons that nobody has tried."""
    stable = FUNCTIONS | DATAS
    needed = needed_of_python(Path(_core.__file__))
    assert len(needed) > 20
    assert [symbol.name for symbol in needed if symbol not in stable] == []
    later = [symbol.name for symbol in needed if stable[symbol].added > PyVersion(3, 10)]
    assert later == []


def test_header_is_frozen_for_this_version() -> None:
    version = ".".join(_core.version.split(".")[:2])
    assert version in VERSIONS, f"copy anyflash.h and export.h to {ABI / version}, add a consumer.c"
