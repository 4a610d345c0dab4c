"""Control flow of one function: basic blocks, natural loops, and the loops that hold the work."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from .instructions import Instruction, is_tensor

ENDS_BLOCK = ("BRA", "BSYNC", "EXIT", "RET", "BRX", "CALL")
LEAVES = ("BRA", "EXIT", "RET", "BRX")  # does not fall through, unless conditional
JUMPS = ("BRA", "CALL")  # a loop may be left by a call from which nothing returns


class Block(NamedTuple):
    first: int
    end: int


class Graph(NamedTuple):
    blocks: list[Block]
    successors: list[list[int]]


class HotLoop(NamedTuple):
    path: list[Instruction]  # along the heaviest way round
    size: int  # instructions of the whole loop


def _target(instruction: Instruction, index_at: dict[int, int]) -> int | None:
    address = re.search(r"0x([0-9a-f]+)\s*$", instruction.operands)
    return index_at.get(int(address[1], 16)) if address else None


def _is_conditional(instruction: Instruction) -> bool:
    branch_on_predicate = (
        instruction.opcode.startswith("BRA") and "P" in instruction.operands.split(",")[0]
    )
    return instruction.predicate is not None or branch_on_predicate or ".DIV" in instruction.opcode


def control_flow(code: list[Instruction]) -> Graph:
    index_at = {instruction.address: i for i, instruction in enumerate(code)}
    starts = {0}
    for i, instruction in enumerate(code):
        target = _target(instruction, index_at)
        if instruction.opcode.startswith(ENDS_BLOCK):
            starts.add(i + 1)
        if instruction.opcode.startswith((*JUMPS, "BSSY")) and target is not None:
            starts.add(target)
    heads = sorted(start for start in starts if start < len(code))
    blocks = [Block(*ends) for ends in zip(heads, [*heads[1:], len(code)], strict=True)]
    number = {block.first: n for n, block in enumerate(blocks)}
    successors = []
    for n, block in enumerate(blocks):
        last = code[block.end - 1]
        following = []
        target = _target(last, index_at)
        if last.opcode.startswith(JUMPS) and target is not None:
            following.append(number[target])
        falls_through = not last.opcode.startswith(LEAVES) or _is_conditional(last)
        if falls_through and n + 1 < len(blocks):
            following.append(n + 1)
        successors.append(following)
    return Graph(blocks, successors)


def _reverse_post_order(successors: list[list[int]]) -> list[int]:
    """The blocks that can be reached from the entry."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        node, remaining = stack[-1]
        following = next((s for s in remaining if s not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    return order[::-1]


def _immediate_dominators(order: list[int], predecessors: dict[int, list[int]]) -> dict[int, int]:
    rank = {node: i for i, node in enumerate(order)}
    dominator = {0: 0}

    def common(a: int, b: int) -> int:
        while a != b:
            while rank[a] > rank[b]:
                a = dominator[a]
            while rank[b] > rank[a]:
                b = dominator[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            new: int | None = None
            for predecessor in predecessors[node]:
                if predecessor in dominator:
                    new = predecessor if new is None else common(predecessor, new)
            assert new is not None
            if dominator.get(node) != new:
                dominator[node], changed = new, True
    return dominator


def natural_loops(successors: list[list[int]]) -> dict[int, set[int]]:
    """{header: blocks} of every loop that is entered only through its header."""
    order = _reverse_post_order(successors)
    predecessors: dict[int, list[int]] = defaultdict(list)
    for node in order:
        for following in successors[node]:
            predecessors[following].append(node)
    dominator = _immediate_dominators(order, predecessors)

    def dominates(a: int, b: int) -> bool:
        while b not in (a, 0):
            b = dominator[b]
        return a == b

    found: dict[int, set[int]] = {}
    for node in order:
        for header in successors[node]:
            if not dominates(header, node):
                continue
            body, work = found.setdefault(header, {header}), [node]
            while work:
                block = work.pop()
                if block not in body:
                    body.add(block)
                    work += predecessors[block]
    return found


def _heaviest_path(
    header: int, body: set[int], successors: list[list[int]], weight: dict[int, int]
) -> list[int]:
    """From the header round to it, back edges dropped."""
    best: dict[int, float] = {}
    following: dict[int, int | None] = {}
    stack, entered = [header], set()
    while stack:
        node = stack[-1]
        if node in best:
            stack.pop()
            continue
        entered.add(node)
        choices = [
            s
            for s in successors[node]
            if s in body and s != header and (s in best or s not in entered)
        ]
        if unknown := [s for s in choices if s not in best]:
            stack += unknown
            continue
        ways: list[tuple[float, int | None]] = [(best[s], s) for s in choices]
        if header in successors[node]:
            ways.append((0, None))
        rest, following[node] = max(ways, default=(float("-inf"), None), key=lambda way: way[0])
        best[node] = weight[node] + rest
        entered.discard(node)
        stack.pop()
    path: list[int] = []
    at: int | None = header
    while at is not None and at not in path:
        path.append(at)
        at = following.get(at)
    return path


def _weight(code: list[Instruction]) -> int:
    """Tensor instructions decide, then the copies that feed them, then length."""
    return sum(
        1_000_000 if is_tensor(i) else 1_000 if i.opcode.startswith("LDGSTS") else 1 for i in code
    )


def hot_loops(code: list[Instruction]) -> list[HotLoop]:
    """Innermost loops that hold tensor instructions, hottest first.

    The hottest has the most tensor instructions; of equals the shortest, which is the unmasked one.
    """
    blocks, successors = control_flow(code)
    tensor = [sum(map(is_tensor, code[slice(*block)])) for block in blocks]
    found = natural_loops(successors)
    working = {h: body for h, body in found.items() if any(tensor[n] for n in body)}
    result = []
    for header, body in working.items():
        if any(other != header and inner < body for other, inner in working.items()):
            continue
        weight = {n: _weight(code[slice(*blocks[n])]) for n in body}
        way = _heaviest_path(header, body, successors, weight)
        path = [instruction for n in way for instruction in code[slice(*blocks[n])]]
        result.append(HotLoop(path, sum(blocks[n].end - blocks[n].first for n in body)))
    return sorted(result, key=lambda loop: (-sum(map(is_tensor, loop.path)), len(loop.path)))
