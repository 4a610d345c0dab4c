"""Writes the lists of packages with hashes that .github/workflows/wheels.yml installs.

    python third_party/lock.py

requirements-locked.txt builds released files; tests/requirements/wheel-locked.txt tests them. The
index says the hashes, through pip, and nothing large is downloaded. Versions come from the lists
without hashes. What these require in turn is resolved anew, so that a run may change its versions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent / "tests/requirements"
# Of each list those that it locks, with what they require; and those without.
LISTS = {
    FOLDER / "requirements-locked.txt": (
        [FOLDER / "requirements.txt", FOLDER / "requirements-frontend.txt"],
        [FOLDER / "requirements-headers.txt"],
    ),
    TESTS / "wheel-locked.txt": ([TESTS / "wheel.txt"], []),
}
# Where .github/workflows/wheels.yml builds: wheels in manylinux_2_28 with CPython 3.10, and the
# sdist with 3.12. The others are for tests/wheel/steps.py, with the Python that runs it.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TARGETS = [("3.10", "aarch64"), *[(python, "x86_64") for python in PYTHONS]]
HEADER = """\
# Written by third_party/lock.py. Installed with --require-hashes --no-deps --only-binary=:all: by
# .github/workflows/wheels.yml, on Linux for x86-64 and aarch64.
"""


def resolve(python: str, machine: str, *requirements: str) -> list[dict[str, Any]]:
    """What pip would install there. It reads no settings, so that the index is PyPI."""
    platforms = [f"--platform={name}_{machine}" for name in ("manylinux_2_28", "manylinux2014")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
        command += ["install", "--quiet", "--dry-run", "--ignore-installed", "--report=-"]
        command += ["--only-binary=:all:", f"--target={folder}", f"--python-version={python}"]
        command += ["--implementation=cp", *platforms, *requirements]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    installed: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return installed


def missing(python: str, installed: list[dict[str, Any]]) -> set[str]:
    """What is required there only: pip reads markers as the Python that runs it."""
    environment = {"python_version": python, "python_full_version": f"{python}.99", "extra": ""}
    names = {canonical(item["metadata"]["name"]) for item in installed}
    required = [
        Requirement(text)
        for item in installed
        for text in item["metadata"].get("requires_dist", [])
    ]
    return {
        f"{need.name}{need.specifier}"
        for need in required
        if canonical(need.name) not in names
        and (need.marker is None or need.marker.evaluate(environment))
    }


def resolve_all(python: str, machine: str, *requirements: str) -> list[dict[str, Any]]:
    """The same, and what markers of that Python add."""
    wanted = list(requirements)
    while True:
        installed = resolve(python, machine, *wanted)
        more = missing(python, installed)
        if not more:
            return installed
        wanted += sorted(more)


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def locked(whole: list[Path], alone: list[Path]) -> dict[tuple[str, str], set[str]]:
    """The hashes of each package and version."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for python, machine in TARGETS:
        found = resolve_all(python, machine, *(f"--requirement={path}" for path in whole))
        for path in alone:
            found += resolve(python, machine, "--no-deps", f"--requirement={path}")
        for item in found:
            name = canonical(item["metadata"]["name"])
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            hashes.setdefault((name, item["metadata"]["version"]), set()).add(digest)
    return hashes


def main() -> int:
    for path, (whole, alone) in LISTS.items():
        lines = [HEADER]
        for (name, version), digests in sorted(locked(whole, alone).items()):
            pins = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(digests))
            lines.append(f"{name}=={version}{pins}\n")
        path.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
