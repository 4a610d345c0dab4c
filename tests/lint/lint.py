"""Runs every linter over the repository and says which of them object.

    python tests/lint/lint.py

The tools are looked for beside this Python, then on PATH; a tool that is missing is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sources import source_files

ROOT = Path(__file__).resolve().parents[2]
CPP = (".h", ".hpp", ".cpp", ".cu", ".cuh", ".c")


def tool(name: str) -> str | None:
    # Not resolved: in a virtual environment the link's folder holds the tools.
    beside = Path(sys.executable).parent
    return shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def commands() -> dict[str, list[str]]:
    files = source_files(ROOT)
    cpp = [f for f in files if f.endswith(CPP)]
    cmake = [f for f in files if f.endswith(("CMakeLists.txt", ".cmake", ".cmake.in"))]
    return {
        "clang-format": ["clang-format", "--dry-run", "-Werror", *cpp],
        "gersemi": ["gersemi", "--check", "--no-cache", "--quiet", *cmake],
        "ruff check": ["ruff", "check", "--quiet", "--no-cache", "."],
        "ruff format": ["ruff", "format", "--quiet", "--check", "--no-cache", "."],
        "mypy": ["mypy", "--strict", "python/anyflash", "tests/lint/expected_types.py"],
        "includes": [sys.executable, "tests/lint/check_includes.py"],
        "functions": [sys.executable, "tests/lint/check_functions.py"],
        "aggregates": [sys.executable, "tests/lint/check_aggregates.py"],
        "torch state": [sys.executable, "tests/lint/check_torch_state.py"],
        "documents": [sys.executable, "tests/lint/check_documents.py"],
        "sentences": [sys.executable, "tests/lint/check_sentences.py"],
        "commits": [sys.executable, "tests/lint/check_commits.py"],
    }


def run(name: str, command: list[str]) -> bool:
    program = tool(command[0])
    if program is None:
        print(f"{name}: FAILED, {command[0]} is not installed", flush=True)
        return False
    done = subprocess.run(
        [program, *command[1:]],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        # What could not be checked is said, too.
        said = f", {done.stdout.strip()}" if done.stdout.strip() else ""
        print(f"{name}: ok{said}", flush=True)
        return True
    print(f"{name}: FAILED\n{done.stdout}", flush=True)
    return False


def main() -> int:
    passed = [run(name, command) for name, command in commands().items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
