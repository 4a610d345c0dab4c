"""The notebook runs top to bottom, and is kept without results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import notebook
import pytest

FOLDER = Path(__file__).parents[2] / "python" / "docs" / "examples"
NOTEBOOKS = sorted(FOLDER.rglob("*.ipynb"))
SECONDS = 180  # a notebook that hangs fails


def run(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, notebook.__file__, str(path)],
        check=False, capture_output=True, text=True, cwd=folder, timeout=SECONDS,
        env=os.environ | {"MPLBACKEND": "Agg"},
    )  # fmt: skip


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_steps.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_top_to_bottom(path: Path, tmp_path: Path) -> None:
    done = run(path, tmp_path)
    assert done.returncode == 0, done.stderr
    code = [cell for cell in notebook.cells(path) if cell["cell_type"] == "code"]
    assert done.stdout.endswith(f"cells: {len(code)}\n")
    assert "attention computes" in done.stdout  # the doctor's words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_kept_without_results(path: Path) -> None:
    assert path.read_text(encoding="utf-8").endswith("}\n")
    ids = [cell["id"] for cell in notebook.cells(path)]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Other pages are looked at by tests/lint/check_documents.py."""
    from check_documents import LINK, WEB

    text = "".join("".join(c["source"]) for c in notebook.cells(path) if c["cell_type"] != "code")
    links = [link for link, _ in LINK.findall(text) if not WEB.match(link)]
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []


def test_an_error_names_the_cell_and_the_line(tmp_path: Path) -> None:
    sources = ["x = 1\n", "# A page", "print('here')\nx += y"]
    kinds = ["code", "markdown", "code"]
    cells = [{"cell_type": k, "source": [s]} for k, s in zip(kinds, sources, strict=True)]
    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    done = run(path, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "here\n"
    assert 'some.ipynb, cell 2", line 2' in done.stderr
    assert "NameError: name 'y'" in done.stderr
