"""A checker, run on a tree of a test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def status_and_lines(checker: Path, root: Path) -> tuple[int, list[str]]:
    """Its exit status, and what it prints."""
    command = [sys.executable, str(checker), str(root)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def findings(checker: Path, root: Path, name: str, text: str) -> list[str]:
    """What it finds where there is a file of this name and text, and nothing new beside it."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    status, lines = status_and_lines(checker, root)
    assert status == (1 if lines else 0)
    return lines
