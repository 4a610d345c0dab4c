"""Drawings as SVG for light and dark pages, whose bytes follow from matplotlib's version alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib

INK = {"light": "#1f2328", "dark": "#e6edf3"}
GRID = {"light": "#d0d7de", "dark": "#444c56"}


def drawing(size: tuple[float, float], draw: Callable[[Any, str], None], theme: str) -> str:
    """What `draw(figure, theme)` draws on a figure of so many inches."""
    settings = {
        "svg.hashsalt": "anyflash",  # else the identifiers are random
        "svg.fonttype": "none",  # text stays text: smaller, and searchable
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK[theme],
        "axes.labelcolor": INK[theme],
        "axes.edgecolor": GRID[theme],
        "xtick.color": INK[theme],
        "ytick.color": INK[theme],
    }
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size)
        draw(figure, theme)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def themes(
    name: str, size: tuple[float, float], draw: Callable[[Any, str], None]
) -> dict[str, str]:
    """File names and the SVG of a drawing in both themes."""
    return {
        f"{name}.svg": drawing(size, draw, "light"),
        f"{name}-dark.svg": drawing(size, draw, "dark"),
    }
