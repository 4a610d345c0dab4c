"""The plots of the speed by length, forward and backward, full and causal, as SVG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import svg

from anyflash.bench import _report

Document = dict[str, Any]
Load = Callable[[str], Document]  # of a file's name


@dataclass(frozen=True)
class Line:
    """A library, told apart by its lightness, too."""

    library: str
    name: str
    marker: str
    colours: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)  # of its cases


@dataclass(frozen=True)
class Panel:
    title: str
    file: str
    op: str
    mask: str


@dataclass(frozen=True)
class Plot:
    name: str
    panels: tuple[Panel, ...]
    lines: tuple[Line, ...]  # in the legend's order
    unit: str = "TFLOP/s"
    head_dim: str = "128"


BLUE = {"light": "#0072b2", "dark": "#6cc0f5"}
GREEN = {"light": "#009e73", "dark": "#4fd8ae"}
BROWN = {"light": "#a0660a", "dark": "#f0b84e"}
RED = {"light": "#d62728", "dark": "#ff6b6b"}
GREY = {"light": "#6a6a6a", "dark": "#b0b0b0"}
FA3 = Line("fa3", "FlashAttention-3", "s", BLUE)
FA4 = Line("fa4", "FlashAttention-4", "^", GREEN)
CUDNN = Line("cudnn", "cuDNN", "D", BROWN)
FLASH = Line("flash", "PyTorch's flash (FlashAttention-2)", "v", GREY)
OWN = partial(Line, _report.OWN, marker="o", colours=RED)


def _panels(files: dict[str, str], where: dict[str, str] | None = None) -> tuple[Panel, ...]:
    """Each operation's file; `where` it was measured, if that differs."""
    return tuple(
        Panel(f"{op}, {mask}{', ' + where[op] if where else ''}", file, op, mask)
        for op, file in files.items()
        for mask in ("full", "causal")
    )


PLOTS = (
    Plot(
        "speed",
        _panels(dict.fromkeys(("forward", "backward"), "h200-paper-peers.json")),
        (FA3, FA4, CUDNN, OWN("anyflash (mma.sync kernels)"), FLASH),
    ),
    Plot(
        "speed-hopper",
        _panels(
            {"forward": "h200-hopper-forward.json", "backward": "h200-hopper-backward.json"},
        ),
        (FA3, CUDNN, OWN("anyflash (kernels for Hopper)"), FLASH),
    ),
    Plot(
        "speed-cpu",
        _panels(dict.fromkeys(("forward", "backward"), "cpu.json")),
        (
            OWN("anyflash, bfloat16", labels={"dtype": "bfloat16"}),
            Line("flash", "PyTorch's flash, bfloat16", "v", GREY, {"dtype": "bfloat16"}),
            OWN("anyflash, float32", marker="s", colours=BROWN, labels={"dtype": "float32"}),
            Line("flash", "PyTorch's flash, float32", "D", BLUE, {"dtype": "float32"}),
        ),
        unit="GFLOP/s",
    ),
)


def drawings(load: Load) -> dict[str, str]:
    """File names and their SVG."""
    drawn: dict[str, str] = {}
    for plot in PLOTS:
        documents = {panel.file: load(panel.file) for panel in plot.panels}
        drawn |= svg.themes(plot.name, (7.6, 5.6), partial(_draw, plot, documents))
    return drawn


def _draw(plot: Plot, documents: dict[str, Document], figure: Any, theme: str) -> None:
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, panel in zip(grid.flat, plot.panels, strict=True):
        wanted = {"mask": panel.mask, "d": plot.head_dim}
        for line in plot.lines:
            entries = _chosen(documents[panel.file], panel.op, wanted | line.labels)
            _draw_line(axes, line, entries, theme)
        lengths = [entry["seqlen"] for entry in entries]
        axes.set_title(panel.title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_length(n) for n in lengths])
        axes.minorticks_off()
        axes.grid(color=svg.GRID[theme], linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylim(0, 1.06 * max(axes.dataLim.y1 for axes in grid.flat))
    for row in grid:
        row[0].set_ylabel(plot.unit)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles, names = grid[0][0].get_legend_handles_labels()
    columns = 3 if len(names) > 4 else 2
    figure.legend(handles, names, loc="lower center", ncol=columns, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))


def _chosen(document: Document, op: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    return [
        entry
        for entry in document["cells"]
        if entry["op"] == op and labels.items() <= entry["labels"].items()
    ]


def _draw_line(axes: Any, line: Line, entries: list[dict[str, Any]], theme: str) -> None:
    own = line.library == _report.OWN
    axes.plot(
        [entry["seqlen"] for entry in entries],
        [_report.value(entry, line.library) for entry in entries],
        marker=line.marker, markersize=5 if own else 4, color=line.colours[theme],
        linewidth=2.4 if own else 1.4, label=line.name, zorder=3 if own else 2,
    )  # fmt: skip


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)
