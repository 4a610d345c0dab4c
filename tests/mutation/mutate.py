"""Mutation testing of the host code: how many small mistakes the tests in C++ notice.

    python tests/mutation/mutate.py [--count N] [--seed S] [--jobs J] [--resume] [--only KEY...]

Draws mutants of validation, planning and dispatch by the seed. Each is built into the library for
the CPU and into the tests of tests/cpp, which run until one fails. Prints those that survived and
the score: killed / (all - equivalent). equivalent.txt lists those that change nothing that a caller
can see, and why. Everything lies in build/mutation.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/mutation"
RESULTS = BUILD / "results.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
SHORTEST_SCORE, MOST_EQUIVALENT = 0.9, 0.05

# What is mutated, without what runs with a GPU alone: the emulated library's tests see to that.
FILES: dict[str, tuple[str, ...]] = {
    "arguments.cpp": (),
    "arguments.h": (),
    "backward.cpp": ("plan_copies", "launch_on_gpu"),
    "c_api.cpp": (),
    "c_arguments.h": (),
    "describe.cpp": (),
    "dispatch.cpp": (),
    "dlpack.cpp": (),
    "forward.cpp": ("plan_copies", "launch_on_gpu"),
    "grid_heuristics.h": (),
    "heuristics.h": (),
    "kvcache.cpp": ("splits_for",),
    "kvcache_combinations.h": (),
    "lengths.cpp": ("HostCopy",),
    "merge_states.cpp": (),
    "plan.h": (),
    "registry.cpp": (),
    "repack.cpp": (),
    "select_cpu.cpp": (),
    "select_gpu.cpp": (),
    "validate.cpp": (),
    "validate_backward.cpp": (),
    "validate_features.cpp": (),
    "validate_kvcache.cpp": (),
    "workspace.h": (),
}
# In the order in which they run: what is fast and notices much comes first. cache_test and
# mask_test see nothing of the host code.
TESTS = (
    *(f"validation_{name}_test" for name in ("forward", "features", "packed", "backward")),
    *(
        f"validation_{name}_test"
        for name in ("kvcache", "kvcache_latent", "kvcache_lengths", "kvcache_memory")
    ),
    *(f"c_{name}_test" for name in ("api", "options", "backward", "kvcache")),
    *(
        "plan_test",
        "prior_test",
        "merge_test",
        "kvcache_test",
        "dispatch_test",
        "problem_test",
        "tuned_tiles_test",
    ),
    *("repack_test", "heuristics_test", "kernels_test", "forward_test", "backward_test"),
    *("dropout_test", "allocation_test", "forward_features_test"),
)
TIMEOUT_S = 60


class Worker:
    """A copy of the sources, and a build of it."""

    def __init__(self, number: int) -> None:
        self.source = BUILD / str(number) / "source"
        self.build = BUILD / str(number) / "build"

    def prepare(self) -> None:
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for name in listed:
            target = self.source / name
            data = (ROOT / name).read_bytes()
            if target.exists() and target.read_bytes() == data:
                continue  # nor is it compiled again
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        options = ("-DANYFLASH_CUDA=OFF", "-DANYFLASH_KERNEL_SET=minimal", "-DANYFLASH_TESTS=ON")
        # The tests need not be linked again when the library is.
        options = (*options, "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON")
        flags = "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -w"  # a warning is no finding
        python = f"-DPython_EXECUTABLE={sys.executable}"
        configure = ["cmake", "-S", self.source, "-B", self.build, "-G", "Ninja", flags, python]
        subprocess.run([*configure, *options], check=True, stdout=subprocess.DEVNULL)
        if not self.compile():
            raise RuntimeError("what is not mutated does not build: see ninja in build/mutation")
        failed = self.first_failure()
        if failed is not None:
            raise RuntimeError(f"{failed} fails without any mutant")

    def compile(self) -> bool:
        command = ["ninja", "-C", self.build, "-j", "1", "anyflash", *TESTS]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def first_failure(self) -> str | None:
        for name in TESTS:
            try:
                run = subprocess.run(
                    [self.build / "tests/cpp" / name],
                    check=False,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return f"{name} (no end)"
            if run.returncode != 0:
                return name
        return None

    def result_of(self, mutant: Mutant) -> str:
        """ "invalid", "survived", or the test that noticed it."""
        path = self.source / "cpp/src" / mutant.file
        original = path.read_text()
        path.write_text(mutant.apply(original))
        try:
            return (self.first_failure() or "survived") if self.compile() else "invalid"
        finally:
            path.write_text(original)


def drawn(seed: int) -> list[Mutant]:
    """All mutants, in the seed's order."""
    everything = [
        mutant
        for file, skipped in FILES.items()
        for mutant in mutants_of(file, (ROOT / "cpp/src" / file).read_text(), skipped)
    ]
    random.Random(seed).shuffle(everything)
    return everything


def equivalents() -> set[str]:
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {line for line in lines if line and not line.startswith(("#", " "))}


def earlier_results() -> dict[str, str]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {line["key"]: line["result"] for line in map(json.loads, lines)}


def run_all(mutants: list[Mutant], count: int, jobs: int, resume: bool) -> dict[str, str]:
    """The results of the first `count` valid ones, by key."""
    known = earlier_results() if resume else {}
    results = {mutant.key: known[mutant.key] for mutant in mutants if mutant.key in known}
    todo: queue.Queue[Mutant] = queue.Queue()
    # A batch at a time, by file: what is built again is then mostly the same object.
    log = RESULTS.open("a" if resume else "w")
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        while True:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            result = worker.result_of(mutant)
            with lock:
                results[mutant.key] = result
                line = {"result": result, "kind": mutant.kind, "line": mutant.line}
                print(json.dumps(line | {"key": mutant.key}), file=log, flush=True)

    workers = [Worker(number) for number in range(jobs)]
    for worker in workers:
        worker.prepare()
    rest = [mutant for mutant in mutants if mutant.key not in results]
    while rest:
        missing = count - sum(result != "invalid" for result in results.values())
        if missing <= 0:
            break
        batch, rest = rest[:missing], rest[missing:]
        for mutant in sorted(batch, key=lambda m: (m.file, m.begin)):
            todo.put(mutant)
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {key: result for key, result in results.items() if result != "invalid"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="keep the results of the last run")
    parser.add_argument("--only", nargs="*", help="keys; or a file of them, with @ before its name")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    mutants = list({mutant.key: mutant for mutant in drawn(arguments.seed)}.values())
    if arguments.only:
        keys = set(arguments.only)
        for name in arguments.only:
            if name.startswith("@"):
                keys |= set(Path(name[1:]).read_text().splitlines())
        mutants = [mutant for mutant in mutants if mutant.key in keys]
    for key in sorted(equivalents() - {mutant.key for mutant in drawn(arguments.seed)}):
        print(f"no mutant any more: {key}")
    begin = time.monotonic()
    results = run_all(mutants, arguments.count, arguments.jobs, arguments.resume)
    known = equivalents()
    survivors = [key for key, result in results.items() if result == "survived"]
    same = [key for key in survivors if key in known]
    for key in survivors:
        if key not in known:
            print(f"survived  {key}")
    for key in sorted(known & set(results)):
        if results[key] != "survived":
            print(f"not equivalent: {results[key]} notices  {key}")
    killed = len(results) - len(survivors)
    score = killed / max(len(results) - len(same), 1)
    print(
        f"{len(results)} mutants of {len(mutants)}, seed {arguments.seed}: {killed} noticed, "
        f"{len(same)} equivalent, {len(survivors) - len(same)} survived; score {100 * score:.1f} % "
        f"({time.monotonic() - begin:.0f} s)"
    )
    good = score >= SHORTEST_SCORE and len(same) <= MOST_EQUIVALENT * len(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
