"""What ptxas makes of Hopper's decoding kernels."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from figures import DTYPES
from machine_code.disassembly import Disassembler
from test_hopper import ARCH, Code, kernels, products, read, spills

import anyflash

PATTERN = re.compile(
    r"sm9013decode_kernelINS0_\d+(?:Decode|SharedRows)TraitsIN7cutlass\d+(half_t|bfloat16_t)"
    r"ELi(\d+)ELi(\d+)(?:ELi(\d+))?ELb0E"
)  # of 16-bit caches
SHARED_ROWS = 64  # the rows of latent attention that warpgroups share
KEYS = 64  # of a tile
# Beside the loop that a CTA runs for each tile: what it spills once, by head dim and rows.
SPILLS = {(128, 64): 30}


@cache
def codes() -> dict[tuple[str, int, int], Code]:
    """By dtype, head dim and rows."""
    installed = Path(anyflash.__file__).parent / "lib" / "libanyflash.so"
    disassembler = Disassembler(Path(os.environ.get("ANYFLASH_LIBRARY", installed)), ARCH)
    names = {name: found for name in disassembler.resources() if (found := PATTERN.search(name))}
    result = {}
    for name, code in disassembler.code(names).items():
        element, head_dim, _, rows = names[name].groups()
        result[DTYPES[element], int(head_dim), int(rows or SHARED_ROWS)] = read(code)
    return result


def of_16_bits() -> dict[str, dict[str, Any]]:
    return {
        x: row for x, row in kernels("decode").items() if "quantized_cache" not in row["features"]
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        absent = pytest.mark.skip(reason=f"a build without kernels for {ARCH}")
        rows = [pytest.param(row, id=name) for name, row in of_16_bits().items()]
        metafunc.parametrize("row", rows or [pytest.param({}, id="none", marks=absent)])


def code_of(row: dict[str, Any]) -> Code:
    return codes()[row["dtype"], row["head_dim"], row["block_m"]]


def test_ci_compiles_them() -> None:
    if os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        assert of_16_bits()


def shares_rows(row: dict[str, Any]) -> bool:
    return row["head_dim"] != row["head_dim_v"] and row["block_m"] == SHARED_ROWS


def test_products(row: dict[str, Any]) -> None:
    """S^T takes one for each 16 columns of Q; O^T one for each 16 keys and 64 columns of V. Where
    warpgroups share rows, O takes one for each 16 keys of either tile. The code has them once."""
    warpgroups = 2 if row["block_m"] == 64 and row["head_dim"] >= 256 else 1
    scores = row["head_dim"] // 16
    values = KEYS // 16 * row["head_dim_v"] // 64
    columns = row["block_m"] // warpgroups
    expected = Counter({columns: scores + values})
    if shares_rows(row):
        expected = Counter({KEYS: scores, row["head_dim_v"] // 2: 2 * KEYS // 16})
    dtype = ".BF16" if row["dtype"] == "bfloat16" else ""
    names = {f"HGMMA.64x{n}x16.F32{dtype}": count for n, count in expected.items()}
    assert products(code_of(row).opcodes) == Counter(names)


def test_products_are_not_serialised(row: dict[str, Any]) -> None:
    """A fence and a wait for each group: of S and of O. Where warpgroups share rows, S has three
    groups and one wait, and O two and two."""
    opcodes = code_of(row).opcodes
    assert opcodes["WARPGROUP.ARRIVE"] == (5 if shares_rows(row) else 2)
    assert opcodes["WARPGROUP.DEPBAR.LE"] == (3 if shares_rows(row) else 2)


def test_spills(row: dict[str, Any]) -> None:
    allowed = SPILLS.get((row["head_dim"], row["block_m"]), 0)
    assert spills(code_of(row).opcodes) <= allowed
