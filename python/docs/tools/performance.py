"""Writes the measured figures into the pages: the tables, and the plots of the speed.

    python python/docs/tools/performance.py     (`make performance`)

The figures are those of performance/data: what `python -m anyflash bench ... --json FILE` wrote. A
page has them between two comments:

    <!-- bench FILE.json table rows=LABELS columns=LABELS [LABEL=VALUE ...] -->
    <!-- end of bench -->

LABELS are some of a case's labels, with commas; `by` is the library. Cases can be chosen by their
labels. `facts` in place of `table` says how, where and when the file was measured. Figures within
sentences have comments of their own: prose_figures.py.

`training` and `losses` in place of `table` are of what the example that trains a GPT wrote:
benchmark.py and compare_losses.py. They have no options.
"""

from __future__ import annotations

import json
import os.path
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prose_figures
import speed_plot
import training_tables

from anyflash.bench import _report

DOCS = Path(__file__).resolve().parents[1]
DATA = DOCS / "performance" / "data"
PAGES = (DOCS.parents[1] / "README.md", *sorted((DOCS / "performance").glob("*.md")))

NAMES = {
    "flash": "PyTorch's flash",
    "cudnn": "cuDNN",
    "efficient": "PyTorch's memory-efficient",
    "math": "PyTorch's math",
    "plain": "plain",
    "fa2": "flash-attn 2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "one device": "one GPU, by ranks",
    "torch-cp": "PyTorch's, flash",
    "torch-cp-cudnn": "PyTorch's, cuDNN",
}
# Of the host's calls: ways to call, not libraries.
WAYS = {
    "anyflash": "`anyflash.attention`",
    "adapter": "its module",
    "sdpa": "drop-in",
    "flash_attn": "flash-attn's drop-in",
    "framework": "original",
    "kvcache": "with a KV cache",
}
FRAMEWORKS = {
    "numpy": "NumPy",
    "torch": "PyTorch, CPU",
    "torch recorded": "PyTorch, CPU, recorded for autograd",
    "torch with backward": "PyTorch, CPU, with the backward",
    "torch GPU": "PyTorch, GPU",
    "torch GPU flash": "PyTorch, GPU, flash attention",
    "torch GPU registry": "PyTorch, GPU, flash attention by its registry",
    "cupy GPU": "CuPy, GPU",
    "jax jit": "JAX, CPU, `jit`",
    "jax jit GPU": "JAX, GPU, `jit`",
}
LENGTHS = {"seqlen", "context"}
HEADERS = {"d": "head dim", "framework": "arrays"}
FACTS = ("date", "commit", "gpu", "driver", "power_limit_watts", "cpu", "threads", "versions")

REGION = re.compile(
    r"(?P<begin><!-- bench (?P<file>\S+) (?P<kind>table|facts|training|losses)"
    r"(?P<options>[^>]*) -->\n)"
    r".*?(?P<end>^<!-- end of bench -->)",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Figure:
    """A library's result in a case."""

    labels: dict[str, str]
    text: str


@dataclass
class Grid:
    """A table that is filled figure by figure."""

    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    texts: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = field(default_factory=dict)

    def add(self, figure: Figure) -> None:
        row, column = (
            tuple(figure.labels.get(name, "") for name in names)
            for names in (self.rows, self.columns)
        )
        if (row, column) in self.texts:
            raise ValueError(f"two figures for {row}, {column}: give more labels")
        self.texts[row, column] = figure.text

    def lines(self) -> Iterator[str]:
        """Of Markdown. What a row has in common with the one before is not written again."""
        columns = list(dict.fromkeys(column for _, column in self.texts))
        if LENGTHS.issuperset(self.columns):
            columns.sort(key=lambda column: [int(length) for length in column])
        head = [self.unit if name == "by" else HEADERS.get(name, name) for name in self.rows]
        head += [self._header(column) for column in columns]
        yield line(head)
        yield line(["---"] * len(self.rows) + ["---:"] * len(columns))
        before: tuple[str, ...] = ()
        for row in dict.fromkeys(row for row, _ in self.texts):
            differ = (i for i, (a, b) in enumerate(zip(row, before, strict=False)) if a != b)
            same = next(differ, len(before))
            names = [
                "" if i < same else shown(name, value)
                for i, (name, value) in enumerate(zip(self.rows, row, strict=True))
            ]
            yield line([*names, *(self.texts.get((row, column), "") for column in columns)])
            before = row

    def _header(self, column: tuple[str, ...]) -> str:
        texts = [shown(name, value) for name, value in zip(self.columns, column, strict=True)]
        if len(texts) > 1:  # numbers alone would not say of what
            texts = [
                f"{name} {text}" if text.isdigit() else text
                for name, text in zip(self.columns, texts, strict=True)
            ]
        return ", ".join(text for text in texts if text)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(name: str, value: str) -> str:
    if name in LENGTHS and int(value) % 1024 == 0:
        return f"{int(value) // 1024}k"
    return FRAMEWORKS.get(value, value) if name == "framework" else value


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / name).read_text())
    return document


def figures(document: dict[str, Any], entry: dict[str, Any]) -> Iterator[Figure]:
    """A case's, the fastest one in bold where there are several; with the share of the memory's
    bandwidth where that was measured."""
    costs = {name: _report.cost(entry, name) for name in entry["results"]}
    known = {name: cost for name, cost in costs.items() if cost is not None}
    names = WAYS if entry["op"] == "call" else NAMES
    read = _report.roofline(document, "read")
    for name, cost in known.items():
        value = _report.value(entry, name)
        assert value is not None
        # What was transcribed has the digits that were printed.
        text = entry["results"][name].get("printed", _report.number(value))
        if len(known) > 1 and cost == min(known.values()):
            text = f"**{text}**"
        if read and entry["bytes"] and name == _report.OWN:
            text += f" ({100 * entry['bytes'] / cost / read:.0f}%)"
        yield Figure({**entry["labels"], "by": names.get(name, name)}, text)


def chosen(document: dict[str, Any], wanted: dict[str, str]) -> list[dict[str, Any]]:
    cases = [
        entry
        for entry in document["cells"]
        if all(entry["labels"].get(name) in values.split(",") for name, values in wanted.items())
    ]
    if not cases:
        raise ValueError(f"no case has the labels {wanted}")
    return cases


def ratios(entries: list[dict[str, Any]]) -> Iterator[str]:
    """How many times as fast anyflash is as each of the others, a line each."""
    for name in _report.names_of(entries):
        found = [ratio for entry in entries if (ratio := _report.ratio(entry, name))]
        if name != _report.OWN and found and entries[0]["op"] != "call":
            yield (
                f"- {_report.geometric_mean(found):.2f} times the speed of {NAMES[name]} in the "
                f"geometric mean of {len(found)}, {min(found):.2f} to {max(found):.2f}"
            )


def training(document: dict[str, Any]) -> Iterator[str]:
    """The speed of training by model, length and attention."""
    grid = Grid(["model", "by"], ["seqlen"], "TFLOP/s (MFU)")
    cells = document["cells"]
    for cell in cells:
        labels = {"model": f"GPT {cell['model'].upper()}", "seqlen": str(cell["seqlen"])}
        by = NAMES.get(cell["attention"], cell["attention"])
        grid.add(Figure({**labels, "by": by}, training_tables.text(cell, cells)))
    yield from grid.lines()
    compared = list(training_tables.ratios(cells, NAMES))
    if compared:
        yield from ("", "anyflash trains with", "", *compared)


def table(document: dict[str, Any], options: dict[str, str]) -> Iterator[str]:
    rows, columns = (options.pop(name).split(",") for name in ("rows", "columns"))
    entries = chosen(document, options)
    grid = Grid(rows, columns, entries[0]["unit"])
    for entry in entries:
        for figure in figures(document, entry):
            grid.add(figure)
    yield from grid.lines()
    compared = list(ratios(entries))
    if compared:
        yield from ("", "anyflash has", "", *compared)


def facts(document: dict[str, Any], link: str) -> Iterator[str]:
    about = document["about"]
    yield f"- `{about['command']}`"
    for name in FACTS:
        if name in about:
            fact = about[name]
            text = ", ".join(f"{n} {v}" for n, v in fact.items()) if name == "versions" else fact
            yield f"- {name.replace('_', ' ')}: {text}"
    yield from (f"- {name}: {text}" for name, text in about.items() if name.startswith("clocks"))
    for found in document.get("ceilings", ()):
        scale, unit = (1e9, "GB/s") if found["unit"] == "B/s" else (1e12, "TFLOP/s")
        yield f"- roofline {found['name']}: {_report.number(found['value'] / scale)} {unit}"
    source = f", transcribed from {about['transcribed']}" if "transcribed" in about else ""
    yield f"- data: [{Path(link).name}]({link}){source}"


def prose_figure(found: re.Match[str]) -> str:
    document = load(found["file"])
    options = dict(word.split("=", 1) for word in shlex.split(found["options"]))
    limits = {n: float(options.pop(n)) for n in ("larger", "smaller", "below") if n in options}
    text = prose_figures.text(
        document, chosen(document, options), found["statistic"], found["quantity"], limits
    )
    return found["begin"] + text + found["end"]


def filled(page: Path) -> str:
    """The page's text with the figures of the data."""

    def region(found: re.Match[str]) -> str:
        document = load(found["file"])
        options = dict(word.split("=", 1) for word in shlex.split(found["options"]))
        if found["kind"] == "table":
            lines = table(document, options)
        elif found["kind"] == "training":
            lines = training(document)
        elif found["kind"] == "losses":
            lines = training_tables.losses(document)
        else:
            path = os.path.relpath(DATA / found["file"], page.parent)
            lines = facts(document, Path(path).as_posix())
        return "\n".join([found["begin"], *lines, "", found["end"]])

    return prose_figures.FIGURE.sub(prose_figure, REGION.sub(region, page.read_text()))


def main() -> int:
    for page in PAGES:
        page.write_text(filled(page))
    for name, text in speed_plot.drawings(load).items():
        (DOCS / "performance" / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
