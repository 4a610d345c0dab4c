"""Mutation testing of the kernels' synchronisation: every statement, left out one at a time.

    python tests/mutation/synchronisation.py [--list] [--only PATTERN...] [--jobs N] [--resume]

statements.py finds the statements. Units of the emulated GPU are compiled once for each sanitizer,
with a switch at every statement, and linked into one driver. It runs the cases that reach a
statement, without it, until something is wrong: the fastest ones, Thread Sanitizer's, then all with
more and more seeds. synchronisation.txt explains what nothing on the emulated GPU could notice.
--only takes patterns of files below cpp/kernels: 'sm90/backward/*'. Everything lies in
build/mutation.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from statements import ROOT, Source, Statement, all_statements, explained, sources
from switched_driver import SwitchedDriver

FOLDER = ROOT / "build/mutation/synchronisation"
RESULTS = ROOT / "build/mutation/synchronisation.jsonl"


class Step(NamedTuple):
    name: str
    sanitizer: str
    seeds: range
    most: int = 1000  # cases of a kind: the fastest that reach the statement


# Twelve consecutive seeds meet every policy of the emulator's scheduler.
STEPS = (
    Step("first", "", range(1), 1),
    Step("tsan", "tsan", range(1), 1),
    Step("plain", "", range(4)),
    Step("races", "tsan", range(1)),
    Step("seeds", "", range(4, 12)),
)


class Results:
    """What was found, by key: written as it comes, and read again by --resume."""

    def __init__(self, resume: bool) -> None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        self.noticed: dict[str, str] = {}  # by which step
        self.survived: dict[str, set[str]] = {}  # digests of the runs
        if resume and RESULTS.exists():
            for line in RESULTS.read_text().splitlines():
                self.keep(json.loads(line))
        self.file = RESULTS.open("a" if resume else "w")

    def keep(self, line: dict[str, str]) -> None:
        if line["result"] == "noticed":
            self.noticed[line["key"]] = line["step"]
        else:
            self.survived.setdefault(line["key"], set()).add(line["run"])

    def add(self, line: dict[str, str]) -> None:
        self.keep(line)
        print(json.dumps(line), file=self.file, flush=True)


def processor_seconds() -> float:
    """Of the programs that were run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_step(
    step: Step,
    driver: SwitchedDriver,
    todo: dict[int, Statement],
    pool: ThreadPoolExecutor,
    results: Results,
) -> None:
    def test(number: int, statement: Statement) -> None:
        cases, seconds = driver.cases_for(number, step.seeds, step.most)
        run = hashlib.sha256(repr((step.name, cases)).encode()).hexdigest()[:16]
        if not cases or run in results.survived.get(statement.key, set()):
            return
        begin = time.monotonic()
        said = driver.test(cases, number, seconds)
        result = "survived" if said is None else "noticed"
        line = {"key": statement.key, "result": result, "step": step.name, "run": run}
        took = f"{time.monotonic() - begin:.1f}"
        results.add(line | {"said": said or f"{len(cases)} cases", "seconds": took})

    begin, processor = time.monotonic(), processor_seconds()
    before = len(results.noticed)
    for future in [pool.submit(test, *item) for item in todo.items()]:
        future.result()
    took = f"{time.monotonic() - begin:.0f} s, {processor_seconds() - processor:.0f} s of CPU"
    more = len(results.noticed) - before
    print(f"{step.name}: {more} of {len(todo)} noticed ({took})", flush=True)


def run_all(
    statements: list[Statement],
    wanted: dict[int, Statement],
    files: list[Source],
    arguments: argparse.Namespace,
) -> Results:
    results = Results(arguments.resume)
    files_wanted = {statement.file for statement in wanted.values()}
    drivers = {
        sanitizer: SwitchedDriver(arguments.build, FOLDER, sanitizer, statements)
        for sanitizer in dict.fromkeys(step.sanitizer for step in STEPS)
    }
    plain = drivers[""]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        plain.prepare(pool, files, files_wanted)
        for step in STEPS:
            driver = drivers[step.sanitizer]
            todo = {n: s for n, s in wanted.items() if s.key not in results.noticed}
            if not todo or step.name not in arguments.steps:
                continue
            if not driver.changed_units:
                driver.prepare(pool, files, files_wanted)
            # What a case reaches is found out without a sanitizer, which would take minutes.
            cases = driver.cases()
            plain.reach(pool, cases)
            driver.reached = {case: plain.reached[case] for case in cases}
            run_step(step, driver, todo, pool, results)
    return results


def summarise(wanted: list[Statement], results: Results) -> bool:
    """Prints what was found; whether all was noticed or is explained."""
    reasons = explained()
    counts: dict[str, list[int]] = {}
    left = False
    for s in wanted:
        noticed = s.key in results.noticed
        state = 0 if noticed else 1 if s.key in reasons else 2
        for name in (s.file, "all"):
            counts.setdefault(name, [0, 0, 0])[state] += 1
        if state == 2:
            how = "survived   " if s.key in results.survived else "not reached"
            print(f"{how} {s.key}  (line {s.line})")
            left = True
        if noticed and s.key in reasons:
            print(f"noticed, though it is explained: {s.key}")
    counts["all"] = counts.pop("all")
    print(f"{'file':42} statements noticed explained survived   score")
    for name, (noticed, known, survived) in counts.items():
        total = noticed + known + survived
        score = (
            f"{100 * noticed / (noticed + survived):5.1f} %" if noticed + survived else "      -"
        )
        print(f"{name:42} {total:10} {noticed:7} {known:9} {survived:8} {score}")
    return not left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the statements, and nothing else")
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the last run's results")
    parser.add_argument("--explained", action="store_true", help="test those, too")
    names = [step.name for step in STEPS]
    parser.add_argument("--steps", nargs="*", choices=names, default=names)
    build = os.environ.get("ANYFLASH_TEST_BUILD", ROOT / "build/test")
    parser.add_argument("--build", type=Path, default=build, help="of `make build-test`")
    arguments = parser.parse_args()
    arguments.build = Path(arguments.build).resolve()
    files = sources()
    statements = all_statements(files)
    wanted = {
        number: statement
        for number, statement in enumerate(statements, 1)
        if any(fnmatch.fnmatch(statement.file, pattern) for pattern in arguments.only)
    }
    known = {} if arguments.explained else explained()
    tested = {n: s for n, s in wanted.items() if s.key not in known}
    if arguments.list:
        for statement in wanted.values():
            print(f"{statement.key}  (line {statement.line})")
        print(f"{len(wanted)} statements in {len({s.file for s in wanted.values()})} files")
        return 0
    results = run_all(statements, tested, files, arguments)
    return 0 if summarise([*wanted.values()], results) else 1


if __name__ == "__main__":
    sys.exit(main())
