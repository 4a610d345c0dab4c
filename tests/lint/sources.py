"""The files that the checkers read, and how they say what they found."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".c", ".in"}


def source_files(root: Path) -> list[str]:
    """Files that git tracks or would track; all files where there is no repository."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return sorted({name for name in listed.split("\0") if name and (root / name).is_file()})
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def read(root: Path, name: str) -> str | None:
    """The text of a file, None for a binary one."""
    try:
        return (root / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def report(about: str, findings: Callable[[Path], list[str]]) -> int:
    """A checker's main program: prints what it finds below the root that it is given, or in this
    repository; exit status 1 if that is anything. ``about`` is its docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[2])
    found = findings(parser.parse_args().root)
    for finding in found:
        print(finding)
    return 1 if found else 0
