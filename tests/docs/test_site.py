"""The site: it builds without a warning, and the reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path

import pictures
import pytest

DOCS = Path(__file__).parents[2] / "python" / "docs"
REFERENCE = DOCS / "reference"
MODULES = {
    "anyflash": "anyflash",
    "anyflash.torch": "torch",
    "anyflash.jax": "jax",
    "anyflash.flash_attn": "flash_attn",
    "anyflash.flash_attn_3": "flash_attn_3",
}


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d",
         str(tmp_path / "cache"), str(DOCS), str(tmp_path / "site")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "command_line.html").read_text()
    assert "search sentences" in page  # what the command printed
    page = (tmp_path / "site" / "performance" / "index.html").read_text()
    assert "only-dark" in page


@pytest.mark.parametrize(("name", "svg"), pictures.drawings().items())
def test_pictures_of_the_guide(name: str, svg: str) -> None:
    """The same bytes: matplotlib's version is pinned."""
    assert (pictures.FOLDER / name).read_text() == svg, "run: python python/docs/tools/pictures.py"


def test_softmax_of_the_picture() -> None:
    """After its last tile it is that of the whole row."""
    scores = [score for tile in pictures.SCORES for score in tile]
    last = pictures.online_softmax(pictures.SCORES)[-1]
    assert last.largest == max(scores)
    assert last.total == pytest.approx(sum(math.exp(score - max(scores)) for score in scores))


@pytest.mark.parametrize("parts", [1, 4])
def test_splits_of_the_picture(parts: int) -> None:
    """Each tile once, and one at a time on a multiprocessor."""
    work = pictures.schedule(parts)
    tiles = {(one.sequence, one.tile) for one in work}
    assert len(tiles) == len(work) == pictures.SEQUENCES * pictures.KEY_TILES
    assert len({(one.multiprocessor, one.start) for one in work}) == len(work)
    assert max(one.multiprocessor for one in work) < pictures.MULTIPROCESSORS


def test_ring_of_the_picture() -> None:
    """In a hop all ranks have the same work; a tile on the diagonal is half of one."""
    ranks = pictures.owners("zigzag")
    work = [[0.0] * pictures.RANK_COUNT for _ in range(pictures.RANK_COUNT)]
    for m, reader in enumerate(ranks):
        for n, owner in enumerate(ranks[: m + 1]):
            work[pictures.hop_of(reader, owner)][reader] += 0.5 if n == m else 1
    assert work == [[2.0] * pictures.RANK_COUNT] * pictures.RANK_COUNT


@pytest.mark.parametrize("module", MODULES)
def test_reference_has_every_public_name(module: str) -> None:
    text = (REFERENCE / f"{MODULES[module]}.md").read_text()
    text = text.partition(f".. automodule:: {module}.")[0]  # modules in this one come behind
    listed = re.findall(r"^\.\. auto(?:function|class|data):: (\w+)$", text, re.MULTILINE)
    names = set(importlib.import_module(module).__all__)
    assert sorted({*listed, "__version__"}) == sorted({*names, "__version__"})


def _public() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if inspect.isfunction(getattr(importlib.import_module(module), name))
    ]


@pytest.mark.parametrize(("module", "name"), _public())
def test_documented_parameters_are_those_of_the_signature(module: str, name: str) -> None:
    from numpydoc.docscrape import FunctionDoc

    function = getattr(importlib.import_module(module), name)
    known = set(inspect.signature(function).parameters)
    for parameter in FunctionDoc(function)["Parameters"]:
        for each in parameter.name.split(","):
            assert each.strip().lstrip("*") in known
