"""The machine code of the sm_90 kernels: no GPU needed.

ptxas serialises a warpgroup's products where it does not understand their registers, and ignores
setmaxnreg where it does not know the CTA's size; it only says so in passing. Here such code is seen
by its instructions.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from figures import DTYPES
from machine_code.disassembly import Disassembler
from machine_code.instructions import Instruction

import anyflash

ARCH = "sm_90a"
# Element, head dims, and the variant's name with its length before it.
FORWARD, PREFILL = (
    re.compile(
        rf"sm9014{op}_kernelINS0_13ForwardTraitsIN7cutlass\d+(half_t|bfloat16_t)ELi(\d+)ELi(\d+)E"
        r".*NS_\d+([A-Z][a-z]+)(?:Series)?ForwardE"
    )
    for op in ("forward", "prefill")
)
# Of a kernel's text, the loop over tiles of keys is there for masked and for other tiles; the first
# tile's Q K^T and the last one's P V stand outside.
COPIES = 3
PASS_COLUMNS = 256  # of V and of the results that one launch has, at most
# One more Q K^T is for a first tile of which only the first keys are seen: by keys of a tile.
FEW_KEYS = {128: 64, 80: 48}
REGISTERS = {
    128: ("0x28", "0xe8"),
    192: ("0x20", "0xa0"),
}  # by rows of a CTA: producer's, consumers'
FIND_TILES = ("ranges", "blocks")
# Where the producer finds tiles or looks up pages, with 128 rows, up to head dim 128.
REGISTERS_OF_LOOKING = ("0x38", "0xe0")
BACKWARD_REGISTERS = ("0x18", "0xf0")
BACKWARD_OF_LOOKING = ("0x28", "0xe8")
# Loads and stores of spilled registers in a whole kernel's text: variant, head dim, part.
BACKWARD_SPILLS = {
    ("plain", 64, "main"): 6,  # in the body of the loop for masks
    ("alibi", 64, "main"): 2,
    ("softcap", 64, "main"): 42,
    ("softcap", 64, "without_dq"): 35,
    ("softcap", 128, "without_dq"): 6,
    ("dropout", 128, "main"): 17,
    ("dropout", 128, "without_dq"): 6,
    ("ranges", 64, "main"): 57,  # with two bodies of the loop, which gain 3 to 4 %
    ("ranges", 128, "main"): 26,
    ("blocks", 64, "main"): 10,
    ("blocks", 64, "dq_by_rows"): 21,
    ("blocks", 128, "main"): 30,
    ("blocks", 128, "dq_by_rows"): 19,
}


SPILLING = ("LDL", "STL")


class Code(NamedTuple):
    opcodes: Counter[str]
    loops: list[Counter[str]]
    handed: dict[str, str]  # registers: how setmaxnreg changes them, and to what
    overwritten: list[Instruction] | None  # overwritten_operands()
    products: list[str]  # opcodes, as they stand in the text
    spilled_after: list[int]  # of each load and store of a spilled register: products before it


def loops_of(code: list[Instruction]) -> list[range]:
    """Addresses from the target of each branch backwards to the branch."""
    targets = ((i, re.search(r"0x([0-9a-f]+)$", i.operands)) for i in code if i.opcode == "BRA")
    return [range(int(target[1], 16), i.address) for i, target in targets if target]


def loaded_before(code: list[Instruction], loop: range) -> set[int]:
    """Registers that LDSM has filled since the last product before the loop."""
    loaded: set[int] = set()
    for i in code:
        if i.address >= loop.start:
            break
        if i.opcode.startswith("HGMMA"):
            loaded.clear()
        elif i.opcode.startswith("LDSM.16.M88.4"):
            loaded.update(written_registers(i))
    return loaded


def overwritten_operands(code: list[Instruction]) -> list[Instruction] | None:
    """What writes, in a loop, to operands of its products that LDSM has loaded before the loop.

    nvcc 13.0's ptxas may give their registers to another product's operand, though the next step
    needs them. None, if no product has such an operand.
    """
    loops = loops_of(code)
    steps: dict[range, set[int]] = {}  # registers of operands, by the innermost loop
    for i in code:
        operand = re.match(r"R\d+, R(\d+), gdesc", i.operands)
        around = [loop for loop in loops if i.address in loop] if operand else []
        if operand and around:
            registers = steps.setdefault(min(around, key=len), set())
            registers.update(range(int(operand[1]), int(operand[1]) + 4))
    kept = {loop: registers & loaded_before(code, loop) for loop, registers in steps.items()}
    if not any(kept.values()):
        return None
    return [
        i
        for loop, registers in kept.items()
        for i in code
        if i.address in loop and registers.intersection(written_registers(i))
    ]


def written_registers(instruction: Instruction) -> range:
    """What the instruction writes to, if these are registers."""
    found = re.match(r"R(\d+)\b", instruction.operands)
    if not found:
        return range(0)
    opcode = instruction.opcode
    if product := re.match(r"HGMMA\.64x(\d+)", opcode):
        count = int(product[1]) // 2
    elif opcode.startswith("LDSM.16.M88.4") or opcode.endswith(".128"):
        count = 4
    else:
        count = 2 if ".64" in opcode or ".WIDE" in opcode else 1
    return range(int(found[1]), int(found[1]) + count)


def read(code: list[Instruction]) -> Code:
    handed = {
        i.opcode.split(".")[1]: i.operands.rpartition(" ")[2]
        for i in code
        if i.opcode.startswith("USETMAXREG")
    }
    loops = [Counter(i.opcode for i in code if i.address in inside) for inside in loops_of(code)]
    opcodes = [i.opcode for i in code]
    spilled = [n for n, opcode in enumerate(opcodes) if opcode.startswith(SPILLING)]
    return Code(
        Counter(opcodes),
        loops,
        handed,
        overwritten_operands(code),
        [opcode for opcode in opcodes if opcode.startswith("HGMMA")],
        [sum(opcode.startswith("HGMMA") for opcode in opcodes[:n]) for n in spilled],
    )


def products(opcodes: Counter[str]) -> Counter[str]:
    return Counter({name: n for name, n in opcodes.items() if name.startswith("HGMMA")})


def spills(opcodes: Counter[str]) -> int:
    return sum(n for name, n in opcodes.items() if name.startswith(SPILLING))


def expected_products(row: dict[str, Any]) -> Counter[str]:
    """Of a step: S takes one for each 16 columns of Q, O one for each 16 keys."""
    dtype = ".BF16" if row["dtype"] == "bfloat16" else ""
    expected: Counter[str] = Counter()
    expected[f"HGMMA.64x{row['block_n']}x16.F32{dtype}"] += row["head_dim"] // 16
    columns = min(row["head_dim_v"], PASS_COLUMNS)
    expected[f"HGMMA.64x{columns}x16.F32{dtype}"] += row["block_n"] // 16
    return expected


@cache
def kernels(op: str = "forward") -> dict[str, dict[str, Any]]:
    info = anyflash.build_info()
    built = info["cuda"] and ARCH in info["cuda"]["archs"]
    rows = (row for row in info["kernels"] if (row["arch"], row["op"]) == ("sm90", op))
    return {row["name"]: row for row in rows if built}


@cache
def codes(pattern: re.Pattern[str] = FORWARD) -> dict[tuple[str, int, int, str], Code]:
    """By dtype, head dims and variant."""
    installed = Path(anyflash.__file__).parent / "lib" / "libanyflash.so"
    disassembler = Disassembler(Path(os.environ.get("ANYFLASH_LIBRARY", installed)), ARCH)
    names = {name: found for name in disassembler.resources() if (found := pattern.search(name))}
    result = {}
    for name, code in disassembler.code(names).items():
        element, head_dim, head_dim_v, variant = names[name].groups()
        key = DTYPES[element], int(head_dim), int(head_dim_v), variant.lower()
        result[key] = read(code)
    return result


def variant_of(row: dict[str, Any]) -> str:
    return row["name"].rpartition("_")[2] if row["features"] else "plain"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    absent = pytest.mark.skip(reason=f"a build without kernels for {ARCH}")
    for fixture, ops in (("row", ("forward", "prefill")), ("backward_row", ("backward",))):
        if fixture in metafunc.fixturenames:
            found = {name: row for op in ops for name, row in kernels(op).items()}
            rows = [pytest.param(row, id=name) for name, row in found.items()]
            metafunc.parametrize(fixture, rows or [pytest.param({}, id="none", marks=absent)])


def code_of(row: dict[str, Any]) -> Code:
    pattern = PREFILL if row["op"] == "prefill" else FORWARD
    return codes(pattern)[row["dtype"], row["head_dim"], row["head_dim_v"], variant_of(row)]


def test_ci_compiles_them() -> None:
    if os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        assert kernels("forward")
        assert kernels("backward")
        assert kernels("prefill")


def test_products(row: dict[str, Any]) -> None:
    expected = Counter({name: COPIES * n for name, n in expected_products(row).items()})
    if (keys := FEW_KEYS.get(row["block_n"])) is not None:
        few = expected_products({**row, "block_n": keys, "head_dim_v": 0})
        expected += Counter({name: n for name, n in few.items() if f"64x{keys}x" in name})
    assert products(code_of(row).opcodes) == expected


def test_products_are_not_serialised(row: dict[str, Any]) -> None:
    """A fence and a wait for each group: of S, for each part of K, and of O."""
    opcodes = code_of(row).opcodes
    parts = 2 if row["head_dim"] > 256 else 1
    groups = (parts + 1) * COPIES + (row["block_n"] in FEW_KEYS)
    assert opcodes["WARPGROUP.ARRIVE"] == groups
    assert opcodes["WARPGROUP.DEPBAR.LE"] == groups


def test_no_spills_without_masks(row: dict[str, Any]) -> None:
    """In the smallest loop over tiles, of those that need no mask."""
    loops = [loop for loop in code_of(row).loops if products(loop) == expected_products(row)]
    smallest = min(loops, key=lambda loop: sum(loop.values()))
    assert spills(smallest) == 0


def test_registers_are_handed_over(row: dict[str, Any]) -> None:
    looks = variant_of(row) in FIND_TILES or row["op"] == "prefill"
    more = looks and row["block_m"] == 128 and row["head_dim"] <= 128
    producer, consumer = REGISTERS_OF_LOOKING if more else REGISTERS[row["block_m"]]
    assert code_of(row).handed == {"DEALLOC": producer, "TRY_ALLOC": consumer}


def test_tensors_move_by_tma(row: dict[str, Any]) -> None:
    """A box for each 64 columns: of each warpgroup's Q; of a tile of K and of V; of O, where it has
    a place to leave from."""
    opcodes = code_of(row).opcodes
    panels, panels_v = -(-row["head_dim"] // 64), -(-min(row["head_dim_v"], PASS_COLUMNS) // 64)
    warpgroups = row["block_m"] // 64
    assert opcodes["UTMALDG.4D"] == (warpgroups + 1) * panels + panels_v
    assert opcodes["UTMASTG.4D"] == (panels_v if row["head_dim"] <= 128 else 0)


class BackwardPart(NamedTuple):
    """A kernel of the backward: which one, and how often its text has each group of products.

    Without a feature, or with key ranges, its loop has a second body, for tiles without masks.
    """

    pattern: re.Pattern[str]
    groups: dict[str, int]
    waits: int
    plain: Mapping[str, int] = MappingProxyType({})
    plain_waits: int = 0

    def of(self, variant: str) -> tuple[Counter[str], int]:
        """Its groups and waits."""
        if variant not in ("plain", "ranges"):
            return Counter(self.groups), self.waits
        return Counter(self.groups) + Counter(self.plain), self.waits + self.plain_waits


def _pattern(kernel: str, traits: str, end: str) -> re.Pattern[str]:
    return re.compile(
        rf"sm90{len(kernel)}{kernel}INS0_{len(traits)}{traits}IN7cutlass\d+(half_t|bfloat16_t)"
        rf"ELi(\d+)ELi(\d+)ENS_\d+([A-Z][a-z]+)BackwardEEE{end}"
    )


BACKWARD_PARTS = {
    # dQ is of the tile before: so the first tile has a dK of its own, and the last one a dQ.
    "main": BackwardPart(
        _pattern("backward_kernel", "BackwardTraits", "Lb1E"),
        {"s": 1, "dp": 1, "dv": 1, "dk": 2, "dq": 2},
        waits=5,
        plain={"s": 1, "dp": 1, "dv": 1, "dk": 1, "dq": 1},
        plain_waits=4,
    ),
    "without_dq": BackwardPart(
        _pattern("backward_kernel", "BackwardTraits", "Lb0E"),
        {"s": 1, "dp": 1, "dv": 1, "dk": 1},
        waits=3,
        plain={"s": 1, "dp": 1, "dv": 1, "dk": 1},
        plain_waits=3,
    ),
    "dq_by_rows": BackwardPart(
        _pattern("dq_by_rows_kernel", "DqTraits", ""),
        {"s_by_rows": 1, "dp_by_rows": 1, "dq_by_rows": 1},
        waits=3,
    ),
    # One warpgroup computes S and dV, the other dP and dK.
    "wide": BackwardPart(
        _pattern("wide_backward_kernel", "WideTraits", ""),
        {"s": 1, "dp": 1, "dv": 1, "dk": 1},
        waits=4,
    ),
}
# Of a kernel that two CTAs share by columns, and that exchange parts of S and dP in pieces of four.
PAIR_REGISTERS = {"wide": ("0x28", "0xe8"), "dq_by_rows": ("0x38", "0xe0")}
PAIR_PIECES = {"wide": 2 * 64 * 64 // 128 // 4, "dq_by_rows": 2 * 64 * 32 // 128 // 4}


def ctas_of_block(row: dict[str, Any]) -> int:
    return 2 if max(row["head_dim"], row["head_dim_v"]) > 256 else 1


def backward_parts(row: dict[str, Any]) -> tuple[str, ...]:
    if max(row["head_dim"], row["head_dim_v"]) > 128:
        return ("wide", "dq_by_rows")
    return ("main", "without_dq", "dq_by_rows")


def group_products(row: dict[str, Any], group: str) -> Counter[str]:
    ctas = ctas_of_block(row)
    d, dv = row["head_dim"] // ctas, row["head_dim_v"] // ctas
    rows, keys = row["block_m"], row["block_n"]
    dq_keys = 64 // ctas  # of a tile of dq_by_rows_kernel
    columns, count = {
        "s": (rows, d // 16),
        "dp": (rows, dv // 16),
        "dv": (dv, rows // 16),
        "dk": (d, rows // 16),
        "dq": (d if rows == 128 else -(-d // 64) * 32, keys // 16),
        "s_by_rows": (dq_keys, d // 16),
        "dp_by_rows": (dq_keys, dv // 16),
        "dq_by_rows": (d, dq_keys // 16),
    }[group]
    dtype = ".BF16" if row["dtype"] == "bfloat16" else ""
    return Counter({f"HGMMA.64x{columns}x16.F32{dtype}": count})


def products_of(row: dict[str, Any], groups: Mapping[str, int]) -> Counter[str]:
    expected: Counter[str] = Counter()
    for group in Counter(groups).elements():
        expected += group_products(row, group)
    return expected


def has_loaded_operands(row: dict[str, Any], part: str) -> bool:
    """Whether K or V of a product is in registers."""
    return (part, row["head_dim"]) in {("main", 96), ("without_dq", 96), ("wide", 192)}


def test_backward(backward_row: dict[str, Any]) -> None:
    """The products, one fence a group of them, few spills, registers handed over, sums by TMA."""
    row = backward_row
    for name in backward_parts(row):
        part = BACKWARD_PARTS[name]
        variant = variant_of(row)
        code = codes(part.pattern)[row["dtype"], row["head_dim"], row["head_dim_v"], variant]
        groups, waits = part.of(variant)
        assert products(code.opcodes) == products_of(row, groups), name
        assert code.opcodes["WARPGROUP.ARRIVE"] == groups.total(), name
        assert code.opcodes["WARPGROUP.DEPBAR.LE"] == waits, name
        assert spills(code.opcodes) <= BACKWARD_SPILLS.get((variant, row["head_dim"], name), 0)
        if variant == "plain" and part.plain:  # the body without masks comes first
            step = products_of(row, part.plain)
            assert Counter(code.products[: step.total()]) == step, name
            assert not [n for n in code.spilled_after if n <= step.total()], name
        looks = variant in FIND_TILES and (variant, name) != ("ranges", "dq_by_rows")
        producer, consumer = BACKWARD_OF_LOOKING if looks else BACKWARD_REGISTERS
        if ctas_of_block(row) == 2:
            producer, consumer = PAIR_REGISTERS[name]
            assert code.opcodes["STAS.128"] == PAIR_PIECES[name], name
            assert not code.opcodes["MEMBAR.ALL.GPU"], name  # nothing waits for what was sent
        assert code.opcodes["UCGABAR_WAIT"] == ctas_of_block(row) - 1, name
        assert code.handed == {"DEALLOC": producer, "TRY_ALLOC": consumer}, name
        assert code.overwritten == ([] if has_loaded_operands(row, name) else None), name
        assert any(opcode.startswith("UTMALDG.4D") for opcode in code.opcodes), name
        adds = any(opcode.startswith("UBLKRED") for opcode in code.opcodes)
        assert adds == (name == "main"), name
