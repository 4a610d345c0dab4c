"""Runs random steps twice, each time with another number of threads: the same bits, bounded memory.

python tests/soak/soak.py [--steps N] [--seed S] [--device cuda]

On a GPU both runs go on at once, so that their kernels meet in other ways each time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path

STEPS = Path(__file__).with_name("random_steps.py")
# Memory of the second half over that of the first: what is allocated once, and the allocator's own.
MOST_GROWTH = 32 << 20


def child(threads: int, steps: int, seed: int, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(STEPS), "--steps", str(steps), "--seed", str(seed)]
    command += ["--device", device]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def growth(memory: list[int]) -> int:
    """By how much the largest of the second half exceeds that of the first."""
    half = max(len(memory) // 2, 1)
    return max(memory[half:], default=0) - max(memory[:half])


def soak(steps: int, seed: int, device: str = "cpu") -> list[int]:
    """How much memory each run's second half took above its first. AssertionError: what differs."""
    runs = [child(threads, steps, seed, device) for threads in (1, 3)]
    memory: list[list[int]] = [[], []]
    done = 0
    for lines in zip_longest(*(run.stdout for run in runs if run.stdout is not None)):
        assert all(lines), f"one of the runs ended after {done} steps"
        (first, first_memory), (second, second_memory) = (line.split() for line in lines)
        assert first == second, f"step {done} of seed {seed} has other bits with 3 threads"
        memory[0].append(int(first_memory))
        memory[1].append(int(second_memory))
        done += 1
    assert [run.wait() for run in runs] == [0, 0]
    assert done == steps, f"{done} of {steps} steps"
    grown = [growth(of_run) for of_run in memory]
    assert max(grown) <= MOST_GROWTH, f"memory grew by {grown} bytes in the second half"
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    begin = time.monotonic()
    grown = soak(arguments.steps, arguments.seed, arguments.device)
    print(
        f"{arguments.steps} steps of seed {arguments.seed} on {arguments.device}, with 1 and 3 "
        f"threads: the same bits; memory of the second half over the first: {grown} bytes; "
        f"{time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
