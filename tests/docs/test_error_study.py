"""The page on errors: its figures hold for the kernels of this machine, too."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import error_formulas
import error_study
import pytest

Row = tuple[str, str, str]  # heading, problem, label


def figures() -> dict[Row, list[float]]:
    """Of every row of the page's tables."""
    found: dict[Row, list[float]] = {}
    heading = problem = ""
    for line in error_study.PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[2] not in {"out", "---:"}:
            problem = cells[0] or problem
            found[heading, problem, cells[1]] = [float(cell) for cell in cells[2:]]
    return found


def problem_of(name: str) -> error_formulas.Problem:
    return next(problem for problem in error_study.PROBLEMS if problem.name == name)


def test_all_problems_are_there() -> None:
    wanted = [(d, p.name) for d in error_study.DTYPES for p in error_study.PROBLEMS]
    assert [row[:2] for row in figures() if row[2] == "anyflash"] == wanted


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *itertools.product(error_study.DTYPES, ("128 queries and keys", "1 key")),
        ("bfloat16", "dropout 1/8"),
    ],
)
def test_figures(dtype: str, name: str) -> None:
    """The order of sums is another for each instruction set: AMX also rounds P."""
    found = error_study.errors(problem_of(name), error_study.DTYPES[dtype])["anyflash"]
    assert found is not None
    for value, figure in zip(found, figures()[dtype, name, "anyflash"], strict=True):
        assert value <= 3 * figure + 1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_roundings_cost(dtype: str) -> None:
    """The same on every machine, but for the order of sums."""
    problem = "128 queries and keys"
    found = error_study.rounding_errors(problem_of(problem), error_study.DTYPES[dtype])
    for name, values in found.items():
        page = figures()[f"What roundings cost in {dtype}", problem, name]
        assert values == pytest.approx(page, rel=0.02), name
    for left, better in (("P not rounded", (0, 3)), ("dS not rounded", (1, 2))):
        for number, (value, whole) in enumerate(
            zip(found[left], found["P, dS and delta rounded"], strict=True)
        ):
            assert (value < 0.9 * whole) == (number in better), (left, number)


def measured(problem: Any, dtype: Any, device: str = "cpu") -> error_study.Found:
    if device == "cpu":
        return {"anyflash": [1.0] * 4, "fused": None, "plain": [2.0] * 4}
    return {"anyflash": [3.0] * 4, "flash": [4.0] * 4, "cudnn": None}


def test_rows_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those of a file, which a machine with a GPU has written."""
    monkeypatch.setattr(error_study, "errors", measured)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    file = tmp_path / "gpu.json"
    command = ["error_study.py", "--device", "cuda", "--commit", "abc", "--json", str(file)]
    monkeypatch.setattr("sys.argv", command)
    error_study.main()
    gpu = json.loads(file.read_text())
    assert error_study.table("bfloat16", gpu).splitlines()[4:9] == [
        "| 128 queries and keys | anyflash | 1.0e+00 | 1.0e+00 | 1.0e+00 | 1.0e+00 |",
        "|  | PyTorch, step by step | 2.0e+00 | 2.0e+00 | 2.0e+00 | 2.0e+00 |",
        "|  | anyflash, H100 | 3.0e+00 | 3.0e+00 | 3.0e+00 | 3.0e+00 |",
        "|  | PyTorch's flash, H100 | 4.0e+00 | 4.0e+00 | 4.0e+00 | 4.0e+00 |",
        "| 1024 queries and keys | anyflash | 1.0e+00 | 1.0e+00 | 1.0e+00 | 1.0e+00 |",
    ]
    assert "H100" not in error_study.table("float32", gpu)
    assert "H100" not in error_study.table("bfloat16", None)


def test_the_page_has_the_gpus_rows() -> None:
    """Of the committed file, if there is one: to the digits that are shown."""
    shown = {row: x for row, x in figures().items() if row[2].startswith("anyflash, ")}
    wanted = {}
    if error_study.GPU.exists():
        gpu = json.loads(error_study.GPU.read_text())
        for dtype, problems in gpu["errors"].items():
            assert list(problems) == [problem.name for problem in error_study.PROBLEMS]
            wanted |= {(dtype, p): x["anyflash"] for p, x in problems.items() if x["anyflash"]}
    assert {row[:2] for row in shown} == wanted.keys()
    for row, values in shown.items():
        assert values == pytest.approx(wanted[row[:2]], rel=0.06), row
