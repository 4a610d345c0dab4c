"""One case after the other: contenders are made, compared, and timed in turns."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from anyflash.bench import _anyflash_calls, _calls
from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import ArrayLibrary, Unsupported
from anyflash.bench._cases import Case
from anyflash.bench._machine import Monitor
from anyflash.bench._peers import PEERS
from anyflash.bench._problem import Problem
from anyflash.bench._timing import Budget, Samples, Timer, take_turns

OWN = "anyflash"
TOLERANCE = 0.05  # relative, in the Frobenius norm: a wrong call is off by far more
GRAPH_SECONDS = 0.1  # calls of microseconds need no more, timed on the GPU alone
QUARTILES = (0.25, 0.5, 0.75)


class Disagreement(Exception):
    """A contender computes something else."""


@dataclass(frozen=True)
class Bench:
    """What a run measures with."""

    arrays: ArrayLibrary
    peers: Sequence[str]
    timers: dict[str, Timer]  # by Case.timing
    budget: Budget
    monitor: Monitor


def refusal(error: Exception, warned: Sequence[warnings.WarningMessage] = ()) -> dict[str, str]:
    """Why a contender has no figure: by design, or because something failed. PyTorch's reasons come
    as warnings."""
    texts = [str(error).strip() or "no reason given", *(str(w.message) for w in warned)]
    text = "; ".join(dict.fromkeys(t.partition("\n")[0].partition(" (Triggered")[0] for t in texts))
    text = text[:400]
    if isinstance(error, Unsupported):
        return {"unsupported": text}
    return {"error": text if isinstance(error, Disagreement) else f"{type(error).__name__}: {text}"}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of an ordered sample, interpolated."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """A contender's result: the median, the quartiles and all samples."""
    ordered = sorted(seconds)
    q1, median, q3 = (float(f"{quantile(ordered, share):.6g}") for share in QUARTILES)
    samples = [float(f"{value:.5g}") for value in seconds]
    return {"seconds": median, "q1": q1, "q3": q3, "samples": samples}


def _comparable(case: Case) -> bool:
    return case.feature not in {"dropout", "everything, window 512"}


def contenders(
    problem: Problem, bench: Bench, refused: dict[str, dict[str, str]]
) -> dict[str, Call]:
    """Those that can do the case and agree with anyflash; why the others do not goes to refused."""
    calls: dict[str, Call] = {}
    reference: tuple[Any, ...] = ()
    for name in (OWN, *bench.peers):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                calls[name], outputs = _tried(name, problem, bench.arrays, reference)
                if name == OWN:
                    reference = outputs
            except Exception as error:  # whatever other people's code raises
                refused[name] = refusal(error, warned)
        if name in refused:
            bench.arrays.release()
    return calls


def _tried(
    name: str, problem: Problem, arrays: ArrayLibrary, reference: tuple[Any, ...]
) -> tuple[Call, tuple[Any, ...]]:
    """A contender's call, and what it gave the first time."""
    if problem.case.cache_dtype and name not in {OWN, "plain"}:
        raise Unsupported("its caches of 8 bits are not measured")
    call = _anyflash_calls.anyflash_call(problem) if name == OWN else PEERS[name].build(problem)
    with call.context():
        outputs = call.outputs(call.run(0))
    arrays.synchronize()
    if reference and call.comparable and _comparable(problem.case):
        _compare(arrays, reference, outputs)
    return call, outputs


def _compare(arrays: ArrayLibrary, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    if len(ours) != len(theirs):
        raise Disagreement(f"{len(theirs)} results where anyflash has {len(ours)}")
    for a, b in zip(ours, theirs, strict=True):
        if tuple(a.shape) != tuple(b.shape):
            raise Disagreement(f"shape {tuple(b.shape)} where anyflash has {tuple(a.shape)}")
        error = arrays.difference(a, b)
        if not error <= TOLERANCE:
            raise Disagreement(f"its result differs from anyflash's by {error:.2g} of the norm")


def _peak_bytes(call: Call, arrays: ArrayLibrary) -> int:
    """Memory that one call takes beside its inputs, results included."""
    gc.collect()
    if arrays.name == "numpy":
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call.run(0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - before
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with call.context():
        result = call.run(0)
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)


def measure(case: Case, bench: Bench) -> dict[str, Any]:
    """A case's entry in the results."""
    with bench.arrays.apart() if case.timing == "graph" else nullcontext(), ExitStack() as undo:
        results, refused = _results(case, bench, undo)
    sizes = {name: value for name, value in asdict(case).items() if name != "lengths"}
    entry = {"key": case.key, "labels": case.labels, **sizes}
    entry |= {"flop": case.flop, "bytes": case.bytes}
    if case.lengths:
        entry["lengths"] = list(case.lengths)
    order = [name for name in (OWN, *bench.peers) if name in results or name in refused]
    order += [name for name in (*results, *refused) if name not in order]
    entry["results"] = {name: refused.get(name) or results[name] for name in order}
    told = bench.monitor.told()
    return {**entry, "gpu": told} if told else entry


def timed(calls: dict[str, Call], case: Case, bench: Bench) -> Samples:
    timer = bench.timers["host" if case.op == "call" else case.timing]
    budget = bench.budget
    if case.timing == "graph":
        seconds = min(GRAPH_SECONDS, budget.contender_seconds)
        budget = replace(budget, contender_seconds=seconds)
    return take_turns(calls, timer, budget)


def _results(
    case: Case, bench: Bench, undo: ExitStack
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Figures, and why there are none."""
    refused: dict[str, dict[str, str]] = {}
    results: dict[str, dict[str, Any]] = {}
    if case.op == "call":
        calls = _host_calls(case, refused, undo)
    else:
        calls = contenders(Problem(case, bench.arrays), bench, refused)
    if case.timing == "memory":
        for name, call in calls.items():
            try:
                results[name] = {"bytes": _peak_bytes(call, bench.arrays)}
            except Exception as error:
                refused[name] = refusal(error)
    elif calls:
        samples = timed(calls, case, bench)
        results = {name: summary(seconds) for name, seconds in samples.seconds.items() if seconds}
        refused |= {name: refusal(error) for name, error in samples.errors.items()}
    return results, refused


def _host_calls(case: Case, refused: dict[str, dict[str, str]], undo: ExitStack) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    try:
        for name, way in _calls.framework_calls(case.framework, undo):
            way()
            calls[name] = _ignoring_turns(way)
    except ImportError as error:
        refused["framework"] = {"unsupported": f"{error.name} is not installed"}
    except Exception as error:  # a framework that does not start
        refused["framework"] = refusal(error)
    return calls


def _ignoring_turns(way: Callable[[], Any]) -> Call:
    return Call(lambda turn: way())


def _told(entry: dict[str, Any]) -> str:
    from anyflash.bench._report import figure

    return ", ".join(
        f"{name} {figure(entry, name) or '-'}" for name in entry["results"]
        if "unsupported" not in entry["results"][name]
    )  # fmt: skip


def run(cases: Sequence[Case], bench: Bench, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Entries as they come. After `seconds`, or when the GPU is lost, the rest is left out, which
    stderr says, as it says what has been measured."""
    start = time.monotonic()
    for number, case in enumerate(cases, 1):
        if seconds is not None and time.monotonic() - start > seconds:
            print(f"time is up: {len(cases) - number + 1} cases are left out", file=sys.stderr)
            return
        entry = measure(case, bench)
        took = time.monotonic() - start
        clock = f"{int(took) // 60}:{int(took) % 60:02}"
        print(
            f"{clock} {number}/{len(cases)} {case.key}: {_told(entry)}", file=sys.stderr, flush=True
        )
        yield entry
        bench.arrays.release()
        try:
            bench.arrays.synchronize()
        except Exception as error:
            print(f"the GPU is lost, the other cases are left out: {error}", file=sys.stderr)
            return
