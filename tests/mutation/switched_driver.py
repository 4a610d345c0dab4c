"""A driver of the emulated GPU in which every statement that synchronises can be left out."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from statements import ROOT, Source, Statement, switched
from units import UNITS

sys.path.append(str(ROOT / "tests/emulator"))
from changed_unit import compile_command, compile_unit, link_driver
from emulated_driver import Case

NO_END = "no end"
STATEMENTS = 1024  # that the switch has places for

# Which statements a run has reached goes to the file REACHED.
SWITCH = f"""
#include <cstdio>
#include <cstdlib>
inline const int mutation = std::getenv("MUTATION") ? std::atoi(std::getenv("MUTATION")) : 0;
struct Reached {{
  bool at[{STATEMENTS}] = {{}};
  ~Reached() {{
    const char* const name = std::getenv("REACHED");
    if (name == nullptr) return;
    std::FILE* const file = std::fopen(name, "w");
    for (int i = 0; i < {STATEMENTS}; ++i) {{
      if (at[i]) std::fprintf(file, "%d\\n", i);
    }}
    std::fclose(file);
  }}
}};
inline Reached reached;
[[gnu::noinline, gnu::no_sanitize_thread]] inline bool keeps(int number) {{
  reached.at[number] = true;
  return number != mutation;
}}
"""

KINDS = ("op=", "gpu=", "smem=", "det=", "nan=", "cache=", "latent=", "ragged=", "splits=")
DESCRIPTOR = re.compile(r' *sm\d\d::\w+_descriptor<([^(]*)>\(\s*"\w+"\),\n')
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fewer_kernels(source: str, keep: str) -> str:
    """A unit of those kernels alone whose arguments match: compiling is what takes the time."""
    return DESCRIPTOR.sub(lambda found: found[0] if re.search(keep, found[1]) else "", source)


def files_of(name: str, text: str, files: dict[str, str], seen: set[str]) -> set[str]:
    """The kernels' files that a unit includes."""
    seen.add(name)
    for included in INCLUDE.findall(text):
        if included in files and included not in seen:
            files_of(included, files[included], files, seen)
    return seen


def kind_of(case: Case) -> str:
    """Much of what decides which kernels run."""
    words = [word for word in case.more.split() if word.startswith(KINDS)]
    return " ".join((str(case.head_dim), *words))


def other_headers() -> Iterator[Path]:
    """What units include beside the kernels' files."""
    for folder in ("cpp/include", "cpp/src", "tests/emulator"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".hpp"):
                yield path


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


class ChangedUnit(NamedTuple):
    name: str
    source: str
    command: list[str]  # that compiles the unchanged one
    files: set[str]  # of the kernels, that it includes
    stamp: str  # a digest of all that is compiled


class SwitchedDriver:
    """A driver for one sanitizer, its cases, and which statements each of these reaches."""

    def __init__(
        self, build: Path, folder: Path, sanitizer: str, statements: list[Statement]
    ) -> None:
        self.build = build
        self.sanitizer = sanitizer
        self.folder = folder / (sanitizer or "plain")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.statements = statements
        self.driver = self.folder / "driver"
        self.changed_units: list[ChangedUnit] = []
        self.reached: dict[Case, tuple[float, set[int]]] = {}

    def prepare(self, pool: ThreadPoolExecutor, files: list[Source], wanted: set[str]) -> None:
        """Compiles the units that include files that are wanted, and links the driver."""
        self.changed_units = [unit for unit in self.units(files) if wanted & unit.files]
        objects = [*pool.map(self.compile, self.changed_units)]
        command = self.changed_units[0].command
        link_driver(self.build, self.folder, objects, command, self.sanitizer)

    def cases(self) -> list[Case]:
        """Of the units."""
        cases: dict[Case, None] = {}
        for unit in self.changed_units:
            use = UNITS[unit.name]
            of_unit = (use.races or ()) if self.sanitizer else use.cases
            cases |= {case._replace(seed=0): None for case in of_unit}
        return [*cases]

    def units(self, files: list[Source]) -> list[ChangedUnit]:
        changed = {file.name: file.text for file in files} | switched(files, self.statements)
        for name, text in changed.items():
            write(self.folder / name, text)
        write(self.folder / "switch.h", SWITCH)
        others = digest(*(path.read_text() for path in sorted(other_headers())))
        units = []
        for name, use in UNITS.items():
            if self.sanitizer and use.races is None:
                continue
            command = compile_command(self.build, self.sanitizer, name)
            source = changed.get(f"cuda/{name}.cu", Path(command[-1]).read_text())
            included = files_of(f"cuda/{name}.cu", source, changed, set())
            source = fewer_kernels(source, use.keep)
            texts = [changed[file] for file in sorted(included & changed.keys())]
            stamp = digest(SWITCH, others, source, *command, *texts)
            units.append(ChangedUnit(name, source, command, included, stamp))
        return units

    def compile(self, unit: ChangedUnit) -> Path:
        stamp = self.folder / f"{unit.name}.stamp"
        result = self.folder / f"{unit.name}.o"
        if result.exists() and stamp.exists() and stamp.read_text() == unit.stamp:
            return result
        begin = time.monotonic()
        source = self.folder / f"{unit.name}.cpp"
        write(source, unit.source)
        compile_unit(self.folder, source, unit.command, self.sanitizer, SWITCH)
        stamp.write_text(unit.stamp)
        print(f"{self.folder.name}: {unit.name} in {time.monotonic() - begin:.0f} s", flush=True)
        return result

    def reach(self, pool: ThreadPoolExecutor, cases: list[Case]) -> None:
        """Which statements each case reaches: found once, and kept."""
        begin = time.monotonic()
        stamp = digest(*(unit.stamp for unit in self.changed_units))
        known = self.folder / f"reached-{stamp[:16]}.json"
        stored = json.loads(known.read_text()) if known.exists() else {}
        missing = [case for case in cases if repr(case) not in stored]
        found = pool.map(self.reached_by, missing, range(len(missing)))
        try:
            for case, result in zip(missing, found, strict=True):
                stored[repr(case)] = result
        finally:
            write(known, json.dumps(stored))
        for case in cases:
            seconds, numbers = stored[repr(case)]
            self.reached[case] = (seconds, set(numbers))
        print(f"{self.folder.name}: {len(cases)} cases in {time.monotonic() - begin:.0f} s")

    def reached_by(self, case: Case, number: int) -> tuple[float, list[int]]:
        name = self.folder / f"reached-{number}"
        begin = time.monotonic()
        failed, _ = self.run([case], 0, 600, REACHED=str(name))
        if failed is not None:
            raise RuntimeError(f"without a mutation: {failed}")
        numbers = [int(line) for line in name.read_text().split()]
        name.unlink()
        return time.monotonic() - begin, numbers

    def run(
        self, cases: list[Case], number: int, limit: float, **more: str
    ) -> tuple[str | None, int]:
        """What was wrong first without statement `number`, and how many cases were right before;
        None if nothing was."""
        lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
        environment = {"MUTATION": str(number), "TSAN_OPTIONS": "halt_on_error=1", **more}
        try:
            done = subprocess.run(
                [self.driver, "--stop"],
                input=lines,
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return NO_END, 0
        right = len(re.findall("^ok ", done.stdout, re.MULTILINE))
        if done.returncode == 0:
            return None, right
        said = done.stdout + done.stderr
        found = re.search(r"WRONG.*|WARNING: ThreadSanitizer.*", said)
        return (found[0] if found else f"status {done.returncode} {said[-200:]}"), right

    def test(self, cases: list[Case], number: int, seconds: float) -> str | None:
        """What a case says without statement `number` that is right with it. The values of some
        seeds have errors beyond what is allowed; those of 0 have been tried."""
        slower = 500 if self.sanitizer else 20
        # Most statements are missed at once, and some without an end: not all cases' time is
        # waited for then.
        first = self.reached[cases[0]._replace(seed=0)][0]
        if self.run(cases[:1], number, 20 + slower * first)[0] == NO_END:
            return NO_END
        limit = 120 + slower * seconds
        while cases:
            said, right = self.run(cases, number, limit)
            if said is None or not said.startswith("WRONG") or cases[right].seed == 0:
                return said
            if self.run([cases[right]], 0, 600)[0] is None:
                return said
            cases = cases[right + 1 :]
        return None

    def cases_for(self, number: int, seeds: range, most: int) -> tuple[list[Case], float]:
        """The cases that reach statement `number`, of each kind the fastest, and their time."""
        kinds: dict[str, int] = {}
        reaching = []
        for seconds, case in sorted((self.reached[case][0], case) for case in self.reached):
            if number not in self.reached[case][1]:
                continue
            kind = kind_of(case)
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= most:
                reaching.append((seconds, case))
        cases = [case._replace(seed=seed) for seed in seeds for _, case in reaching]
        return cases, len(seeds) * sum(seconds for seconds, _ in reaching)
