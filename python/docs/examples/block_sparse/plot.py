"""The plot: time and memory by length, as SVG for light and dark pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import svg

# Told apart by their lightness, too; in the legend's order.
LINES = {
    "standard": ("standard attention", "s", {"light": "#6a6a6a", "dark": "#b0b0b0"}),
    "dense": ("anyflash, dense", "o", {"light": "#d62728", "dark": "#ff6b6b"}),
    "butterfly": ("anyflash, butterfly", "^", {"light": "#a0660a", "dark": "#f0b84e"}),
    "local + global": ("anyflash, local + global", "D", {"light": "#0072b2", "dark": "#6cc0f5"}),
}
PANELS = {
    "time, forward and backward": ("ms", "both_s", 1e3),
    "memory": ("MiB", "memory_bytes", 2**-20),
}


def drawings(cells: list[dict[str, Any]]) -> dict[str, str]:
    """File names and their SVG."""
    return svg.themes("block_sparse", (7.6, 3.6), partial(_draw, cells))


def _draw(cells: list[dict[str, Any]], figure: Any, theme: str) -> None:
    grid = figure.subplots(1, 2)
    for axes, title in zip(grid, PANELS, strict=True):
        _panel(axes, cells, title, theme)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))


def _panel(axes: Any, cells: list[dict[str, Any]], title: str, theme: str) -> None:
    unit, field, factor = PANELS[title]
    for kind, (label, marker, colours) in LINES.items():
        points = [
            (cell["length"], factor * cell[field])
            for cell in cells
            if cell["kind"] == kind and cell[field] is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker=marker, markersize=4, color=colours[theme],
                linewidth=1.6, label=label,
            )  # fmt: skip
    lengths = sorted({cell["length"] for cell in cells})
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("sequence length")
    axes.set_ylabel(unit)
    axes.grid(color=svg.GRID[theme], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
