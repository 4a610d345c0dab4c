"""The machine code of the sm_90 kernels: no GPU needed.

ptxas serialises a warpgroup's products where it does not understand their registers, and ignores
setmaxnreg where it does not know the CTA's size; it only says so in passing. Here such code is seen
by its instructions.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from figures import DTYPES
from machine_code.disassembly import Disassembler
from machine_code.instructions import Instruction

import anyflash

ARCH = "sm_90a"
FORWARD = re.compile(
    r"sm9014forward_kernelINS0_13ForwardTraitsIN7cutlass\d+(half_t|bfloat16_t)ELi(\d+)ELi(\d+)E"
)
# Of a kernel's text, the loop over tiles of keys is there for masked and for other tiles; the first
# tile's Q K^T and the last one's P V stand outside.
COPIES = 3
# Where tiles have 128 keys, one more Q K^T is for a first tile of which only the first 64 are seen.
FEW_KEYS = 64
REGISTERS = {
    128: ("0x28", "0xe8"),
    192: ("0x20", "0xa0"),
}  # by rows of a CTA: producer's, consumers'


class Code(NamedTuple):
    opcodes: Counter[str]
    loops: list[Counter[str]]
    handed: dict[str, str]  # registers: how setmaxnreg changes them, and to what


def read(code: list[Instruction]) -> Code:
    handed, loops = {}, []
    for instruction in code:
        if instruction.opcode.startswith("USETMAXREG"):
            handed[instruction.opcode.split(".")[1]] = instruction.operands.rpartition(" ")[2]
        target = re.search(r"0x([0-9a-f]+)$", instruction.operands)
        if instruction.opcode == "BRA" and target:
            inside = range(int(target[1], 16), instruction.address)
            loops.append(Counter(i.opcode for i in code if i.address in inside))
    return Code(Counter(i.opcode for i in code), loops, handed)


def products(opcodes: Counter[str]) -> Counter[str]:
    return Counter({name: n for name, n in opcodes.items() if name.startswith("HGMMA")})


def expected_products(row: dict[str, Any]) -> Counter[str]:
    """Of a step: S takes one for each 16 columns of Q, O one for each 16 keys."""
    dtype = ".BF16" if row["dtype"] == "bfloat16" else ""
    expected: Counter[str] = Counter()
    expected[f"HGMMA.64x{row['block_n']}x16.F32{dtype}"] += row["head_dim"] // 16
    expected[f"HGMMA.64x{row['head_dim_v']}x16.F32{dtype}"] += row["block_n"] // 16
    return expected


@cache
def kernels() -> dict[str, dict[str, Any]]:
    info = anyflash.build_info()
    built = info["cuda"] and ARCH in info["cuda"]["archs"]
    return {row["name"]: row for row in info["kernels"] if built and row["arch"] == "sm90"}


@cache
def codes() -> dict[tuple[str, int, int], Code]:
    """By dtype and head dims."""
    installed = Path(anyflash.__file__).parent / "lib" / "libanyflash.so"
    disassembler = Disassembler(Path(os.environ.get("ANYFLASH_LIBRARY", installed)), ARCH)
    names = {name: found for name in disassembler.resources() if (found := FORWARD.search(name))}
    result = {}
    for name, code in disassembler.code(names).items():
        element, head_dim, head_dim_v = names[name].groups()
        result[DTYPES[element], int(head_dim), int(head_dim_v)] = read(code)
    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames:
        return
    absent = pytest.mark.skip(reason=f"a build without kernels for {ARCH}")
    rows = [pytest.param(row, id=name) for name, row in kernels().items()]
    metafunc.parametrize("row", rows or [pytest.param({}, id="none", marks=absent)])


def code_of(row: dict[str, Any]) -> Code:
    return codes()[row["dtype"], row["head_dim"], row["head_dim_v"]]


def test_ci_compiles_them() -> None:
    if os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        assert kernels()


def has_few_keys(row: dict[str, Any]) -> bool:
    return row["block_n"] == 2 * FEW_KEYS


def test_products(row: dict[str, Any]) -> None:
    expected = Counter({name: COPIES * n for name, n in expected_products(row).items()})
    if has_few_keys(row):
        few = expected_products({**row, "block_n": FEW_KEYS, "head_dim_v": 0})
        expected += Counter({name: n for name, n in few.items() if f"64x{FEW_KEYS}x" in name})
    assert products(code_of(row).opcodes) == expected


def test_products_are_not_serialised(row: dict[str, Any]) -> None:
    """A fence and a wait for each group: of S and of O."""
    opcodes = code_of(row).opcodes
    groups = 2 * COPIES + has_few_keys(row)
    assert opcodes["WARPGROUP.ARRIVE"] == groups
    assert opcodes["WARPGROUP.DEPBAR.LE"] == groups


def test_no_spills_without_masks(row: dict[str, Any]) -> None:
    """In the last loop over tiles, of those that need no mask."""
    loops = [loop for loop in code_of(row).loops if products(loop) == expected_products(row)]
    assert not [name for name in loops[-1] if name.startswith(("LDL", "STL"))]


def test_registers_are_handed_over(row: dict[str, Any]) -> None:
    producer, consumer = REGISTERS[row["block_m"]]
    assert code_of(row).handed == {"DEALLOC": producer, "TRY_ALLOC": consumer}


def test_tensors_move_by_tma(row: dict[str, Any]) -> None:
    """A box for each 64 columns: of each warpgroup's Q; of the first, the second and the other
    tiles of K; of the first and the other tiles of V; of O, where it has a place to leave from."""
    opcodes = code_of(row).opcodes
    panels, panels_v = -(-row["head_dim"] // 64), -(-row["head_dim_v"] // 64)
    warpgroups = row["block_m"] // 64
    assert opcodes["UTMALDG.4D"] == (warpgroups + 3) * panels + 2 * panels_v
    assert opcodes["UTMASTG.4D"] == (panels_v if row["head_dim"] <= 128 else 0)
