"""What a figure within a sentence may say of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import performance
import prose_figures
import pytest

DOCUMENT: dict[str, Any] = {
    "ceilings": [{"name": "read", "unit": "B/s", "value": 1e12}],
    "cells": [
        {
            "labels": {"d": d},
            "op": "decode",
            "unit": "us",
            "bytes": megabytes * 1e6,
            "results": {"anyflash": {"seconds": ours}, **others},
        }
        for d, megabytes, ours, others in (
            ("64", 100, 2e-4, {"flash": {"seconds": 1e-4}, "cudnn": {"seconds": 4e-4}}),
            ("128", 300, 4e-4, {"flash": {"seconds": 16e-4}, "cudnn": {"seconds": 8e-4}}),
            ("256", 400, 5e-4, {}),
        )
    ],
}


@pytest.mark.parametrize(
    ("statistic", "quantity", "limits", "figure"),
    [
        ("mean", "speed/flash", {}, "1.41"),
        ("highest", "speed/flash", {}, "4.00"),
        ("highest", "speed/flash,cudnn", {}, "2.00"),  # against the faster one of each case
        ("lowest", "speed/flash,cudnn", {}, "0.50"),
        ("count", "speed/flash", {}, "2"),
        ("lowest", "share", {}, "50"),
        ("median", "share", {}, "75"),
        ("count", "share", {"below": 80.0}, "2"),
        ("highest", "share", {"below": 80.0}, "75"),
        ("lowest", "of/anyflash", {"larger": 256.0}, "400"),
        ("only", "of/anyflash", {"larger": 256.0, "smaller": 350.0}, "400"),
        ("highest", "MB", {"smaller": 350.0}, "300"),
        ("lowest", "reading", {}, "100"),
        ("only", "bandwidth", {}, "1000"),
    ],
)
def test_figures(statistic: str, quantity: str, limits: dict[str, float], figure: str) -> None:
    cases = DOCUMENT["cells"]
    assert prose_figures.text(DOCUMENT, cases, statistic, quantity, limits) == figure


@pytest.mark.parametrize(
    ("statistic", "quantity", "why"),
    [
        ("mean", "speed/fa2", "no case has speed/fa2"),
        ("only", "share", "several figures for share: 50, 75, 80"),
    ],
)
def test_a_figure_that_is_none_raises(statistic: str, quantity: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        prose_figures.text(DOCUMENT, DOCUMENT["cells"], statistic, quantity, {})


def test_a_share_needs_the_bandwidth() -> None:
    with pytest.raises(ValueError, match="needs the bandwidth"):
        prose_figures.text({"ceilings": []}, DOCUMENT["cells"], "lowest", "share", {})


def test_a_wrong_figure_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin = "It has <!-- bench h100-decode.json lowest share larger=256 cache='pages of 16' -->"
    page.write_text(f"{begin}99<!-- end --> %.\n")
    assert performance.filled(page) == f"{begin}74<!-- end --> %.\n"


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.name)
def test_comments_are_figures_within_lines(page: Path) -> None:
    """Each `<!-- end -->` is of a figure, and no comment that begins a line ends its paragraph."""
    text = page.read_text()
    assert len(prose_figures.FIGURE.findall(text)) == text.count("<!-- end -->")
    assert not prose_figures.MISPLACED.findall(text)


def test_a_comment_that_begins_a_line_is_found() -> None:
    figure = "<!-- bench a.json mean share -->1<!-- end -->"
    assert prose_figures.MISPLACED.search(f"It has\n  {figure} %")
    assert prose_figures.MISPLACED.search(f"* {figure} %")
    assert not prose_figures.MISPLACED.search(f"* It has {figure} %")
