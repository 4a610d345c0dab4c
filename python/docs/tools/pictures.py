"""The pictures of the guide, as SVG for light and dark pages.

    python python/docs/tools/pictures.py     writes them to python/docs/guide/pictures

What they show is computed, with the tiles and the order of chunks that the text names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
ON_COLOUR = {"light": "#ffffff", "dark": "#0d1117"}  # text on these
TILES = 8  # of rows, and of keys
TILE = 16
RANK_COUNT = 4
SCORES = ((0.3, 1.1, -0.4, 0.8), (0.9, -0.6, 0.2, 0.5), (1.6, 2.3, 0.7, 1.2), (1.9, 0.1, 2.6, 1.4))
MULTIPROCESSORS = 8
SEQUENCES = 2  # of one query each
KEY_TILES = 16  # of a sequence


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


def hop_of(reader: int, owner: int) -> int:
    """In which a rank has another's keys: those of the rank so many before it."""
    return (reader - owner) % RANK_COUNT


class Step(NamedTuple):
    """What a row's softmax knows after a tile of keys."""

    largest: float
    before: float  # the sum so far, as it was before the tile
    correction: float  # what that is multiplied by
    total: float


def online_softmax(tiles: tuple[tuple[float, ...], ...]) -> list[Step]:
    steps = []
    largest, total = -math.inf, 0.0
    for scores in tiles:
        new = max(largest, *scores)
        correction, before = math.exp(largest - new), total
        total = total * correction + sum(math.exp(score - new) for score in scores)
        largest = new
        steps.append(Step(largest, before, correction, total))
    return steps


class Work(NamedTuple):
    """A tile of keys, and who attends to it when."""

    multiprocessor: int
    start: int
    sequence: int
    tile: int


def schedule(parts: int) -> list[Work]:
    """Each part of a sequence's keys has a multiprocessor of its own."""
    length = KEY_TILES // parts
    return [
        Work(sequence * parts + tile // length, tile % length, sequence, tile)
        for sequence in range(SEQUENCES)
        for tile in range(KEY_TILES)
    ]


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


def _legend(figure: Any, labels: dict[str, str], edge: str, bottom: float = 0.09) -> None:
    """Below the axes, which end at `bottom`, as a part of the figure's height."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor=edge, label=name) for name, colour in labels.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(labels), frameon=False)
    figure.tight_layout(rect=(0, bottom, 1, 0.97))


def tiles(figure: Any, theme: str) -> None:
    for axes, (title, window) in zip(
        figure.subplots(1, 2),
        {"causal": None, "causal, sliding window": 2 * TILE}.items(),
        strict=True,
    ):
        kinds = kinds_of_tiles(window)
        colours = [[COLOURS[theme][kind] for kind in row] for row in kinds]
        _squares(axes, title, colours, svg.GRID[theme])
    names = ("seen as a whole", "seen in part", "skipped")
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
        _squares(axes, f"{layout}\n{shares} of the work", colours, svg.GRID[theme])
    names = [f"rank {rank}" for rank in range(RANK_COUNT)]
    _legend(figure, dict(zip(names, RANKS[theme], strict=True)), svg.GRID[theme])


def softmax(figure: Any, theme: str) -> None:
    new, seen, _ = COLOURS[theme]
    accent = RANKS[theme][1]
    steps = online_softmax(SCORES)
    width = len(SCORES[0])
    scores, sums = figure.subplots(2, 1, sharex=True)

    scores.bar(range(width * len(steps)), [x for tile in SCORES for x in tile], color=new)
    for number, step in enumerate(steps):
        ends = (number * width - 0.5, (number + 1) * width - 0.5)
        scores.plot(ends, (step.largest,) * 2, color=accent, linewidth=2)
        middle = sum(ends) / 2
        scaled = step.before * step.correction
        if step.before:
            sums.bar(
                middle, step.before, 2, fill=False, edgecolor=svg.INK[theme], linestyle=":",
                zorder=3,
            )  # fmt: skip
            sums.annotate(
                f"\u00d7 {step.correction:.2f}", (middle + 1.05, scaled), va="top", ha="left"
            )
        sums.bar(middle, scaled, 2, color=seen)
        sums.bar(middle, step.total - scaled, 2, bottom=scaled, color=new)
    for axes in (scores, sums):
        for number in range(1, len(steps)):
            axes.axvline(number * width - 0.5, color=svg.GRID[theme], linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    scores.axhline(0, color=svg.GRID[theme], linewidth=0.8)
    scores.set(ylabel="score", xlim=(-0.5, width * len(steps) - 0.5))
    scores.set_title("a row's scores, and the largest so far", fontsize=10)
    sums.set(ylabel="sum", xticks=[(number + 0.5) * width - 0.5 for number in range(len(steps))])
    sums.set_xticklabels([f"tile {number}" for number in range(len(steps))])
    sums.set_title("the sum so far, relative to that score", fontsize=10)
    names = {"largest so far": accent, "sum of earlier tiles": seen, "of this tile": new}
    _legend(figure, names, svg.GRID[theme])


def splits(figure: Any, theme: str) -> None:
    from matplotlib.patches import Rectangle

    colours = RANKS[theme][:SEQUENCES]
    for axes, parts in zip(figure.subplots(2, 1, sharex=True), (1, 4), strict=True):
        work = schedule(parts)
        for one in work:
            where = (one.start, one.multiprocessor)
            axes.add_patch(
                Rectangle(where, 1, 1, facecolor=colours[one.sequence], edgecolor=svg.GRID[theme])
            )
            axes.text(
                one.start + 0.5, one.multiprocessor + 0.52, str(one.tile), fontsize=7,
                ha="center", va="center", color=ON_COLOUR[theme],
            )  # fmt: skip
        busy = len({one.multiprocessor for one in work})
        last = 1 + max(one.start for one in work)
        title = f"{parts} part{'s' * (parts > 1)}: {busy} of {MULTIPROCESSORS} multiprocessors work"
        if parts > 1:
            for sequence in range(SEQUENCES):
                axes.text(last + 0.3, (sequence + 0.5) * parts + 0.02, "joined", va="center")
                axes.plot(
                    (last + 0.15,) * 2, (sequence * parts + 0.1, (sequence + 1) * parts - 0.1),
                    color=svg.INK[theme], linewidth=1,
                )  # fmt: skip
        axes.set(xlim=(0, KEY_TILES), ylim=(MULTIPROCESSORS, 0))
        axes.set(yticks=[i + 0.5 for i in range(MULTIPROCESSORS)], ylabel="multiprocessor")
        axes.set_yticklabels([str(i) for i in range(MULTIPROCESSORS)])
        axes.set_xticks(range(0, KEY_TILES + 1, 4))
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time, in tiles of keys")
    names = {f"tiles of sequence {i}": colour for i, colour in enumerate(colours)}
    _legend(figure, names, svg.GRID[theme], 0.07)


def ring(figure: Any, theme: str) -> None:
    ranks = owners("zigzag")
    for hop, axes in enumerate(figure.subplots(2, 2).flat):
        colours = []
        for m, reader in enumerate(ranks):
            colours.append([])
            for n, owner in enumerate(ranks):
                arrived = hop_of(reader, owner)
                colour = RANKS[theme][reader] if arrived == hop else COLOURS[theme][1]
                colours[-1].append(colour if n <= m and arrived <= hop else COLOURS[theme][2])
        _squares(axes, "its own keys" if hop == 0 else f"hop {hop}", colours, svg.GRID[theme])
    names = {f"rank {rank}": RANKS[theme][rank] for rank in range(RANK_COUNT)}
    names["earlier"] = COLOURS[theme][1]
    _legend(figure, names, svg.GRID[theme], 0.06)
    figure.subplots_adjust(hspace=0.32)


Draw = Callable[[Any, str], None]
PICTURES: dict[str, tuple[tuple[float, float], Draw]] = {  # with inches
    "tiles": ((5.6, 3.2), tiles),
    "layouts": ((5.6, 3.5), layouts),
    "softmax": ((5.6, 4.6), softmax),
    "splits": ((5.6, 5.0), splits),
    "ring": ((5.2, 5.6), ring),
}


def drawings() -> dict[str, str]:
    """File names and their SVG."""
    drawn: dict[str, str] = {}
    for name, (size, draw) in PICTURES.items():
        drawn |= svg.themes(name, size, draw)
    return drawn


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, drawn in drawings().items():
        (FOLDER / file_name).write_text(drawn)
