"""The blocks of code of a page, and how they are run.

    python tests/docs/examples.py PAGE      runs the page's examples in Python

A block is a program of its own. Where it is not run, the line before it says why:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, counted from 1
    language: str
    code: str
    why: str | None  # it is not run

    @property
    def is_directive(self) -> bool:
        """What Sphinx reads, as `{toctree}`."""
        return self.language.startswith("{")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["why"],
        )
        for found in BLOCK.finditer(text)
    ]


def run_python(page: Path) -> None:
    """Errors name the page and the line in it."""
    linecache.checkcache()
    for block in blocks(page):
        if block.language == "python" and block.why is None:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
