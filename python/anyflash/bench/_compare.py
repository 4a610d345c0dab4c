"""What changed since an earlier run."""

from __future__ import annotations

from typing import Any

from anyflash.bench._machine import MACHINE_FACTS
from anyflash.bench._report import OWN, cost, geometric_mean, names_of, number, value

Document = dict[str, Any]


def differences(old: Document, new: Document) -> list[str]:
    """Facts that differ and bear on times: the machine, the versions, the command."""
    lines = []
    before, now = old["about"], new["about"]
    for name in MACHINE_FACTS:
        if before.get(name) != now.get(name):
            lines.append(f"not the same {name}: {before.get(name)}, now {now.get(name)}")
    versions = before.get("versions", {}), now.get("versions", {})
    for name in sorted({*versions[0], *versions[1]}):
        if versions[0].get(name) != versions[1].get(name):
            lines.append(f"{name}: {versions[0].get(name)}, now {versions[1].get(name)}")
    for name in ("commit", "command"):
        if before.get(name) != now.get(name):
            lines.append(f"{name}: {before.get(name)}, now {now.get(name)}")
    return lines


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Of two results: quartiles that overlap are no change."""
    if "q1" not in old or "q1" not in new:
        return ""
    if new["q3"] < old["q1"]:
        return "faster"
    return "slower" if new["q1"] > old["q3"] else "same"


def compare(old: Document, new: Document) -> str:
    """A line for each case that both runs have, and the geometric mean of each contender's ratios
    (earlier time by present time: above 1 is faster now)."""
    lines = differences(old, new) or ["the same machine, versions, commit and command"]
    before = {entry["key"]: entry for entry in old["cells"]}
    pairs = [(before[e["key"]], e) for e in new["cells"] if e["key"] in before]
    ratios: dict[str, list[float]] = {}
    rows = []
    for earlier, now in pairs:
        for name in names_of([now]):
            was, took = cost(earlier, name), cost(now, name)
            if not was or not took:
                continue
            ratios.setdefault(name, []).append(was / took)
            if name == OWN:
                word = verdict(earlier["results"][name], now["results"][name])
                figures = [number(value(entry, name) or 0.0) for entry in (earlier, now)]
                change = f"{figures[0]} -> {figures[1]} {now['unit']}"
                rows.append((now["key"], change, f"{was / took:.3f}", word))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for name, values in ratios.items():
        lines.append(
            f"{name}: {geometric_mean(values):.3f} of the earlier speed in the geometric mean of "
            f"{len(values)} cases, {min(values):.3f} to {max(values):.3f}"
        )
    missing = len(old["cells"]) - len(pairs), len(new["cells"]) - len(pairs)
    lines.append(f"cases only in the earlier run: {missing[0]}; only in this one: {missing[1]}")
    return "\n".join(lines) + "\n"
