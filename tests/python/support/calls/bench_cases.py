"""A tiny case, and runs of the benchmark around it."""

from __future__ import annotations

from anyflash.bench import _measure
from anyflash.bench._array_libraries import ArrayLibrary
from anyflash.bench._cases import Case
from anyflash.bench._machine import Monitor
from anyflash.bench._timing import Budget, CpuTimer

TINY = Case("forward", 1, 32, 2, 16, "float32", unit="GFLOP/s")
SHORT = Budget(contender_seconds=0.0, round_seconds=1e-5, fewest=2, most=3)


def bench_of(arrays: ArrayLibrary, *peers: str) -> _measure.Bench:
    timers = {"events": CpuTimer(), "host": CpuTimer()}
    return _measure.Bench(arrays, peers, timers, SHORT, Monitor(arrays))


def document_of(entries, preset="cpu", **about):
    rooflines = [{"name": "gemm", "dtype": "float32", "unit": "FLOP/s", "value": 2e11}]
    return {"format": 1, "preset": preset, "about": about, "ceilings": rooflines, "cells": entries}


def entry_of(case, **seconds):
    """A measured case, with quartiles one percent away."""
    results = {
        name: {"seconds": s, "q1": 0.99 * s, "q3": 1.01 * s, "samples": [s]}
        for name, s in seconds.items()
    }
    facts = {name: getattr(case, name) for name in ("d", "dtype", "unit", "flop", "bytes")}
    return {"key": case.key, "labels": case.labels, "results": results, **facts}
