"""One SASS instruction, and what kind of work it is."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

BARRIERS = 6  # scoreboard barriers of a warp, named by three bits
NO_BARRIER = 7
NEVER = "@!PT"  # the predicate of an instruction that only takes its issue slot


class Instruction(NamedTuple):
    address: int
    predicate: str | None
    opcode: str
    operands: str
    stall: int = 1  # cycles until this warp may issue its next instruction
    read_barrier: int = NO_BARRIER  # released when the operands have been read
    write_barrier: int = NO_BARRIER  # released when the result is there
    wait_mask: int = 0  # barriers to wait for before issue


# (kind, pattern of the opcode); the first match wins.
KINDS = (
    ("HMMA", r"[HIB]MMA\."),
    ("LDSM", r"LDSM"),
    ("LDGSTS", r"LDGSTS"),
    ("MUFU", r"MUFU"),
    ("FFMA", r"FFMA"),
    ("FMUL", r"FMUL"),
    ("FADD", r"FADD"),
    ("FMNMX", r"FMNMX"),
    ("F2FP", r"F2FP"),
    ("FSEL_FSETP", r"FSEL|FSETP|FCHK"),
    ("half", r"H(FMA|ADD|MUL|SET|MNMX)"),
    ("convert", r"F2F|F2I|I2F|FRND"),
    ("IMAD.MOV", r"IMAD\.MOV"),
    ("IMAD", r"IMAD|IMUL"),
    ("IADD3", r"IADD|VIADD"),
    ("LEA", r"LEA"),
    ("LOP3", r"P?LOP3?"),
    ("ISETP", r"ISETP|ICMP"),
    ("SEL", r"SEL"),
    ("SHF", r"SHF|SHL|SHR"),
    ("PRMT", r"PRMT"),
    ("MOV", r"MOV"),
    ("R2P_P2R", r"R2P|P2R|PLOP"),
    ("uniform", r"U[A-Z0-9]+|R2UR|S2UR"),
    ("SHFL", r"SHFL"),
    ("BAR", r"BAR"),
    ("depbar", r"DEPBAR|LDGDEPBAR|ERRBAR|MEMBAR|CCTL"),
    ("STS", r"STS"),
    ("LDS", r"LDS"),
    ("RED_ATOM", r"RED|ATOM"),
    ("LDL_STL", r"LDL|STL"),
    ("LDG", r"LD[^A-Z]|LDG|LDC"),
    ("STG", r"ST[^A-Z]|STG"),
    ("branch", r"BRA|BRX|BSSY|BSYNC|CALL|RET|EXIT|WARPSYNC|YIELD"),
    ("other", r""),
)
INTEGER_KINDS = (
    "IMAD.MOV",
    "IMAD",
    "IADD3",
    "LEA",
    "LOP3",
    "ISETP",
    "SEL",
    "SHF",
    "PRMT",
    "MOV",
    "R2P_P2R",
)


@functools.cache
def kind(opcode: str) -> str:
    return next(name for name, pattern in KINDS if re.match(pattern, opcode))


def is_tensor(instruction: Instruction) -> bool:
    return kind(instruction.opcode) == "HMMA"


def bytes_per_warp(instruction: Instruction) -> int:
    """What a memory instruction moves."""
    opcode = instruction.opcode
    if opcode.startswith("LDSM"):
        matrices = re.search(r"\.(\d)$", opcode)
        return 128 * int(matrices[1]) if matrices else 128
    widths = ((".128", 16), (".64", 8), (".U16", 2), (".U8", 1))
    return 32 * next((width for suffix, width in widths if suffix in opcode), 4)
