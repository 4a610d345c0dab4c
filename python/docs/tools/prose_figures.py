"""Figures within sentences, computed from the benchmark's JSON. performance.py writes them.

    <!-- bench FILE.json STATISTIC QUANTITY [OPTION=VALUE ...] -->1.12<!-- end -->

QUANTITY is a number of each case:

    speed/PEERS   how many times as fast anyflash is as the fastest of PEERS (with commas)
    of/LIBRARY    the library's figure, in the case's unit
    MB            millions of bytes that the case reads and writes
    share         percent of the memory's bandwidth that anyflash reaches
    reading       microseconds that this bandwidth would take for the case's bytes
    bandwidth     GB/s: the file's, the same for each case

STATISTIC is what is said of these numbers: mean (the geometric one), median, lowest, highest,
count, or only, where all are the same. Options choose cases: by their labels, as in tables;
`larger` and `smaller` by their MB, `below` by their share. A library is named as in the JSON.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from anyflash.bench import _report

Entry = dict[str, Any]

FIGURE = re.compile(
    r"(?P<begin><!-- bench (?P<file>\S+) (?P<statistic>\w+) (?P<quantity>[\w/,]+)"
    r"(?P<options>[^>]*) -->)[^<\n]*(?P<end><!-- end -->)"
)
# A comment at the beginning of a line would end the paragraph.
MISPLACED = re.compile(r"^ *(?:[-*+] +)?<!-- bench [^>]*-->[^\n]*<!-- end -->", re.MULTILINE)

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _report.geometric_mean,
    "median": statistics.median,
    "lowest": min,
    "highest": max,
}


def quantity(document: dict[str, Any], entry: Entry, name: str) -> float | None:
    """None where a library has no figure in the case."""
    kind, _, libraries = name.partition("/")
    if kind == "speed":
        ratios = [_report.ratio(entry, peer) for peer in libraries.split(",")]
        return min((ratio for ratio in ratios if ratio), default=None)
    if kind == "of":
        return _report.value(entry, libraries)
    if kind == "MB":
        return float(entry["bytes"] / 1e6)
    read = _report.roofline(document, "read")
    cost = _report.cost(entry, _report.OWN)
    if read is None or cost is None:
        raise ValueError(f"{name} needs the bandwidth of reading, and anyflash's time")
    computed = {
        "bandwidth": read / 1e9,
        "reading": 1e6 * entry["bytes"] / read,
        "share": 100 * entry["bytes"] / cost / read,
    }
    return float(computed[kind])


def shown(name: str, value: float) -> str:
    kind = name.partition("/")[0]
    if kind == "speed":
        return f"{value:.2f}"
    return f"{value:.0f}" if kind in ("share", "bandwidth") else _report.number(value)


def within(document: dict[str, Any], entry: Entry, limits: dict[str, float]) -> bool:
    """`limits` are those of `larger`, `smaller` and `below`."""
    if "below" in limits:
        share = quantity(document, entry, "share")
        assert share is not None
        if share >= limits["below"]:
            return False
    return limits.get("larger", 0.0) <= entry["bytes"] / 1e6 <= limits.get("smaller", math.inf)


def text(
    document: dict[str, Any],
    entries: Sequence[Entry],
    statistic: str,
    name: str,
    limits: dict[str, float],
) -> str:
    """The figure as it is written."""
    numbers = [
        quantity(document, entry, name) for entry in entries if within(document, entry, limits)
    ]
    values = [number for number in numbers if number is not None]
    if not values:
        raise ValueError(f"no case has {name} within {limits}")
    if statistic == "count":
        return str(len(values))
    if statistic == "only":
        texts = {shown(name, value) for value in values}
        if len(texts) > 1:
            raise ValueError(f"several figures for {name}: {', '.join(sorted(texts))}")
        return texts.pop()
    return shown(name, STATISTICS[statistic](values))
