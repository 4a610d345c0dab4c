"""The machine code of kernels that may begin before the one before them has ended: no GPU needed.

The emulated GPU runs kernels one after the other. Nothing there would notice a missing wait.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from machine_code.disassembly import Disassembler

import anyflash

ARCHS = ("sm_90", "sm_90a")
# What is launched kWhenAllowed (common/launch.h), by family; "": cpp/kernels/cuda, for all.
KERNELS = {
    "sm80": ("decode",),
    "sm90": (
        "forward", "prefill", "decode", "backward", "wide_backward", "postprocess_dq",
        "clear_counter", "list_blocks",
    ),
    "": ("append", "combine", "key_range_bounds", "preprocess"),
}  # fmt: skip
WAIT = "ACQBULK"  # griddepcontrol.wait
ALLOW = "PREEXIT"  # griddepcontrol.launch_dependents


def kernel_of(function: str) -> str:
    """Of a mangled name: "sm90 forward"; "" if the kernel is not one of KERNELS."""
    for family, names in KERNELS.items():
        space = f"4{family}" if family else r"_GLOBAL__N_\w+?"
        found = re.search(rf"8anyflash\d*{space}\d\d({'|'.join(names)})(_kernel)?[IE]", function)
        if found:
            return f"{family} {found[1]}".strip()
    return ""


@cache
def opcodes() -> dict[tuple[str, str], list[list[str]]]:
    """Of each kernel's functions, by architecture and name."""
    installed = Path(anyflash.__file__).parent / "lib" / "libanyflash.so"
    library = Path(os.environ.get("ANYFLASH_LIBRARY", installed))
    built = (anyflash.build_info()["cuda"] or {"archs": []})["archs"]
    found: dict[tuple[str, str], list[list[str]]] = {}
    for arch in ARCHS:
        if arch not in built:
            continue
        disassembler = Disassembler(library, arch)
        names = [name for name in disassembler.resources() if kernel_of(name)]
        for name, code in disassembler.code(names).items():
            found.setdefault((arch, kernel_of(name)), []).append([i.opcode for i in code])
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "functions" in metafunc.fixturenames:
        absent = pytest.mark.skip(reason=f"a build without {' and '.join(ARCHS)}")
        rows = [pytest.param(code, id="-".join(key)) for key, code in opcodes().items()]
        metafunc.parametrize("functions", rows or [pytest.param([], id="none", marks=absent)])


def test_ci_compiles_them() -> None:
    if os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        families = {name.partition(" ")[0] for _, name in opcodes()}
        assert families == {"sm80", "sm90", *KERNELS[""]}


def test_waits(functions: list[list[str]]) -> None:
    assert all(WAIT in code for code in functions)


def test_preprocessing_waits_first() -> None:
    """The kernel behind it loads K and V before it waits itself."""
    for (_, name), functions in opcodes().items():
        if name == "preprocess":
            assert all(code.index(WAIT) < code.index(ALLOW) for code in functions)
