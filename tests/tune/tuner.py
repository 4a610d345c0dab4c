"""Which tiles are the fastest on this GPU.

    python tests/tune/tuner.py --write cpp/src/tuned_tiles.cpp

Plain kernels of some head dims exist several times, with tiles for other sizes of shared memory:
their configs (KernelDescriptor::tile_config). select_gpu.cpp chooses by rules; where another config
is measured to be faster, a row of cpp/src/tuned_tiles.cpp says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuned_tiles import LEAST_GAIN, Key, Measured, alike, chosen, rewritten

import anyflash
from anyflash import _core
from anyflash.bench import _anyflash_calls, _cli
from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import arrays_for
from anyflash.bench._cases import Case
from anyflash.bench._machine import Monitor
from anyflash.bench._measure import Bench, timed
from anyflash.bench._presets import MASKS
from anyflash.bench._problem import Problem
from anyflash.bench._report import Table, aligned, geometric_mean, number
from anyflash.bench._timing import Budget

TOKENS, HIDDEN = 16384, 2048  # as in the paper's grid
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
ALONE = (128, 256, 512, 1024, 2048, 4096)  # of one sequence
QUICK_SEQLENS, QUICK_ALONE = (512, 1024, 8192), (128, 512)

Configs = Mapping[str, str]  # the kernels' names
Family = tuple[str, int, int, str]  # operation, head dims, arch


def families(dtype: str) -> dict[Family, dict[str, str]]:
    """Plain GPU kernels of which there are several for the same head dims, by config."""
    found: dict[Family, dict[str, str]] = {}
    for kernel in anyflash.build_info()["kernels"]:
        on_gpu = not kernel["arch"].startswith("cpu-")
        if on_gpu and kernel["dtype"] == dtype and not kernel["features"]:
            family = kernel["op"], kernel["head_dim"], kernel["head_dim_v"], kernel["arch"]
            found.setdefault(family, {})[kernel["tile_config"]] = kernel["name"]
    return {family: configs for family, configs in found.items() if len(configs) > 1}


def cases(
    family: Family, dtype: str, multiprocessors: int, quick: bool
) -> Iterator[tuple[Key, Case]]:
    """The problems of each key: the paper's, which fill a GPU; and one sequence of few tokens,
    which does not, by graphs, since the host would take longer."""
    op, d, d_v, arch = family
    heads = HIDDEN // d
    limits = anyflash.build_info()["tuned_tiles"]
    for causal in MASKS:
        case = Case(op, 1, 0, heads, d, dtype, causal=causal, d_v=d_v if d_v != d else 0)
        for seqlen in QUICK_SEQLENS if quick else SEQLENS:
            size = "short" if seqlen <= limits["short_rows"] else "long"
            key = Key(op, d, d_v, causal, size, arch)
            yield key, replace(case, batch=TOKENS // seqlen, seqlen=seqlen)
        for seqlen in QUICK_ALONE if quick else ALONE:
            if -(-seqlen // limits["grid_tile"]) * heads < multiprocessors:
                key = Key(op, d, d_v, causal, "small grid", arch)
                yield key, replace(case, seqlen=seqlen, timing="graph")


@contextlib.contextmanager
def preferring(name: str) -> Iterator[None]:
    """The kernel of this name runs what it can; "": what the rules choose."""
    _core.prefer_kernel(name)
    try:
        yield
    finally:
        _core.prefer_kernel(None)


def launches() -> dict[str, int]:
    return {kernel["name"]: kernel["launches"] for kernel in anyflash.build_info()["kernels"]}


def ran(call: Call) -> tuple[str, tuple[Any, ...]]:
    """The kernel that a call launches, and its results."""
    before = launches()
    with call.context():
        outputs = call.outputs(call.run(0))
    (name,) = (name for name, count in launches().items() if count != before[name])
    return name, outputs


@dataclass(frozen=True)
class Result:
    """A problem as measured, and the config that is chosen for it now."""

    measured: Measured
    case: Case
    now: str


def measure(key: Key, case: Case, configs: Configs, bench: Bench) -> Result | None:
    """None where another kernel runs the problem, since the GPU has too little shared memory."""
    with bench.arrays.apart() if case.timing == "graph" else nullcontext():
        call = _anyflash_calls.anyflash_call(Problem(case, bench.arrays))
        named = {name: config for config, name in configs.items()}
        now, _ = ran(call)
        rules, _ = ran(_preferred(call, ""))
        if now not in named or rules not in named:
            return None
        calls: dict[str, Call] = {}
        results: dict[str, tuple[Any, ...]] = {}
        for config, name in configs.items():
            preferred = _preferred(call, name)
            launched, outputs = ran(preferred)
            if launched == name:  # else it does not fit
                # The sums of a backward's dq come in any order.
                calls[config], results[config] = preferred, outputs[1:] or outputs
        samples = timed(calls, case, bench)
    for error in samples.errors.values():
        raise error
    seconds = {config: statistics.median(samples.seconds[config]) for config in calls}
    measured = Measured(key, seconds, named[rules], _numbered(results, bench.arrays.difference))
    return Result(measured, case, named[now])


def _preferred(call: Call, name: str) -> Call:
    return replace(call, context=lambda: preferring(name))


def _numbered(
    results: Mapping[str, tuple[Any, ...]], difference: Callable[[Any, Any], float]
) -> dict[str, int]:
    """The same number for the same bits."""
    kinds: list[tuple[Any, ...]] = []
    numbers: dict[str, int] = {}
    for config, outputs in results.items():
        for i, known in enumerate(kinds):
            if all(difference(a, b) == 0.0 for a, b in zip(known, outputs, strict=True)):
                numbers[config] = i
                break
        else:
            numbers[config] = len(kinds)
            kinds.append(outputs)
    return numbers


def table(results: Sequence[Result], written: Mapping[Key, str]) -> Table:
    """A line for each kernel and key: its speed, and who chooses it."""
    rows = []
    for key in dict.fromkeys(result.measured.key for result in results):
        mine = [result for result in results if result.measured.key == key]
        speeds = {
            config: geometric_mean([r.case.flop / r.measured.seconds[config] for r in mine])
            for config in mine[0].measured.seconds
        }
        for config, speed in speeds.items():
            chooses = ["now"] if any(r.now == config for r in mine) else []
            chooses += ["rules"] if any(r.measured.rules == config for r in mine) else []
            chooses += ["tuned"] if written.get(key) == config else []
            dims = str(key.d) if key.d == key.d_v else f"{key.d}/{key.d_v}"
            words = [key.op, dims, "causal" if key.bounded else "full"]
            words += [key.size, config or "default", ", ".join(chooses)]
            rows.append([*words, number(speed / 1e12), f"{speed / max(speeds.values()):.3f}"])
    header = ["op", "d", "mask", "size", "tiles", "chosen", "TFLOP/s", "of best"]
    return Table("geometric means", header, rows, _notes(results, written), 6)


def _notes(results: Sequence[Result], written: Mapping[Key, str]) -> list[str]:
    notes = [
        f"tuned: {len(written)} rows for the table, where what the rules choose is slower by more "
        f"than {100 * (LEAST_GAIN - 1):.0f} %, or has other bits than what is chosen elsewhere"
    ]
    for family in dict.fromkeys(result.measured.key.family for result in results):
        groups = alike([r.measured for r in results if r.measured.key.family == family])
        if len(groups) > 1:
            told = " | ".join(", ".join(c or "default" for c in sorted(g)) for g in groups)
            dims = "/".join(dict.fromkeys(map(str, family[1:3])))
            notes.append(f"{family[0]} d {dims}: not the same bits, so that only one of: {told}")
    return notes


def tune(dtypes: Sequence[str], quick: bool, bench: Bench) -> list[Result]:
    """All results; what is measured is told to stderr."""
    properties = importlib.import_module("torch").cuda.get_device_properties(0)
    results = []
    for dtype in dtypes:
        for family, configs in families(dtype).items():
            for key, case in cases(family, dtype, properties.multi_processor_count, quick):
                result = measure(key, case, configs, bench)
                bench.arrays.release()
                if result is not None:
                    results.append(result)
                    seconds = result.measured.seconds.items()
                    told = ", ".join(f"{c or 'default'} {1e6 * s:.1f} us" for c, s in seconds)
                    print(f"{case.key}: {told}", file=sys.stderr, flush=True)
    if not results:
        raise ValueError(
            f"this build has one plain GPU kernel for each head dim in {', '.join(dtypes)}"
        )
    return results


def run(dtypes: Sequence[str], quick: bool, path: Path | None, bench: Bench) -> None:
    """Measure, print, and write where that is asked for."""
    if path is not None:
        rewritten(_read(path), 0, {})  # before anything is measured: it is the table
    results = tune(dtypes, quick, bench)
    configs = chosen([result.measured for result in results])
    print("\n".join(aligned(table(results, configs))))
    if path is not None:
        major, minor = importlib.import_module("torch").cuda.get_device_capability(0)
        path.write_text(rewritten(_read(path), 10 * major + minor, configs))
        print(f"wrote {path}: build anew", file=sys.stderr)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"--write {path}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """2 where the arguments ask for what is not there."""
    parser = argparse.ArgumentParser(
        prog="tuner.py", description="Measure which tiles are the fastest on this GPU."
    )
    parser.add_argument("--dtype", metavar="NAMES", help="default: bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer cases, less often")
    parser.add_argument(
        "--write", type=Path, metavar="FILE",
        help="put the fastest tiles into cpp/src/tuned_tiles.cpp of a checkout",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        arrays = arrays_for("cuda")
        monitor = Monitor(arrays)
        budget = _cli.QUICK if given.quick else Budget()
        bench = Bench(arrays, (), _cli.timers_of(arrays, monitor, cold=False), budget, monitor)
        run(_cli.dtypes_of(given.dtype, "cuda"), given.quick, given.write, bench)
    except ValueError as error:
        print(f"tuner.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
