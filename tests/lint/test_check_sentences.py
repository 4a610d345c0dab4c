"""The checker finds sentences that are too long, and takes nothing else for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_sentences import PACKAGE
from checker_runs import findings

CHECKER = Path(__file__).with_name("check_sentences.py")


def words(count: int) -> str:
    return " ".join(["word"] * count)


SHORT, LONG = words(30), words(31)
BEGIN = words(8)


def run(root: Path, text: str, name: str = "a.md") -> list[str]:
    return findings(CHECKER, root, name, text)


@pytest.mark.parametrize(
    "text",
    [
        f"{SHORT}.\n",
        f"{SHORT}. {SHORT}? ({SHORT}.) **{SHORT}!** {SHORT}\n",
        f"{SHORT}\n\n{SHORT}\n",
        f"{SHORT}:\n* {SHORT}\n* {SHORT}\n  1. {SHORT}\n",
        f"> {SHORT}.\n> {SHORT}.\n",
        f"# {LONG}\n\n| {LONG} |\n|---|\n| {LONG} |\n",
        f"```\n{LONG}\n```\n\n* {SHORT}\n\n  ```sh\n  {LONG}\n  ```\n",
        f"{SHORT}\n\n    {LONG}\n\n    {LONG}\n",
        f"<!-- {LONG}\n{LONG} -->\n",
        f'<img alt="{LONG}" src="b.svg">\n',
        f"{words(27)} `a span of\ncode. With four` - 5 % [link](b.md#{'x-' * 40}).\n",
        f"{words(29)} 16k+3*x/2.5.\n",  # a formula without blanks
        f"{words(28)} 3.5 us. Next.\n",  # a number and its unit
        f"[{SHORT}]: https://example.org {LONG}\n",
    ],
)
def test_short_sentences(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "line", "count"),
    [
        (f"{LONG}.\n", 1, 31),
        (f"# Title\n\nShort. Two\nlines.\n{words(16)}\n{words(15)}. Short.\n", 5, 31),
        (f"```\ncode\n```\n<!-- two\nlines -->\n* short\n* {LONG}\n", 7, 31),
        (f"* short\n\n    {LONG}\n", 3, 31),  # of the item, not code
        (f"{SHORT}; {SHORT}\n", 1, 60),
        (f"{words(16)}, e.g. {words(15)}\n", 1, 32),
        (f"{words(15)} <!-- bench a.json mean share -->1.5<!-- end --> {words(15)}.\n", 1, 31),
        (f"{words(29)} `code. More` `code`\n", 1, 31),
        (f"{words(29)} [two words](b.md)\n", 1, 31),
        (f"> {LONG}\n", 1, 31),
    ],
)
def test_long_sentences(tmp_path: Path, text: str, line: int, count: int) -> None:
    (found,) = run(tmp_path, text)
    begin = f"a.md:{line}: a sentence has {count} words; at most 30 are allowed: {BEGIN}"
    assert found.startswith(begin)


MODULE = f"{PACKAGE}a.py"


@pytest.mark.parametrize(
    "text",
    [
        f'"""{SHORT}."""\n',
        f'"""{SHORT}.\n\n{SHORT}\n"""\n',
        f'def f():\n    """{words(29)} :func:`a.b`.\n\n    ``two words`` {words(29)}.\n    """\n',
        f'def f():\n    """S.\n\n    a : {LONG}\n        {SHORT}.\n\n        {SHORT}.\n    """\n',
        f'def f():\n    """As::\n\n        {LONG}\n\n        {LONG}\n\n    {SHORT}."""\n',
        f'"""Short.\n\n>>> {LONG}\n... {LONG}\n{LONG}\n\n{SHORT}"""\n',
        f'"""Short.\n\n==== ====\n{LONG}\n\n{LONG}\n==== ====\n"""\n',
        f'def _f():\n    """{LONG}."""\nclass _A:\n    """{LONG}."""\n',
        f'class _A:\n    def f(self):\n        """{LONG}."""\n',
        f'def f():\n    def g():\n        """{LONG}."""\n',
        f'"""Short."""\n# {LONG}\na = """{LONG}"""\n',
    ],
)
def test_short_docstrings(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text, MODULE) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f'"""{LONG}."""\n', 1),
        (f'"""Short.\n\nTwo\nlines. {LONG}\n"""\n', 4),
        (f'"""\n\n{LONG}"""\n', 3),
        (f'import a\ndef f():\n    """Short.\n\n    {LONG}.\n    """\n', 5),
        (
            f'def f():\n    """Short.\n\n    a : int\n        Short.\n\n        {LONG}.\n    """\n',
            7,
        ),
        (f'def f():\n    """{words(16)}\n    {words(15)}."""\n', 2),
        (f'def f():\n    """As::\n\n        code\n\n    {LONG}."""\n', 6),
        (f'"""Short.\n\n>>> code\n\n{LONG}"""\n', 5),
        (f'"""Short.\n\n==== ====\na    b\n==== ====\n\n{LONG}"""\n', 7),
        (f'class A:\n    """Short."""\n    def f(self):\n        """{LONG}."""\n', 4),
    ],
)
def test_long_docstrings(tmp_path: Path, text: str, line: int) -> None:
    (found,) = run(tmp_path, text, MODULE)
    assert found.startswith(f"{MODULE}:{line}: a sentence has 31 words; at most 30 are allowed: ")


def test_docstrings_of_the_package_alone(tmp_path: Path) -> None:
    text = f'"""{LONG}."""\n'
    assert run(tmp_path, text, "tests/a.py") == []
    assert len(run(tmp_path, text, MODULE)) == 1
