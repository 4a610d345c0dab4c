"""What the commands print: plain text, or by rich on a terminal, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """A title, and rows of cells below it."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    good: Sequence[bool] = ()  # of each row: whether its last cell is good news


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def plain(sections: Sequence[Section]) -> str:
    """The text, without colours."""
    blocks = []
    for section in sections:
        rows = [section.header, *section.rows] if section.header else section.rows
        blocks.append("\n".join([section.title, *(f"  {line}" for line in _table(rows))]))
    return "\n\n".join(blocks)


def console() -> Any:
    """rich's, where colours can be shown and are wanted; else None."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return None
    if importlib.util.find_spec("rich") is None:
        return None
    return importlib.import_module("rich.console").Console(highlight=False)


def show(sections: Sequence[Section]) -> None:
    """Print them."""
    rich = console()
    if rich is None:
        print(plain(sections))
        return
    text: Any = importlib.import_module("rich.text").Text
    for i, section in enumerate(sections):
        rich.print(*[""] * (i > 0), text(section.title, style="bold"), sep="\n")
        if section.rows:
            rich.print(_rich_table(section, text))


def _rich_table(section: Section, text: Any) -> Any:
    table: Any = importlib.import_module("rich.table").Table
    shown = table(
        box=None, show_header=bool(section.header), header_style="dim", padding=(0, 0, 0, 2)
    )
    columns = len(section.rows[0])
    for i in range(columns):
        name = section.header[i] if section.header else ""
        shown.add_column(name, style="cyan" if i == 0 < columns - 1 else "", overflow="fold")
    for i, row in enumerate(section.rows):
        cells = [text(cell) for cell in row]
        if section.good:
            cells[-1].stylize("green" if section.good[i] else "bold red")
        shown.add_row(*cells)
    return shown


def show_help(help_text: str) -> None:
    """Print what argparse has formatted."""
    rich = console()
    if rich is None:
        print(help_text, end="")
        return
    shown = importlib.import_module("rich.text").Text(help_text)
    shown.highlight_regex(r"(?m)^usage:|^\S.*:$", "bold")
    shown.highlight_regex(r"(?<![\w-])--?[a-z][\w-]*", "cyan")
    rich.print(shown, end="", soft_wrap=True)
