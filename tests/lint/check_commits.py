"""Checks that the commits which pages and measurements cite are in this history.

    python tests/lint/check_commits.py [ROOT]

A word of 7 to 12 hexadecimal digits, with a digit and a letter among them, is taken for a commit.
In measurements a word of 40 is one, too; on a page it is another project's. A commit must be HEAD
or one of its ancestors. One of another clone, or of a branch that was merged anew, is nothing that
a reader could look at. What was measured there is said to be of "a working state before" the commit
that brought it here.
Where there is no history, or a part of it, nothing can be said, and a line says so.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import report, source_files

DATA = "python/docs/performance/data/"
MIXED = r"(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])"
COMMIT = re.compile(rf"(?<!\w){MIXED}([0-9a-f]{{7,12}})(?!\w)")
WHOLE_COMMIT = re.compile(rf"(?<!\w){MIXED}([0-9a-f]{{7,12}}|[0-9a-f]{{40}})(?!\w)")


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def why_not(root: Path) -> str | None:
    """Why the history cannot be asked; None if it can."""
    if not (root / ".git").exists():
        return "this is no git repository"
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        return "this clone is shallow"
    return None


def pattern(name: str) -> re.Pattern[str] | None:
    """What a commit looks like in this file; None where nothing is looked for."""
    if name.endswith(".md"):
        return COMMIT
    return WHOLE_COMMIT if name.startswith(DATA) and name.endswith(".json") else None


def cited(root: Path) -> Iterator[tuple[str, int, str]]:
    """File, line and word of whatever looks like a commit."""
    for name in source_files(root):
        commit = pattern(name)
        if commit is not None:
            text = (root / name).read_text(encoding="utf-8")
            for number, line in enumerate(text.splitlines(), 1):
                yield from ((name, number, word) for word in commit.findall(line))


def findings(root: Path) -> list[str]:
    reason = why_not(root)
    if reason is not None:
        print(f"not checked: {reason}")
        return []
    history = git(root, "rev-list", "HEAD").split()
    return [
        f"{name}:{line}: {word} is no commit of this history"
        for name, line, word in cited(root)
        if not any(commit.startswith(word) for commit in history)
    ]


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
