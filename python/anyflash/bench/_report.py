"""Tables of a run: on the terminal, and as Markdown."""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OWN = "anyflash"
SCALES = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
PER_SECOND = {"ms": 1e3, "us": 1e6}
MIB = 2**20
TABLE_LABELS = ("op", "dtype", "timing")
TITLES = {"call": "one call on the host, one query and one key", "both": "forward and backward"}

Entry = dict[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    words: int  # so many columns are text


def cost(entry: Entry, name: str) -> float | None:
    """Seconds, or bytes of memory; None where a contender has no figure."""
    result = entry["results"].get(name, {})
    value = result.get("seconds", result.get("bytes"))
    return None if value is None else float(value)


def value(entry: Entry, name: str, which: str = "seconds") -> float | None:
    """A contender's figure in the case's unit; `which` may be a quartile."""
    result, unit = entry["results"].get(name, {}), entry["unit"]
    if unit == "MiB":
        return result["bytes"] / MIB if "bytes" in result else None
    if which not in result:
        return None
    if unit in PER_SECOND:
        return float(result[which] * PER_SECOND[unit])
    return float(entry["flop"] / result[which] / SCALES[unit])


def number(x: float) -> str:
    """Three digits, or as many as there are before the point."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def figure(entry: Entry, name: str) -> str:
    """The value with its unit, or "" where there is none."""
    x = value(entry, name)
    return "" if x is None else f"{number(x)} {entry['unit']}"


def ratio(entry: Entry, name: str) -> float | None:
    """How many times as fast (or as sparing with memory) anyflash is as another contender."""
    ours, theirs = cost(entry, OWN), cost(entry, name)
    return theirs / ours if ours and theirs else None


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(x) for x in values))


def _spread(entry: Entry) -> str:
    """Half of the distance between the quartiles, by the median: the largest of the row."""
    halves = [
        (r["q3"] - r["q1"]) / 2 / r["seconds"] for r in entry["results"].values() if "q1" in r
    ]
    return f"{100 * max(halves):.1f}" if halves else ""


def roofline(document: dict[str, Any], name: str, dtype: str | None = None) -> float | None:
    for found in document["ceilings"]:
        if found["name"] == name and found.get("dtype") == dtype and "value" in found:
            return float(found["value"])
    return None


def _share(work: float, seconds: float | None, most: float | None) -> str:
    return f"{100 * work / seconds / most:.0f}" if seconds and most else ""


def names_of(entries: Iterable[Entry]) -> list[str]:
    """Contenders that have a figure somewhere, in the order in which they ran."""
    found: dict[str, None] = {}
    for entry in entries:
        found |= dict.fromkeys(name for name in entry["results"] if cost(entry, name) is not None)
    return list(found)


def _extra_columns(document: dict[str, Any], entries: list[Entry]) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    if any("model" in entry["labels"] for entry in entries):
        times = [cost(entry, OWN) for entry in entries]
        columns["ms"] = [number(1e3 * s) if s else "" for s in times]
    if any(entry.get("sent_bytes") for entry in entries):
        sent = [(entry["sent_bytes"], cost(entry, OWN)) for entry in entries]
        columns["GB/s sent"] = [number(b / s / 1e9) if b and s else "" for b, s in sent]
    for name in names_of(entries):
        peaks = [entry["results"].get(name, {}).get("peak_bytes") for entry in entries]
        if any(peaks):
            title = "peak MiB" if name == OWN else f"peak MiB, {name}"
            columns[title] = [number(b / MIB) if b else "" for b in peaks]
    if any(entry["bytes"] for entry in entries):
        seconds = [cost(entry, OWN) for entry in entries]
        pairs = list(zip(entries, seconds, strict=True))
        columns["GB/s"] = [number(e["bytes"] / s / 1e9) if s else "" for e, s in pairs]
        most = roofline(document, "read")
        if most:
            columns["% of read"] = [_share(e["bytes"], s, most) for e, s in pairs]
    for name in ("mma", "gemm"):
        mosts = [roofline(document, name, entry["dtype"]) for entry in entries]
        if any(mosts) and all(entry["unit"] in SCALES for entry in entries):
            columns[f"% of {name}"] = [
                _share(entry["flop"], cost(entry, OWN), most)
                for entry, most in zip(entries, mosts, strict=True)
            ]
    spreads = [_spread(entry) for entry in entries]
    return {**columns, "spread ±%": spreads} if any(spreads) else columns


def _notes(entries: list[Entry], names: list[str], others: list[str]) -> list[str]:
    notes = []
    for name in others:
        ratios = [r for r in (ratio(entry, name) for entry in entries) if r]
        if ratios:
            below = sum(r < 1 for r in ratios)
            notes.append(
                f"anyflash / {name}: {geometric_mean(ratios):.2f} in the geometric mean of "
                f"{len(ratios)} cases, {min(ratios):.2f} to {max(ratios):.2f}, {below} below 1"
            )
    notes += _refusals(entries, names)
    for name in others:
        repeated = sum("repeated_keys" in e["results"].get(name, {}) for e in entries)
        if repeated:
            notes.append(f"{name}: keys and values are repeated for it in {repeated} cases")
    clocks = [entry["gpu"] for entry in entries if "sm_mhz" in entry.get("gpu", {})]
    if clocks:
        mhz = [clock["sm_mhz"] for clock in clocks]
        watts = [clock["watts"] for clock in clocks if "watts" in clock]
        power = f", {min(watts):.0f} to {max(watts):.0f} W" if watts else ""
        slowed = sorted({reason for clock in clocks for reason in clock.get("slowed_by", ())})
        why = f"; slowed by: {', '.join(slowed)}" if slowed else ""
        notes.append(
            f"SM clock {statistics.median(mhz):.0f} MHz in the median, {min(mhz):.0f} to "
            f"{max(mhz):.0f}{power}{why}"
        )
    return notes


def _refusals(entries: list[Entry], names: list[str]) -> list[str]:
    """Why contenders have no figure: failures of all, and what those of the table do not have."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        for name, result in entry["results"].items():
            reason = result.get("error") or (name in names and result.get("unsupported"))
            if reason:
                reasons.setdefault(name, []).append(reason)
    return [
        f"{name}: none in {len(found)} cases: {found[0]}{_others(len(set(found)) - 1)}"
        for name, found in reasons.items()
    ]


def _others(count: int) -> str:
    return f" (and {count} other reasons, which the JSON has)" if count else ""


def tables(document: dict[str, Any]) -> list[Table]:
    """One for each operation, dtype and way of timing."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in document["cells"]:
        kind = tuple(entry["labels"].get(name, "") for name in TABLE_LABELS)
        groups.setdefault((*kind, entry["unit"]), []).append(entry)
    made = []
    for (op, dtype, timing, unit), entries in groups.items():
        labels = [name for name in entries[0]["labels"] if name not in TABLE_LABELS]
        labels += [n for n in dict.fromkeys(n for e in entries for n in e["labels"])
                   if n not in labels and n not in TABLE_LABELS]  # fmt: skip
        varying = [n for n in labels if len({e["labels"].get(n) for e in entries}) > 1]
        constant = [f"{n} {entries[0]['labels'][n]}" for n in labels if n not in varying]
        names = names_of(entries)
        others = [name for name in names if name != OWN and op != "call"]
        extra = _extra_columns(document, entries)
        rows = []
        for i, entry in enumerate(entries):
            row = [entry["labels"].get(name, "") for name in varying]
            row += [number(x) if (x := value(entry, name)) is not None else "-" for name in names]
            row += [f"{r:.2f}" if (r := ratio(entry, name)) else "-" for name in others]
            rows.append([*row, *(column[i] or "-" for column in extra.values())])
        title = ", ".join(
            [TITLES.get(op, op), dtype, *([timing] if timing else []), *constant, unit]
        )
        header = [*varying, *names, *(f"/ {name}" for name in others), *extra]
        made.append(Table(title, header, rows, _notes(entries, names, others), len(varying)))
    return made


def about_lines(document: dict[str, Any]) -> list[str]:
    """The facts of a run, one a line."""
    lines = []
    for name, fact in document["about"].items():
        text = ", ".join(f"{n} {v}" for n, v in fact.items()) if isinstance(fact, dict) else fact
        lines.append(f"{name}: {text}")
    for found in document["ceilings"]:
        kind = " ".join(x for x in (found["name"], found.get("dtype")) if x)
        if "error" in found:
            lines.append(f"roofline {kind}: none: {found['error']}")
        elif found["unit"] == "B/s":
            lines.append(f"roofline {kind}: {found['value'] / 1e9:.0f} GB/s")
        else:
            unit = "TFLOP/s" if found["value"] > 2e12 else "GFLOP/s"
            lines.append(f"roofline {kind}: {number(found['value'] / SCALES[unit])} {unit}")
    return lines


def markdown(document: dict[str, Any]) -> str:
    lines = [f"- {line}" for line in about_lines(document)]
    for table in tables(document):
        kinds = ["---"] * table.words + ["---:"] * (len(table.header) - table.words)
        lines += ["", f"**{table.title}**", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (table.header, kinds, *table.rows)]
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def aligned(table: Table) -> list[str]:
    """Lines of text."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.title]
    for row in (table.header, *table.rows):
        cells = [
            text.ljust(width) if i < table.words else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [*lines, *table.notes]


def plain(document: dict[str, Any]) -> str:
    lines = about_lines(document)
    for table in tables(document):
        lines += ["", *aligned(table)]
    return "\n".join(lines) + "\n"


def show(document: dict[str, Any]) -> None:
    """Print the tables: by rich on a terminal, where it is installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(plain(document), end="")
        return
    console: Any = importlib.import_module("rich.console").Console()
    rich_table: Any = importlib.import_module("rich.table").Table
    for line in about_lines(document):
        console.print(line, markup=False)
    for table in tables(document):
        shown = rich_table(title=table.title, title_justify="left")
        for i, name in enumerate(table.header):
            shown.add_column(name, justify="left" if i < table.words else "right")
        ratios = {i for i, name in enumerate(table.header) if name.startswith("/ ")}
        for row in table.rows:
            shown.add_row(*(_coloured(text) if i in ratios else text for i, text in enumerate(row)))
        console.print(shown)
        for note in table.notes:
            console.print(note, markup=False)


def _coloured(text: str) -> str:
    if text == "-":
        return text
    colour = "green" if float(text) >= 1 else "red"
    return f"[{colour}]{text}[/]"
