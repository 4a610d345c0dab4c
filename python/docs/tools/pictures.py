"""The pictures of the guide, as SVG for light and dark pages.

    python python/docs/tools/pictures.py     writes them to python/docs/guide/pictures

What they show is computed, with the tiles and the order of chunks that the text names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import svg

FOLDER = Path(__file__).parents[1] / "guide" / "pictures"
FULL, MASKED, SKIPPED = range(3)
COLOURS = {
    "light": ("#0072b2", "#9fc9e3", "#f1f3f5"),
    "dark": ("#4a9fd4", "#2a5674", "#262c33"),
}
RANKS = {
    "light": ("#0072b2", "#a0660a", "#009e73", "#d62728"),
    "dark": ("#6cc0f5", "#f0b84e", "#4fd8ae", "#ff6b6b"),
}
TILES = 8  # of rows, and of keys
TILE = 16
RANK_COUNT = 4


def kinds_of_tiles(window: int | None) -> list[list[int]]:
    """Of each tile of a causal square of scores, whether all, some or none of it is seen. `window`:
    how many keys before its own a row sees; None: all."""

    def sees(row: int, key: int) -> bool:
        return key <= row and (window is None or key >= row - window)

    kinds = []
    for m in range(TILES):
        kinds.append([])
        for n in range(TILES):
            seen = {
                sees(row, key)
                for row in range(m * TILE, (m + 1) * TILE)
                for key in range(n * TILE, (n + 1) * TILE)
            }
            kinds[-1].append(MASKED if len(seen) == 2 else FULL if seen == {True} else SKIPPED)
    return kinds


def owners(layout: str) -> list[int]:
    """The rank of each of the sequence's chunks, of which there are two for each rank."""
    if layout == "contiguous":
        return [chunk // 2 for chunk in range(2 * RANK_COUNT)]
    return [min(chunk, 2 * RANK_COUNT - 1 - chunk) for chunk in range(2 * RANK_COUNT)]


def _squares(axes: Any, title: str, colours: list[list[str]], edge: str) -> None:
    from matplotlib.patches import Rectangle

    for m, row in enumerate(colours):
        for n, colour in enumerate(row):
            axes.add_patch(Rectangle((n, m), 1, 1, facecolor=colour, edgecolor=edge, linewidth=0.8))
    axes.set(xlim=(0, len(colours)), ylim=(len(colours), 0), xticks=[], yticks=[], aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    axes.spines[:].set_visible(False)


def _legend(figure: Any, labels: dict[str, str], edge: str) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor=edge, label=name) for name, colour in labels.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 0.97))


def tiles(figure: Any, theme: str) -> None:
    for axes, (title, window) in zip(
        figure.subplots(1, 2),
        {"causal": None, "causal, sliding window": 2 * TILE}.items(),
        strict=True,
    ):
        kinds = kinds_of_tiles(window)
        colours = [[COLOURS[theme][kind] for kind in row] for row in kinds]
        _squares(axes, title, colours, svg.GRID[theme])
    names = ("no mask is evaluated", "mask evaluated", "neither loaded nor multiplied")
    _legend(figure, dict(zip(names, COLOURS[theme], strict=True)), svg.GRID[theme])


def layouts(figure: Any, theme: str) -> None:
    for axes, layout in zip(figure.subplots(1, 2), ("contiguous", "zigzag"), strict=True):
        ranks = owners(layout)
        hidden = COLOURS[theme][SKIPPED]
        colours = [
            [RANKS[theme][ranks[m]] if n <= m else hidden for n in range(len(ranks))]
            for m in range(len(ranks))
        ]
        work = [
            sum(m + 0.5 for m, rank in enumerate(ranks) if rank == r) for r in range(RANK_COUNT)
        ]
        shares = ", ".join(f"{x / sum(work):.0%}" for x in work)
        _squares(axes, f"{layout}: {shares} of the work", colours, svg.GRID[theme])
    names = [f"rank {rank}" for rank in range(RANK_COUNT)]
    _legend(figure, dict(zip(names, RANKS[theme], strict=True)), svg.GRID[theme])


PICTURES: dict[str, Callable[[Any, str], None]] = {"tiles": tiles, "layouts": layouts}


def drawings() -> dict[str, str]:
    """File names and their SVG."""
    drawn: dict[str, str] = {}
    for name, draw in PICTURES.items():
        drawn |= svg.themes(name, (7.2, 3.9), draw)
    return drawn


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, drawn in drawings().items():
        (FOLDER / file_name).write_text(drawn)
