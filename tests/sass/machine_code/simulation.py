"""The resident warps of one SM run a loop, cycle by cycle.

Warps issue in order and obey the stall counts and barriers that ptxas wrote into the code; four
schedulers and the pipes are contended for. Data always arrives in time and banks never conflict.
"""

from __future__ import annotations

from typing import NamedTuple

from .instructions import BARRIERS, Instruction, kind
from .machine import SUB_PARTITIONS, Machine, cost

# Cycles until the result, from published microbenchmarks of Ampere (approximate).
LATENCY = {
    "LDSM": 29,
    "LDS": 23,
    "SHFL": 23,
    "MUFU": 18,
    "LDG": 400,
    "LDGSTS": 30,
    "STS": 20,
    "RED": 20,
    "STG": 20,
    "S2R": 25,
    "F2F": 18,
}
OTHER_LATENCY = 20
OPERAND_LATENCY = 12  # until a memory instruction has read its registers
BARRIER_LATENCY = 20  # of __syncthreads
SMEM_QUEUE = 8  # cycles of work that may wait in front of the shared memory
PRIVATE_PIPES = ("tensor", "xu", "fma", "alu", "half")  # one in each sub-partition


class Step(NamedTuple):
    pipe: str
    cycles: float
    stall: int
    waits: tuple[int, ...]
    write_barrier: int
    read_barrier: int
    latency: int
    is_bar: bool


def _step(instruction: Instruction, machine: Machine) -> Step:
    pipe, cycles = cost(instruction, machine)
    latency = next(
        (LATENCY[name] for name in LATENCY if instruction.opcode.startswith(name)), OTHER_LATENCY
    )
    return Step(
        pipe,
        cycles / SUB_PARTITIONS if pipe == "smem" else cycles,
        max(instruction.stall, 1),
        tuple(barrier for barrier in range(BARRIERS) if instruction.wait_mask >> barrier & 1),
        instruction.write_barrier,
        instruction.read_barrier,
        latency,
        kind(instruction.opcode) == "BAR",
    )


class _Sm:
    """State of one SM with ctas x warps resident; warp w belongs to sub-partition w % 4."""

    def __init__(self, steps: list[Step], ctas: int, warps: int, shift: float) -> None:
        total = ctas * warps
        lap = sum(step.stall for step in steps)
        self.steps, self.length, self.warps, self.total = steps, len(steps), warps, total
        self.position = [0] * total
        self.ready = [w // warps * shift * lap for w in range(total)]
        self.barriers = [[0.0] * BARRIERS for _ in range(total)]
        self.last_issue = [0.0] * total
        self.scheduler_free = [0.0] * SUB_PARTITIONS
        self.pipe_free = [dict.fromkeys(PRIVATE_PIPES, 0.0) for _ in range(SUB_PARTITIONS)]
        self.smem_free = 0.0
        self.at_bar: list[list[int]] = [[] for _ in range(ctas)]
        self.waits_at_bar = [False] * total
        self.starts: list[list[float]] = [[] for _ in range(total)]  # of iterations
        self.tensor_busy: list[tuple[float, float]] = []  # (from, cycles)

    def earliest(self, warp: int) -> float:
        step = self.steps[self.position[warp] % self.length]
        part = warp % SUB_PARTITIONS
        at = max(
            self.ready[warp], self.scheduler_free[part], self.pipe_free[part].get(step.pipe, 0.0)
        )
        barriers = self.barriers[warp]
        for barrier in step.waits:
            at = max(at, barriers[barrier])
        return max(at, self.smem_free - SMEM_QUEUE) if step.pipe == "smem" else at

    def issue_next(self) -> None:
        # Greedy: the warp that issued last goes on while it can, then the youngest.
        at, _, negated = min(
            (self.earliest(w), -self.last_issue[w], -w)
            for w in range(self.total)
            if not self.waits_at_bar[w]
        )
        warp = -negated
        step = self.steps[self.position[warp] % self.length]
        if self.position[warp] % self.length == 0:
            self.starts[warp].append(at)
        self.scheduler_free[warp % SUB_PARTITIONS] = at + 1
        self.last_issue[warp] = at
        self.ready[warp] = at + step.stall
        done = self._occupy(warp, step, at)
        barriers = self.barriers[warp]
        if step.write_barrier < BARRIERS:
            barrier = step.write_barrier
            barriers[barrier] = max(barriers[barrier], done + step.latency)
        if step.read_barrier < BARRIERS:
            barrier = step.read_barrier
            barriers[barrier] = max(barriers[barrier], done + OPERAND_LATENCY)
        self.position[warp] += 1
        if step.is_bar:
            self._arrive(warp, at)

    def _occupy(self, warp: int, step: Step, at: float) -> float:
        """When the pipe has taken the instruction."""
        free = self.pipe_free[warp % SUB_PARTITIONS]
        if step.pipe == "smem":
            self.smem_free = max(self.smem_free, at) + step.cycles
            return self.smem_free
        if step.pipe in free:
            free[step.pipe] = at + step.cycles
            if step.pipe == "tensor":
                self.tensor_busy.append((at, step.cycles))
        return at

    def _arrive(self, warp: int, at: float) -> None:
        group = self.at_bar[warp // self.warps]
        group.append(warp)
        self.waits_at_bar[warp] = True
        if len(group) == self.warps:
            for other in group:
                self.waits_at_bar[other] = False
                self.ready[other] = max(self.ready[other], at + BARRIER_LATENCY)
            group.clear()

    def tensor_share(self) -> float:
        """Between two iteration starts of the foremost warp, once all are under way."""
        front = self.starts[max(range(self.total), key=lambda w: self.position[w])]
        under_way = max(starts[0] for starts in self.starts if starts)
        begin, end = next(start for start in front[1:] if start >= under_way), front[-1]
        busy = sum(cycles for at, cycles in self.tensor_busy if begin <= at < end)
        return busy / SUB_PARTITIONS / (end - begin)


def simulate(
    path: list[Instruction],
    machine: Machine,
    ctas: int,
    warps: int,
    *,
    shift: float,
    iterations: int = 5,
) -> float:
    """Share of the tensor pipes' time that is used.

    shift is the CTAs' distance in the loop at the start, as a share of one iteration: on a device
    they drift apart.
    """
    sm = _Sm([_step(instruction, machine) for instruction in path], ctas, warps, shift)
    # Every warp keeps looping until the slowest has done its iterations, so the machine stays full.
    limit = len(path) * iterations
    while min(sm.position) < limit and max(sm.position) < 3 * limit:
        sm.issue_next()
    return sm.tensor_share()
