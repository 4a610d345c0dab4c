"""The tables of the training example's measurements, from made ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import performance
import pytest


def cell(model: str, seqlen: int, attention: str, **result: Any) -> dict[str, Any]:
    return {"model": model, "seqlen": seqlen, "attention": attention, **result}


ABOUT = {"command": "python benchmark.py", "commit": "0123", "gpu": "a GPU"}
TRAINING: dict[str, Any] = {
    "about": ABOUT,
    "cells": [
        cell("1.3b", 2048, "anyflash", tflops=400.0, mfu=0.404),
        cell("1.3b", 2048, "flash", tflops=320.0, mfu=0.324),
        cell("1.3b", 8192, "anyflash", tflops=450.0, mfu=0.455),
        cell("1.3b", 8192, "flash", tflops=225.0, mfu=0.228),
        cell("2.7b", 2048, "anyflash", tflops=390.04, mfu=None),
        cell("2.7b", 2048, "flash", failure="out of memory"),
        cell("2.7b", 8192, "anyflash", failure="no end in 90 s"),
        cell("2.7b", 8192, "flash", tflops=9.876, mfu=0.01),
    ],
}
TRAINING_TABLE = """
| model | TFLOP/s (MFU) | 2k | 8k |
| --- | --- | ---: | ---: |
| GPT 1.3B | anyflash | **400** (40%) | **450** (46%) |
|  | PyTorch's flash | 320 (32%) | 225 (23%) |
| GPT 2.7B | anyflash | 390 | no end in 90 s |
|  | PyTorch's flash | out of memory | 9.88 (1%) |

anyflash trains with

- 1.58 times the speed of PyTorch's flash in the geometric mean of 2, 1.25 to 2.00
"""
LOSSES: dict[str, Any] = {
    "about": ABOUT,
    "losses": {
        "steps": [50, 100],
        "anyflash": [5.1234, 4.0],
        "flash": [5.12, 4.001],
        "other_seed": [5.2, 4.1],
    },
    "difference": 0.0034,
    "gap": 0.099,
    "within": True,
}
LOSSES_TABLE = """
| step | anyflash | PyTorch's flash | PyTorch's flash, another seed |
| ---: | ---: | ---: | ---: |
| 50 | 5.1234 | 5.1200 | 5.2000 |
| 100 | 4.0000 | 4.0010 | 4.1000 |

The largest difference is 0.0034 between anyflash and flash, and 0.099 between flash's two seeds: \
anyflash is within the seeds' gap.
"""
FACTS = """
- `python benchmark.py`
- commit: 0123
- gpu: a GPU
- data: [x.json](x.json)
"""
TABLES = {
    "training": (TRAINING, TRAINING_TABLE),
    "losses": (LOSSES, LOSSES_TABLE),
    "facts": (TRAINING, FACTS),
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A page's text with a kind of region, where its data is a document."""
    monkeypatch.setattr(performance, "DATA", tmp_path)

    def write(kind: str, document: dict[str, Any]) -> str:
        (tmp_path / "x.json").write_text(json.dumps(document))
        page = tmp_path / "page.md"
        page.write_text(f"Before.\n\n<!-- bench x.json {kind} -->\nold\n<!-- end of bench -->\n")
        return performance.filled(page)

    return write


@pytest.mark.parametrize("kind", TABLES)
def test_tables(written: Any, kind: str) -> None:
    document, table = TABLES[kind]
    begin = f"Before.\n\n<!-- bench x.json {kind} -->\n"
    assert written(kind, document) == f"{begin}{table}\n<!-- end of bench -->\n"


def test_another_figure_is_another_page(written: Any) -> None:
    before = written("training", TRAINING)
    changed = json.loads(json.dumps(TRAINING))
    changed["cells"][1]["tflops"] = 401.0
    after = written("training", changed)
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    differ = [pair for pair in lines if pair[0] != pair[1]]
    assert differ[0][1] == "| GPT 1.3B | anyflash | 400 (40%) | **450** (46%) |"
    assert len(differ) == 3
    assert "NOT within" in written("losses", LOSSES | {"within": False})


def test_two_results_of_one_cell_raise(written: Any) -> None:
    cells = [*TRAINING["cells"], TRAINING["cells"][0]]
    with pytest.raises(ValueError, match="two figures for"):
        written("training", TRAINING | {"cells": cells})


def test_one_attention_has_no_ratios(written: Any) -> None:
    """And nothing is in bold, which would be faster than nothing."""
    text = written("training", TRAINING | {"cells": TRAINING["cells"][:1]})
    assert "| GPT 1.3B | anyflash | 400 (40%) |" in text
    assert "times the speed" not in text
