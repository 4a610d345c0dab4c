"""Removes every synchronisation of the kernels, one at a time, and says which of them nothing
notices.

    python tests/emulator/synchronisation.py [--only REGEX] [--plain]

Every statement that waits, arrives, fences or commits is left out once, in every unit of UNITS that
compiles it: first in plain runs of the unit's cases of test_mutations.py, then under Thread
Sanitizer. `unnoticed.txt` lists those that may stay unnoticed, and why.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from changed_unit import build_driver, compile_command
from decode_mutations import APPEND, COMBINE, DECODE, LATENT, PREFILL, PREFILL_2
from emulated_driver import ROOT, run
from hopper_backward_mutations import HOPPER_BACKWARD, HOPPER_WIDE
from hopper_mutations import HOPPER
from mutations import (
    BACKWARD,
    CHUNKS,
    FORWARD,
    LAZY,
    ONE_BUFFER,
    PAIRED,
    RELOADED_V,
    ROWS,
    Mutation,
)
from test_mutations import ENVIRONMENT, KERNELS, _cases, _fewer_kernels

UNITS = (
    *(FORWARD, LAZY, PAIRED, BACKWARD, ONE_BUFFER, RELOADED_V, CHUNKS, ROWS),
    *(DECODE, COMBINE, APPEND, LATENT, PREFILL, PREFILL_2),
    *(HOPPER, HOPPER_BACKWARD, HOPPER_WIDE),
)
LISTED = Path(__file__).with_name("unnoticed.txt")
# Where these are defined, and where CuTe's are called for them.
DEFINITIONS = ("cuda/named_barrier.h", "sm90/ptx.h", "sm90/wgmma_atoms.h")
NAMES = re.compile(
    r"\b(?:__syncthreads|__syncwarp|cp_async_wait<\w+>|cp_async_fence|wait_products<\w+>|named_barrier_sync"
    r"|sync_named|arrive_named|wait_previous_kernel|wait_stores(?:_read)?|commit_\w+"
    r"|fence_\w+|wait|arrive|arrive_expect|sync_pair|warpgroup_\w+)\("
)
DEFINED = re.compile(r"ANYFLASH_DEVICE[^;{]*$")
COMMENT = re.compile(r"//[^\n]*")


class Statement(NamedTuple):
    header: str
    begin: int
    end: int
    code: str

    def key(self, text: str) -> str:
        """Header and code, and of equal ones the number."""
        earlier = list(statements(self.header, text))
        equal = [s for s in earlier if s.code == self.code]
        number = f" #{1 + equal.index(self)}" if len(equal) > 1 else ""
        return f"{self.header}: {self.code}{number}"


def _begin(text: str, name: int) -> int:
    """Of the expression whose last name begins there."""
    begin, depth = name, 0
    while begin > 0:
        c = text[begin - 1]
        if c in "])":
            depth += 1
        elif c in "[(" and depth > 0:
            depth -= 1
        elif depth == 0 and not (c.isalnum() or c in "_.:") and text[begin - 2 : begin] != "->":
            break
        begin -= 1
    return begin


def _end(text: str, open_bracket: int) -> int:
    depth = 0
    for i in range(open_bracket, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("brackets do not match")


def statements(header: str, text: str) -> Iterator[Statement]:
    bare = COMMENT.sub(lambda comment: " " * len(comment[0]), text)
    for found in NAMES.finditer(bare):
        begin, end = _begin(bare, found.start()), _end(bare, found.end() - 1)
        line = bare[bare.rfind("\n", 0, begin) + 1 : begin]
        is_call = bare[end : end + 1] == ";" and not line.rstrip().endswith("return")
        if is_call and not DEFINED.search(line):
            yield Statement(header, begin, end + 1, " ".join(bare[begin:end].split()))


def all_statements() -> list[Statement]:
    files = sorted((*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cu")))
    headers = [str(file.relative_to(KERNELS)) for file in files]
    return [
        statement
        for header in headers
        if header not in DEFINITIONS
        for statement in statements(header, (KERNELS / header).read_text())
    ]


def write_headers(folder: Path, every: list[Statement]) -> None:
    """Each statement in braces, and left out if it is the one that the switch says."""
    for header in dict.fromkeys(statement.header for statement in every):
        text = (KERNELS / header).read_text()
        for number, s in reversed(list(enumerate(every, 1))):
            if s.header == header:
                changed = f"{{ if (mutation != {number}) {text[s.begin : s.end]} }}"
                text = text[: s.begin] + changed + text[s.end :]
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text(text)


class Unit:
    """A unit's driver, and the numbers of the statements that it holds."""

    def __init__(self, build: Path, name: str, sanitizer: str, every: list[Statement]) -> None:
        self.name, self.sanitizer = name, sanitizer
        folder = Path(tempfile.mkdtemp(dir=build, prefix=f"{name}-"))
        write_headers(folder, every)
        command = compile_command(build, sanitizer, name)
        changed = folder / "cuda" / f"{name}.cu"
        source = (changed if changed.exists() else Path(command[-1])).read_text()
        unit = folder / f"{name}.cpp"
        unit.write_text(_fewer_kernels(source, Mutation("", "", "", "", sanitizer, unit=name)))
        self.driver = build_driver(build, folder, unit, command, sanitizer)
        flags = [word for word in command[1:] if word.startswith(("-I", "-isystem", "-D", "-std"))]
        listing = [command[0], "-MM", f"-I{folder}", *flags, "-include", folder / "switch.h", unit]
        included = subprocess.run(
            listing, cwd=build, capture_output=True, text=True, check=False
        ).stdout
        self.numbers = {
            number for number, s in enumerate(every, 1) if str(folder / s.header) in included
        }
        if changed.exists():
            self.numbers |= {
                number for number, s in enumerate(every, 1) if s.header == f"cuda/{name}.cu"
            }

    def notices(self, number: int) -> bool:
        cases = _cases(self.name, self.sanitizer)
        variables = {"MUTATION": str(number), **ENVIRONMENT}
        try:
            status, _ = run(self.driver, cases, "--stop", **variables)
        except subprocess.TimeoutExpired:  # it waits for ever
            return True
        return status != 0


def listed() -> dict[str, str]:
    """The reason, by the statement's key."""
    lines = LISTED.read_text().splitlines() if LISTED.exists() else []
    entries = (line.split(" -- ", 1) for line in lines if line and not line.startswith("#"))
    return {key.strip(): reason for key, reason in entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="statements whose key holds this")
    parser.add_argument("--plain", action="store_true", help="without Thread Sanitizer")
    options = parser.parse_args()
    build = ROOT / "build" / "test"
    every = all_statements()
    keys = [s.key((KERNELS / s.header).read_text()) for s in every]
    left = {number for number, key in enumerate(keys, 1) if re.search(options.only, key)}
    total = len(left)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for sanitizer in ("",) if options.plain else ("", "tsan"):
            names = [name for name in UNITS if not sanitizer or _is_built(build, name, sanitizer)]
            for unit in pool.map(partial(_made, build, sanitizer, every), names):
                numbers = sorted(unit.numbers & left)
                noticed = {
                    number
                    for number, is_noticed in zip(
                        numbers, pool.map(unit.notices, numbers), strict=True
                    )
                    if is_noticed
                }
                left -= noticed
                print(f"{sanitizer or 'plain'} {unit.name}: {len(noticed)} of {len(numbers)}")
                sys.stdout.flush()
    known = listed()
    unknown = [keys[number - 1] for number in sorted(left) if keys[number - 1] not in known]
    stale = [key for key in known if key not in keys] if not options.only else []
    for key in unknown:
        print(f"unnoticed: {key}")
    for key in stale:
        print(f"listed, but not there: {key}")
    print(f"{total - len(left)} of {total} noticed, {len(left) - len(unknown)} listed")
    return bool(unknown or stale)


def _is_built(build: Path, name: str, sanitizer: str) -> bool:
    try:
        return bool(compile_command(build, sanitizer, name))
    except AssertionError:
        return False


def _made(build: Path, sanitizer: str, every: list[Statement], name: str) -> Unit:
    return Unit(build, name, sanitizer, every)


if __name__ == "__main__":
    sys.exit(main())
