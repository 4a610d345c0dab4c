"""The examples of README and of the site run, or say why they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import examples
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "python" / "docs").rglob("*.md"))]
NAMES = {page.relative_to(ROOT).as_posix(): page for page in PAGES}


def wanted(language: str) -> list[str]:
    return [
        name
        for name, page in NAMES.items()
        if any(b.language == language and b.why is None for b in examples.blocks(page))
    ]


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process for a page: `install()` and its like change what later examples would see."""
    return subprocess.run(
        [sys.executable, examples.__file__, str(page)],
        check=False, capture_output=True, text=True, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("name", wanted("python"))
def test_examples_in_python(name: str, tmp_path: Path) -> None:
    done = run_page(NAMES[name], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", wanted("sh"))
def test_commands(name: str, tmp_path: Path) -> None:
    beside = f"PATH={Path(sys.executable).parent}:$PATH\n"
    for block in examples.blocks(NAMES[name]):
        if block.language == "sh" and block.why is None:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", beside + block.code],
                check=False, capture_output=True, text=True, cwd=tmp_path,
            )  # fmt: skip
            assert done.returncode == 0, f"{name}:{block.line}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", NAMES)
def test_every_block_runs_or_says_why_not(name: str) -> None:
    found = examples.blocks(NAMES[name])
    fences = [line for line in NAMES[name].read_text().splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(found)
    for block in found:
        assert block.is_directive or block.why or block.language in ("python", "sh"), (
            f"{name}:{block.line}: no test runs a block of {block.language or 'no language'}; "
            "put a line before it: <!-- not run: REASON -->"
        )


def test_an_error_names_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n```\n\n```python\nprint('here')\nx += 1\n```\n")
    done = run_page(page, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "here\n"
    assert 'page.md", line 9' in done.stderr
    assert "NameError: name 'x'" in done.stderr  # blocks share no names
    page.write_text("<!-- not run: wrong -->\n" + page.read_text().partition("\n\n")[2])
    assert [block.why for block in examples.blocks(page)] == ["wrong", None]
