"""Counts, metrics and estimates of one kernel, as a dictionary for JSON.

Counts are per warp and iteration of the hot loop, along the heaviest path through its body. Three
estimates of the tensor pipe's use, each a share of the mma.sync peak:
  overlap  every pipe runs concurrently: tensor cycles / the slowest pipe's cycles
  serial   nothing overlaps: tensor cycles / (tensor + MUFU + FMA + ALU + rest)
  sim      the simulated SM (simulation.py)
Published FlashAttention-2 figures are 0.90 of sim on the A100 (0.88 to 0.93) and 0.87 on the H100
(0.81 to 0.96). Differences in sim under 0.05 say nothing about speed. Not covered: wgmma,
warp-specialised kernels, GEMM loops left rolled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .instructions import INTEGER_KINDS, KINDS, NEVER, Instruction, bytes_per_warp, is_tensor, kind
from .loops import HotLoop, hot_loops
from .machine import Machine, cost, occupancy
from .simulation import simulate

# Distances between the CTAs of an SM, as shares of an iteration; sim is the mean.
SHIFTS = (0.15, 0.35, 0.55, 0.8)


@dataclass(frozen=True)
class Launch:
    threads: int = 0  # 0: unknown; the simulation then assumes 2 CTAs of 4 warps
    dynamic_smem: int = 0


@dataclass(frozen=True)
class _Costs:
    """Sums over the path of a loop."""

    counts: Counter[str]
    cycles: Counter[str]
    serial: float
    stall: int
    smem_bytes: int


def _costs(path: list[Instruction], machine: Machine) -> _Costs:
    counts = Counter("other" if i.predicate == NEVER else kind(i.opcode) for i in path)
    cycles: Counter[str] = Counter()
    slots = 0
    for instruction in path:
        pipe, pipe_cycles = cost(instruction, machine)
        cycles[pipe] += pipe_cycles  # type: ignore[assignment]  # half cycles exist
        slots += pipe in ("smem", "issue")
    cycles["issue"] = len(path)
    serial = sum(cycles[pipe] for pipe in ("tensor", "xu", "fma", "alu", "half")) + slots
    moves = ("LDSM", "LDGSTS", "LDS", "STS")
    smem = sum(bytes_per_warp(i) for i in path if kind(i.opcode) in moves and i.predicate != NEVER)
    return _Costs(counts, cycles, serial, sum(max(1, i.stall) for i in path), smem)


def _loop(path: list[Instruction], costs: _Costs) -> dict[str, Any]:
    counts, cycles = costs.counts, costs.cycles
    return {
        "counts": {name: counts[name] for name, _ in KINDS if counts[name]},
        "mma_shapes": dict(Counter(i.opcode for i in path if is_tensor(i))),
        "instructions": len(path),
        "integer": sum(counts[name] for name in INTEGER_KINDS),
        "cycles": {
            pipe: round(value, 1) for pipe, value in sorted(cycles.items(), key=lambda x: -x[1])
        },
        "limiting_pipe": max(cycles, key=lambda pipe: cycles[pipe]),
        "serial_cycles": round(costs.serial, 1),
        "stall_cycles": costs.stall,
    }


def _metrics(loop: dict[str, Any], costs: _Costs) -> dict[str, float]:
    hmma, tensor, slots = costs.counts["HMMA"], costs.cycles["tensor"], loop["instructions"]
    return {
        "issue_slots_per_hmma": round(slots / hmma, 3),
        "other_slots_per_hmma": round((slots - hmma) / hmma, 3),
        "integer_per_hmma": round(loop["integer"] / hmma, 3),
        "mufu_per_hmma": round(costs.counts["MUFU"] / hmma, 3),
        "smem_bytes_per_hmma": round(costs.smem_bytes / hmma, 1),
        "smem_over_tensor": round(costs.cycles["smem"] / tensor, 3),
        "stall_over_tensor": round(costs.stall / tensor, 3),
    }


def _estimates(costs: _Costs, sims: list[float], machine: Machine) -> dict[str, Any]:
    tensor = costs.cycles["tensor"]
    sim = sum(sims) / len(sims) if sims else None
    shares = {
        "overlap": round(tensor / max(costs.cycles.values()), 3),
        "serial": round(tensor / costs.serial, 3),
        "sim": round(sim, 3) if sim is not None else None,
    }
    tflops = {name: round(machine.tflops(share)) for name, share in shares.items() if share}
    if sim is not None:
        tflops["expected"] = round(machine.tflops(sim) * machine.device)
    return {
        "share_of_mma_peak": shares,
        "sim_range": [round(min(sims), 3), round(max(sims), 3)] if sims else None,
        "tflops_at_boost": tflops,
    }


def _describe(loop: HotLoop) -> dict[str, int]:
    length = len(loop.path)
    return {
        "hmma": sum(map(is_tensor, loop.path)),
        "instructions": length,
        "conditional": loop.size - length,
    }


def analyse(
    shown: str,
    resources: dict[str, int],
    code: list[Instruction],
    machine: Machine,
    launch: Launch,
    *,
    loop_index: int = 0,
    with_sim: bool = True,
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "kernel": shown,
        "regs": resources["REG"],
        "static_smem": resources["SHARED"],
        "stack": resources["STACK"],
        "instructions": len(code),
        "ldl_stl_total": sum(kind(i.opcode) == "LDL_STL" for i in code),
    }
    ctas, warps = 2, 4
    if launch.threads:
        smem = launch.dynamic_smem + resources["SHARED"]
        out["occupancy"] = occupancy(machine, resources["REG"], launch.threads, smem)
        ctas, warps = max(1, out["occupancy"]["ctas_per_sm"]), launch.threads // 32
    hot = hot_loops(code)
    out["loops"] = [_describe(loop) for loop in hot]
    if not hot:
        return out
    path = hot[loop_index].path
    costs = _costs(path, machine)
    out["loop"] = _loop(path, costs)
    out["metrics"] = _metrics(out["loop"], costs)
    shifts = SHIFTS if ctas > 1 else (0.0,)
    sims = (
        [simulate(path, machine, ctas, warps, shift=shift) for shift in shifts] if with_sim else []
    )
    return out | _estimates(costs, sims, machine)
