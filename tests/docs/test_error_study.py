"""The page on errors: its figures hold for the kernels of this machine, too."""

from __future__ import annotations

import error_study
import pytest


def figures() -> dict[tuple[str, str], list[float]]:
    """anyflash's, by dtype and problem."""
    found: dict[tuple[str, str], list[float]] = {}
    dtype = ""
    for line in error_study.PAGE.read_text().splitlines():
        if line.startswith("## "):
            dtype = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1] == "anyflash":
            found[dtype, cells[0]] = [float(cell) for cell in cells[2:]]
    return found


def test_all_problems_are_there() -> None:
    wanted = [(d, p.name) for d in error_study.DTYPES for p in error_study.PROBLEMS]
    assert list(figures()) == wanted


@pytest.mark.parametrize("dtype", error_study.DTYPES)
@pytest.mark.parametrize("number", [0, 9])
def test_figures(dtype: str, number: int) -> None:
    """The order of sums is another for each instruction set: AMX also rounds P."""
    problem = error_study.PROBLEMS[number]
    found = error_study.errors(problem, error_study.DTYPES[dtype])["anyflash"]
    assert found is not None
    for value, figure in zip(found, figures()[dtype, problem.name], strict=True):
        assert value <= 3 * figure + 1e-12
