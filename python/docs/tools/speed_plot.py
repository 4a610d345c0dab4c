"""The plot of the speed: TFLOP/s by length, forward and backward, full and causal, as SVG."""

from __future__ import annotations

from functools import partial
from typing import Any

import svg

from anyflash.bench import _report

HEAD_DIM = "128"
PANELS = [(op, mask) for op in ("forward", "backward") for mask in ("full", "causal")]
# Told apart by their lightness, too; in the legend's order.
LINES = {
    "fa3": ("FlashAttention-3", "s", {"light": "#0072b2", "dark": "#6cc0f5"}),
    "fa4": ("FlashAttention-4", "^", {"light": "#009e73", "dark": "#4fd8ae"}),
    "cudnn": ("cuDNN", "D", {"light": "#a0660a", "dark": "#f0b84e"}),
    "anyflash": ("anyflash (mma.sync kernels)", "o", {"light": "#d62728", "dark": "#ff6b6b"}),
    "flash": ("PyTorch's flash (FlashAttention-2)", "v", {"light": "#6a6a6a", "dark": "#b0b0b0"}),
}


def drawings(document: dict[str, Any]) -> dict[str, str]:
    """File names and their SVG."""
    return svg.themes("speed", (7.6, 5.6), partial(_draw, document))


def _draw(document: dict[str, Any], figure: Any, theme: str) -> None:
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (op, mask) in zip(grid.flat, PANELS, strict=True):
        _panel(axes, document, op, mask, theme)
    grid[0][0].set_ylim(0, 1.06 * grid[0][0].dataLim.y1)
    for row in grid:
        row[0].set_ylabel("TFLOP/s")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))


def _panel(axes: Any, document: dict[str, Any], op: str, mask: str, theme: str) -> None:
    entries = [
        entry
        for entry in document["cells"]
        if (entry["op"], entry["labels"]["mask"], entry["labels"]["d"]) == (op, mask, HEAD_DIM)
    ]
    lengths = [entry["seqlen"] for entry in entries]
    for name, (label, marker, colours) in LINES.items():
        speeds = [_report.value(entry, name) for entry in entries]
        own = name == _report.OWN
        axes.plot(
            lengths, speeds, marker=marker, markersize=5 if own else 4, color=colours[theme],
            linewidth=2.4 if own else 1.4, label=label, zorder=3 if own else 2,
        )  # fmt: skip
    axes.set_title(f"{op}, {mask}", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_length(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(color=svg.GRID[theme], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)
