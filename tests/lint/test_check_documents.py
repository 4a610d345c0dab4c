"""The checker finds links that lead nowhere and first pages that are too long, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from checker_runs import findings

CHECKER = Path(__file__).with_name("check_documents.py")
PAGE = "# A page's title: `x` & more\n\n```\n# no heading\n```\n\n## Second part\n"


def run(root: Path, text: str, name: str = "docs/a.md") -> list[str]:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs/b.md").write_text(PAGE)
    return findings(CHECKER, root, name, text)


@pytest.mark.parametrize(
    "text",
    [
        "[b](b.md), [second](b.md#second-part), [title](b.md#a-pages-title-x--more)\n",
        "[above](../docs/b.md) and [the folder](../docs)\n",
        "# Own\n\n[own](#own)\n",
        "[web](https://example.org/nothing.md#nowhere), <b@example.org>\n",
        "`[code](nowhere.md)`\n\n    [indented](nowhere.md)\n\n```\n[fenced](nowhere.md)\n```\n",
        '<img src="b.md">\n',
    ],
)
def test_good_links(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\n[x](c.md)\n", "links to c.md, which does not exist"),
        ("\n[x](b.md#third)\n", "links to b.md#third; b.md has no such heading"),
        ("\n[x](b.md#no-heading)\n", "links to b.md#no-heading; b.md has no such heading"),
        ("\n[x](#own)\n", "links to #own; a.md has no such heading"),
        ("\n[x](../../a)\n", "links to ../../a, outside of the repository"),
        ('\n<img src="c.svg">\n', "links to c.svg, which does not exist"),
    ],
)
def test_wrong_links(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "a").touch()
    assert run(tmp_path / "root", text) == [f"docs/a.md:2: {why}"]


def test_length_of_first_pages(tmp_path: Path) -> None:
    assert run(tmp_path, "line\n" * 1000, "docs/README.md") == []
    assert run(tmp_path, "line\n" * 200, "README.md") == []
    assert run(tmp_path, "line\n" * 201, "README.md") == [
        "README.md: has 201 lines; at most 200 are allowed"
    ]
