"""Plots of a run, by matplotlib: speed or memory against the length of the sequences."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from anyflash.bench._presets import PRESETS
from anyflash.bench._report import OWN, SCALES, names_of, roofline, value

FIXED_COLOURS = {OWN: "#d62728"}
COLOURS = (
    "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22",
)  # fmt: skip
ROOFLINES = {"gemm": ("matrix product", "--"), "mma": ("mma.sync alone", ":")}
GREY = "#666666"

Entry = dict[str, Any]


def plot(document: dict[str, Any], path: Path) -> list[Path]:
    """Write a figure for each operation (and dtype): PATH, or PATH-OPERATION where there are
    several. The suffix says the format. Returns what was written; ValueError where there is
    nothing to plot."""
    preset = PRESETS[document["preset"]]
    if not preset.x:
        raise ValueError(f"the preset {document['preset']} has no lengths to plot against")
    figures: dict[tuple[str, ...], list[Entry]] = {}
    for entry in document["cells"]:
        labels = entry["labels"]
        if preset.x in labels:
            kind = tuple(labels.get(name, "") for name in (*preset.figure, "dtype"))
            figures.setdefault(kind, []).append(entry)
    if not figures:
        raise ValueError("nothing has been measured")
    varying = [len(set(part)) > 1 for part in zip(*figures, strict=True)]
    written = []
    for kind, entries in figures.items():
        words = [word for word, varies in zip(kind, varying, strict=True) if varies]
        name = "-".join([path.stem, *words]).replace(" ", "-").replace("/", "-")
        target = path.with_name(name + path.suffix)
        _figure(document, entries, ", ".join(kind), target)
        written.append(target)
    return written


def _axis(entries: list[Entry], name: str) -> list[str]:
    return list(dict.fromkeys(entry["labels"].get(name, "") for entry in entries))


def _figure(document: dict[str, Any], entries: list[Entry], title: str, target: Path) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    preset = PRESETS[document["preset"]]
    rows, columns = _axis(entries, preset.row), _axis(entries, preset.column)
    if preset.column == "heads":  # shapes are told apart by their head dim, too
        columns = list(dict.fromkeys(f"{e['labels']['heads']}, d {e['d']}" for e in entries))
    names = names_of(document["cells"])
    palette = dict(zip((n for n in names if n not in FIXED_COLOURS), COLOURS * 3, strict=False))
    size = (4.2 * len(columns) + 1.2, 3.1 * len(rows) + 0.8)
    figure, grid = pyplot.subplots(
        len(rows), len(columns), figsize=size, squeeze=False, sharex=True, sharey="row"
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            here = [e for e in entries if e["labels"].get(preset.row, "") == row
                    and column in {e["labels"].get(preset.column, ""),
                                   f"{e['labels']['heads']}, d {e['d']}"}]  # fmt: skip
            axes = grid[i][j]
            _panel(axes, document, here, names, palette | FIXED_COLOURS)
            named = {"heads": column, "d": f"head dim {column}"}
            words = [named.get(preset.column, f"{preset.column} {column}")]
            words += [row if preset.row == "mask" else f"{preset.row} {row}"] if row else []
            axes.set_title(", ".join(words), fontsize=10)
            if i == len(rows) - 1:
                axes.set_xlabel(preset.x)
        grid[i][0].set_ylabel(entries[0]["unit"])
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= {text: h for h, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="lower center", ncol=9, fontsize=9, frameon=False
    )
    about = document["about"]
    figure.suptitle(f"{title}: {about.get('gpu', about.get('cpu', ''))}", fontsize=11)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def _panel(
    axes: Any, document: dict[str, Any], entries: list[Entry], names: list[str], colours: Any
) -> None:
    preset = PRESETS[document["preset"]]
    for name in names:
        points = [entry for entry in entries if value(entry, name) is not None]
        points.sort(key=lambda entry: int(entry["labels"][preset.x]))
        if not points:
            continue
        xs = [int(entry["labels"][preset.x]) for entry in points]
        ys = [value(entry, name) for entry in points]
        style = {"color": colours[name], "label": name, "zorder": 3 if name == OWN else 2}
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2 if name == OWN else 1.3, **style)
        quartiles = [(value(entry, name, "q1"), value(entry, name, "q3")) for entry in points]
        if all(low is not None and high is not None for low, high in quartiles):
            lows, highs = zip(*quartiles, strict=True)
            axes.fill_between(xs, lows, highs, color=colours[name], alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    labels = [entry["labels"] for entry in document["cells"]]
    ticks = sorted({int(label[preset.x]) for label in labels if preset.x in label})
    axes.set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
    axes.grid(alpha=0.3)
    unit = entries[0]["unit"] if entries else ""
    if unit in SCALES:
        for name, (text, dashes) in ROOFLINES.items():
            most = roofline(document, name, entries[0]["dtype"])
            if most:
                label = {"color": GREY, "linestyle": dashes, "linewidth": 1, "label": text}
                axes.axhline(most / SCALES[unit], **label)
        axes.set_ylim(bottom=0)
    elif unit:
        axes.set_yscale("log")
