"""The guide's table of kernels is what this build holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import anyflash

_SPEC = importlib.util.spec_from_file_location(
    "support_table", Path(__file__).parent / "support_table.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
support_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(support_table)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def _holds(row: list[str], built: list[str]) -> bool:
    """The same kernels, operation and features, and all of the dtypes, head dims and tiles."""
    return row[:3] == built[:3] and all(
        set(some.split(", ")) <= set(every.split(", "))
        for some, every in zip(built[3:], row[3:], strict=True)
    )


def test_the_guide_lists_the_kernels() -> None:
    """Some builds hold fewer kernels: for the CPU alone, for another processor, the set for CI.
    None holds others."""
    table = support_table.PAGE.read_text().split(support_table.BEGIN)[1]
    rows = [_cells(line) for line in table.split("\n\n")[0].splitlines() if line.startswith("|")]
    for row in support_table.rows(anyflash.build_info()["kernels"]):
        assert any(_holds(listed, _cells(row)) for listed in rows), (
            f"not listed: {row}; run: python tests/lint/support_table.py --write"
        )
