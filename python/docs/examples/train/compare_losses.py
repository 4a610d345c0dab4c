"""Whether training with anyflash learns as with PyTorch's flash attention.

Both begin from one seed; their losses may differ by as much as another seed makes them differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import about
import choices
import train
from config import CONFIGS

RUNS = (("anyflash", 0), ("flash", 0), ("flash", 1))  # attention and seed


@dataclass(frozen=True)
class Comparison:
    """Losses at every so-many-th step."""

    steps: list[int]
    anyflash: list[float]
    flash: list[float]
    other_seed: list[float]  # flash's

    @property
    def difference(self) -> float:
        """The largest one between anyflash and flash."""
        return largest(self.anyflash, self.flash)

    @property
    def gap(self) -> float:
        """The largest one between two seeds of flash."""
        return largest(self.flash, self.other_seed)

    @property
    def within(self) -> bool:
        return self.difference <= self.gap  # False if a loss is NaN


def largest(a: Sequence[float], b: Sequence[float]) -> float:
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(differences, key=lambda x: (math.isnan(x), x))


def compare(losses: Sequence[Sequence[float]], every: int) -> Comparison:
    """Of the three RUNS."""
    steps = list(range(every, len(losses[0]) + 1, every))
    return Comparison(steps, *([run[step - 1] for step in steps] for run in losses))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    number = {"type": choices.positive}
    parser.add_argument("--model", choices=CONFIGS, default="125m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", **number, default=300)
    parser.add_argument("--every", **number, default=50, help="steps between those compared")
    parser.add_argument("--batch-size", **number, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.every > options.steps:
        parser.error(f"--every {options.every}: there are {options.steps} steps")
    return options


def losses(options: argparse.Namespace) -> list[list[float]]:
    """Of the three RUNS, from nothing: an earlier checkpoint may be of other options."""
    common = [f"--{name}={getattr(options, name)}" for name in ("model", "device", "steps")]
    common += [f"--batch-size={options.batch_size}", *(["--compile"] * options.compile)]
    common += [f"--save-every={options.steps}"]  # a checkpoint has 1.5 GB
    found = []
    for attention, seed in RUNS:
        with TemporaryDirectory() as folder:
            given = [f"--attention={attention}", f"--seed={seed}", f"--folder={folder}"]
            found.append(train.main([*common, *given]))
    return found


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if anyflash's losses lie within the seeds' gap."""
    options = parse(arguments)
    found = compare(losses(options), options.every)
    print("step  anyflash  flash  flash with another seed")
    for row in zip(found.steps, found.anyflash, found.flash, found.other_seed, strict=True):
        print(f"{row[0]:4}  {row[1]:8.4f}  {row[2]:.4f}  {row[3]:.4f}")
    print(f"largest difference: {found.difference:.2g} to flash, {found.gap:.2g} between its seeds")
    print("anyflash is", "within" if found.within else "NOT within", "the seeds' gap")
    if options.json:
        given = sys.argv[1:] if arguments is None else arguments
        gpt = choices.framework_module("torch", "flash", options.device)
        document = {
            "about": about.run(["compare_losses.py", *given]) | about.device(gpt, options.device),
            "losses": dataclasses.asdict(found),
            "difference": found.difference,
            "gap": found.gap,
            "within": found.within,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(not found.within)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
