"""What the tables say of the training example's files, of benchmark.py and compare_losses.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyflash.bench import _report

Cell = dict[str, Any]


def text(cell: Cell, cells: Sequence[Cell]) -> str:
    """A cell's speed and its share of the GPU's peak, or why there is none. Of the cells of one
    model and length, the fastest is in bold."""
    if "failure" in cell:
        return str(cell["failure"])
    speeds = [other["tflops"] for other in _beside(cell, cells) if "tflops" in other]
    speed = _report.number(cell["tflops"])
    if len(speeds) > 1 and cell["tflops"] == max(speeds):
        speed = f"**{speed}**"
    return speed if cell["mfu"] is None else f"{speed} ({100 * cell['mfu']:.0f}%)"


def _beside(cell: Cell, cells: Sequence[Cell]) -> Iterator[Cell]:
    same = (cell["model"], cell["seqlen"])
    return (other for other in cells if (other["model"], other["seqlen"]) == same)


def ratios(cells: Sequence[Cell], names: Mapping[str, str]) -> Iterator[str]:
    """How many times as fast training with anyflash is as with each of the others, a line each."""
    measured = [cell for cell in cells if "tflops" in cell]
    for attention in dict.fromkeys(cell["attention"] for cell in measured):
        found = [
            own["tflops"] / cell["tflops"]
            for cell in measured
            for own in _beside(cell, measured)
            if cell["attention"] == attention and own["attention"] == _report.OWN
        ]
        if attention != _report.OWN and found:
            yield (
                f"- {_report.geometric_mean(found):.2f} times the speed of "
                f"{names.get(attention, attention)} in the geometric mean of {len(found)}, "
                f"{min(found):.2f} to {max(found):.2f}"
            )


def losses(document: dict[str, Any]) -> Iterator[str]:
    """A row for each step that was compared; then the largest differences."""
    compared = document["losses"]
    yield "| step | anyflash | PyTorch's flash | PyTorch's flash, another seed |"
    yield "| ---: | ---: | ---: | ---: |"
    columns = (compared[name] for name in ("steps", "anyflash", "flash", "other_seed"))
    for step, *values in zip(*columns, strict=True):
        yield f"| {step} | {' | '.join(f'{value:.4f}' for value in values)} |"
    yield ""
    verdict = "within" if document["within"] else "NOT within"
    yield (
        f"The largest difference is {document['difference']:.2g} between anyflash and flash, and "
        f"{document['gap']:.2g} between flash's two seeds: anyflash is {verdict} the seeds' gap."
    )
