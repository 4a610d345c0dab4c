"""What an instruction costs on a GPU, and how many CTAs one of its SMs holds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from .instructions import NEVER, Instruction, bytes_per_warp, kind


@dataclass(frozen=True)
class Machine:
    """Cycles are per warp instruction on one SM sub-partition (16 lanes: 2, 32 lanes: 1, 4: 8)."""

    tensor: float  # cycles of m16n8k16 with 16-bit inputs
    fp32: int
    smem: int  # bytes an SM
    smem_cta: int
    sms: int
    ghz: float
    # Published FlashAttention-2 figures over their sim: the loss that the loop does not show
    # (clocks under load, start and end of CTAs, memory).
    device: float
    alu: int = 2
    xu: int = 8
    registers: int = 65536
    warps: int = 64
    ctas: int = 32

    def tflops(self, share: float) -> float:
        return share * self.sms * 4 * 2 * 2048 / self.tensor * self.ghz / 1e3


MACHINES = {
    # A100: 1024 FMA per clock and SM. ptxas agrees: it spaces sm_80 HMMAs by 8 cycles.
    "sm_80": Machine(
        tensor=8.0, fp32=2, smem=164 * 1024, smem_cta=163 * 1024, sms=108, ghz=1.41, device=0.90
    ),
    # H100: mma.sync reaches about 63% of the wgmma peak; ptxas spaces sm_90 HMMAs by 6 cycles.
    "sm_90": Machine(
        tensor=4 / 0.63,
        fp32=1,
        smem=228 * 1024,
        smem_cta=227 * 1024,
        sms=132,
        ghz=1.83,
        device=0.87,
    ),
}

SYSTEM_SMEM = 1024  # of each CTA's shared memory
# Sub-partitions of an SM: they share its 128 bytes per clock of shared memory.
SUB_PARTITIONS = 4

# An MMA's work over that of m16n8k16.
MMA_WORK = {"16816": 1.0, "1688": 0.5, "1684": 0.25, "16832": 1.0, "16864": 1.0, "16808": 0.5}


def tensor_cycles(opcode: str, machine: Machine) -> float:
    shape = re.match(r"[HIB]MMA\.(?:SP\.)?(\d+)", opcode)
    work = MMA_WORK.get(shape[1], 1.0) if shape else 1.0
    return machine.tensor * work * (2.0 if "TF32" in opcode else 1.0)


def cost(instruction: Instruction, machine: Machine) -> tuple[str, float]:
    """(pipe, cycles on one sub-partition)."""
    if instruction.predicate == NEVER:
        return "issue", 1
    match kind(instruction.opcode):
        case "HMMA":
            return "tensor", tensor_cycles(instruction.opcode, machine)
        case "MUFU" | "convert":
            return "xu", machine.xu
        case "FFMA" | "FMUL" | "FADD":
            return "fma", machine.fp32
        case "IMAD" | "IMAD.MOV":
            return "fma", 2
        case "half":
            return "half", 2
        case "SHFL":
            return "smem", SUB_PARTITIONS
        case "LDSM" | "LDGSTS" | "LDS" | "STS" | "RED_ATOM" | "LDG" | "STG" | "LDL_STL":
            return "smem", SUB_PARTITIONS * max(1, bytes_per_warp(instruction) // 128)
        case "branch" | "depbar" | "BAR" | "uniform" | "other":
            return "issue", 1
    return "alu", machine.alu


def ctas_by_registers(machine: Machine, registers: int, threads: int) -> int:
    """For how many CTAs one SM has registers."""
    registers_per_warp = math.ceil(registers * 32 / 256) * 256
    return machine.registers // (registers_per_warp * (threads // 32))


def occupancy(machine: Machine, registers: int, threads: int, smem: int) -> dict[str, Any]:
    """CTAs and warps that one SM holds, and what limits them."""
    warps = threads // 32
    by_registers = ctas_by_registers(machine, registers, threads)
    by_smem = machine.smem // (smem + SYSTEM_SMEM) if smem <= machine.smem_cta else 0
    ctas = min(by_registers, by_smem, machine.warps // warps, machine.ctas)
    limit = "regs" if by_registers <= by_smem else "smem"
    return {"ctas_per_sm": ctas, "warps_per_sm": ctas * warps, "limit": limit}
