"""The command `python -m anyflash bench`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyflash
from anyflash.bench import _ranks, _report
from anyflash.bench._array_libraries import ArrayLibrary, NumpyArrays, arrays_for, default_backend
from anyflash.bench._cases import ITEM_SIZES
from anyflash.bench._compare import compare
from anyflash.bench._machine import Monitor, facts
from anyflash.bench._measure import Bench, run
from anyflash.bench._peers import PEERS, chosen_peers
from anyflash.bench._plot import plot
from anyflash.bench._presets import PRESETS, Wanted, cases_of
from anyflash.bench._rooflines import measure_rooflines
from anyflash.bench._timing import Budget, ColdTimer, CpuTimer, CudaTimer, GraphTimer, Timer

FORMAT = 1
STDOUT = Path("-")
QUICK_SECONDS = 40.0
QUICK = Budget(contender_seconds=0.1, fewest=3, most=10)
DTYPES = {"cuda": ("bfloat16",), "cpu": ("float32",)}

EPILOG = """presets:
{presets}

peers (those of another package take part where it is installed):
{peers}

examples:
  python -m anyflash bench                      paper on a GPU, cpu without one
  python -m anyflash bench paper --json new.json --plot speed.svg --compare old.json
  python -m anyflash bench paper --only op=forward --only d=64,128 --peers flash,cudnn
  python -m anyflash bench --load new.json --plot speed.png --markdown speed.md

GPU times are those of CUDA events around several calls; of CUDA graphs for decode and half of
overhead. Contenders take turns. A figure is a median; "spread" is half of the distance between the
quartiles, in percent, the largest of a row. A causal mask counts half of the arithmetic, a backward
2.5 times a forward's.
"""


def add_parser(commands: Any) -> None:
    """The command's arguments, for `anyflash.__main__`."""
    abouts = {name: preset.about for name, preset in PRESETS.items()}
    presets = "\n".join(f"  {name:<18}{about}" for name, about in abouts.items())
    peers = "\n".join(f"  {name:<18}{peer.about}" for name, peer in PEERS.items())
    parser = commands.add_parser(
        "bench",
        help="measure attention's speed here, beside other libraries'",
        description="Measure attention's speed on this machine, beside the other libraries\n"
        "found on it and what the machine gives at best.",
        epilog=EPILOG.format(presets=presets, peers=peers),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("preset", nargs="?", choices=[*PRESETS], metavar="PRESET")
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: cuda where it is")
    parser.add_argument(
        "--peers",
        default="",
        metavar="NAMES",
        help='default: those found; "+NAMES": those and others; "all"; "none"',
    )
    parser.add_argument(
        "--dtype", metavar="NAMES", help="default: bfloat16 on a GPU, float32 (preset cpu: both)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="LABEL=VALUE[,VALUE]",
        help="cases with this label: op, d, mask, seqlen, ... as in the table; repeatable",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer cases; ends within a minute")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no case after so long")
    parser.add_argument("--cold", action="store_true", help="empty the L2 cache before each call")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=STDOUT, default=argparse.SUPPRESS, metavar="FILE",
        help="write everything there, after each case; without FILE, or to -, print it in place of "
        "the tables",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write plots: .svg, .png, .pdf")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="say what changed since")
    parser.add_argument(
        "--load", type=Path, metavar="FILE.json", help="show that run; measure none"
    )


def _only(texts: Sequence[str]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--only {text}: write LABEL=VALUE, or several values with commas")
        found[name] = found.get(name, frozenset()) | frozenset(values.split(","))
    return found


def dtypes_of(text: str | None, backend: str, preset: str = "") -> tuple[str, ...]:
    if text is None:
        both = ("float32", "bfloat16") if preset == "cpu" else DTYPES["cpu"]
        return both if backend == "cpu" else DTYPES["cuda"]
    names = tuple(dict.fromkeys(text.split(",")))
    allowed = tuple(ITEM_SIZES)[:2] if backend == "cuda" else tuple(ITEM_SIZES)
    for name in names:
        if name not in allowed:
            raise ValueError(f"--dtype: {name!r} is not one of {', '.join(allowed)} ({backend})")
    return names


def timers_of(arrays: ArrayLibrary, monitor: Monitor, cold: bool) -> dict[str, Timer]:
    host = CpuTimer()
    if arrays.device == "cpu":
        return {"host": host, "events": host}
    if cold:
        timer: Timer = ColdTimer(monitor.watch)
        return {"host": host, "events": timer, "graph": timer}
    return {
        "host": host,
        "events": CudaTimer(monitor.watch),
        "graph": GraphTimer(monitor.watch),
    }


def measured(arguments: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """A run as a dictionary: rooflines as "ceilings", cases as "cells", as in older runs."""
    began = time.monotonic()
    backend = arguments.backend or default_backend()
    preset = arguments.preset or ("paper" if backend == "cuda" else "cpu")
    if preset == "cpu" and arguments.backend is None:
        backend = "cpu"
    arrays = arrays_for(backend)
    if backend == "cpu" and preset == "memory":
        arrays = NumpyArrays()  # Python counts the memory of its arrays
    dtypes = dtypes_of(arguments.dtype, backend, preset)
    if arguments.cold and backend != "cuda":
        raise ValueError("--cold: only a GPU's L2 cache is emptied")
    if PRESETS[preset].shared and (arguments.cold or arguments.seconds is not None):
        raise ValueError(f"--cold, --seconds: the preset {preset} takes neither")
    peers = chosen_peers(arguments.peers, arrays, PRESETS[preset].peers, arguments.quick)
    wanted = Wanted(backend, dtypes, arguments.quick, arrays.devices())
    cases = cases_of(preset, wanted, _only(arguments.only))
    monitor = Monitor(arrays)
    budget = QUICK if arguments.quick else Budget()
    timers = timers_of(arrays, monitor, arguments.cold)
    names = [n for n in PRESETS[preset].rooflines if backend == "cuda" or n == "gemm"]
    document: dict[str, Any] = {
        "format": FORMAT,
        "preset": preset,
        "about": facts(arrays, monitor, command),
        "ceilings": measure_rooflines(names, dtypes, arrays, timers["events"], budget),
        "cells": [],
    }
    monitor.told()
    limit = arguments.seconds
    if limit is None and arguments.quick:
        limit = max(0.0, QUICK_SECONDS - (time.monotonic() - began))
    if PRESETS[preset].shared:
        entries = _ranks.measured(cases, backend, peers)
    else:
        entries = run(cases, Bench(arrays, peers, timers, budget, monitor), limit)
    try:
        for entry in entries:
            document["cells"].append(entry)
            _keep(document, arguments.json, len(cases))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if len(document["cells"]) < len(cases):
        document["about"]["cells_left_out"] = len(cases) - len(document["cells"])
    return document


def _as_json(document: dict[str, Any]) -> str:
    """A case a line."""
    text = json.dumps({**document, "cells": []}, indent=1)
    cases = ",\n".join(f"  {json.dumps(entry)}" for entry in document["cells"])
    return text.replace('"cells": []', f'"cells": [\n{cases}\n ]') + "\n"


def _keep(document: dict[str, Any], path: Path | None, cases: int) -> None:
    """Write what there is so far, for a run that may be killed. A pipe or a terminal gets it once,
    at the end."""
    if path is None or path == STDOUT or (path.exists() and not path.is_file()):
        return
    about = {**document["about"], "cells_left_out": cases - len(document["cells"])}
    path.write_text(_as_json({**document, "about": about}))


def _loaded(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        known = document["format"] == FORMAT and document["preset"] in PRESETS
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a run of this benchmark: {error}") from None
    if not known:
        raise ValueError(f"{path}: written by another version of this benchmark")
    return document


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Before anything is measured."""
    if arguments.preset is None and str(arguments.json) in PRESETS:
        raise ValueError(f"--json {arguments.json}: write the preset before --json, or --json -")
    for path in (arguments.json, arguments.markdown, arguments.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; run: python -m pip install matplotlib")


def main(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 if anyflash failed in a case, 2 where the
    arguments ask for what is not there."""
    try:
        _check_outputs(arguments)
        old = _loaded(arguments.compare) if arguments.compare else None
        document = _loaded(arguments.load) if arguments.load else measured(arguments, command)
        printed = arguments.json == STDOUT
        if printed:
            print(_as_json(document), end="")
        else:
            if arguments.json:
                arguments.json.write_text(_as_json(document))
            _report.show(document)
        if arguments.markdown:
            arguments.markdown.write_text(_report.markdown(document))
        if old is not None:
            changes = "\n" + compare(old, document)
            print(changes, end="", file=sys.stderr if printed else sys.stdout)
        if arguments.plot:
            for path in plot(document, arguments.plot):
                print(f"wrote {path}", file=sys.stderr)
    except ValueError as error:
        print(f"python -m anyflash bench: {error}", file=sys.stderr)
        return 2
    own = [entry["results"].get(anyflash.__name__, {}) for entry in document["cells"]]
    return 1 if any("error" in result for result in own) else 0
