"""Pages and plot have the figures of the data; `make performance` writes them."""

from __future__ import annotations

import re
from pathlib import Path

import performance
import pytest
import speed_plot

from anyflash.bench import _report

FOLDER = performance.DOCS / "performance"
FILES = sorted(path.name for path in performance.DATA.glob("*.json"))


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.name)
def test_pages_have_the_figures(page: Path) -> None:
    assert page.read_text() == performance.filled(page), "run: make performance"


def test_plots_have_the_figures() -> None:
    """The same bytes: matplotlib's version is pinned, and nothing in its output is of today."""
    drawn = speed_plot.drawings(performance.load)
    assert sorted(drawn) == sorted(path.name for path in FOLDER.glob("*.svg"))
    for name, svg in drawn.items():
        assert (FOLDER / name).read_text() == svg, "run: make performance"


@pytest.mark.parametrize("name", FILES)
def test_every_run_is_on_a_page(name: str) -> None:
    """Its facts, too: machine, commit, command."""
    document = performance.load(name)
    assert {"command", "commit"} <= set(document["about"])
    text = "".join(page.read_text() for page in performance.PAGES)
    assert re.search(f"<!-- bench {re.escape(name)} (table|training|losses) ", text)
    assert f"<!-- bench {name} facts -->" in text


@pytest.mark.parametrize("name", FILES)
def test_transcribed_figures_are_those_of_the_seconds(name: str) -> None:
    """What was printed is what the seconds give, in as many digits."""
    for entry in performance.load(name).get("cells", ()):
        for library, result in entry.get("results", {}).items():
            if "printed" not in result:
                continue
            value = _report.value(entry, library)
            assert value is not None
            digits = len(result["printed"].partition(".")[2])
            assert abs(value - float(result["printed"])) <= 0.5001 * 10**-digits


def test_a_changed_figure_is_seen() -> None:
    document = performance.load("h200-short.json")
    entry = document["cells"][0]
    before = list(performance.figures(document, entry))
    entry["results"]["flash"] = {"seconds": 1e-9}
    after = list(performance.figures(document, entry))
    changed = [a.labels["by"] for a, b in zip(before, after, strict=True) if a.text != b.text]
    assert changed == ["anyflash", "PyTorch's flash"]  # the one is no longer in bold


def test_a_region_that_asks_for_nothing_raises() -> None:
    document = performance.load("h200-short.json")
    with pytest.raises(ValueError, match="no case has the labels"):
        list(performance.table(document, {"rows": "d", "columns": "by", "d": "65"}))
    with pytest.raises(ValueError, match="two figures for"):
        list(performance.table(document, {"rows": "d", "columns": "by"}))
