"""Runs a notebook's cells of code, top to bottom, in one namespace.

    python tests/docs/notebook.py NOTEBOOK

No Jupyter is needed, so cells hold Python alone: no magics, no commands of a shell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def run(notebook: Path) -> int:
    """How many cells were run. Errors name the notebook, the cell, and the line in it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        text = "".join(cell["source"])
        exec(compile(text, f"{notebook}, cell {number}", "exec"), namespace)
    return len(code)


if __name__ == "__main__":
    print("cells:", run(Path(sys.argv[1])))
