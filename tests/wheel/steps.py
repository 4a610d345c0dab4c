"""Says which steps of the wheels workflow can run on this machine, and runs them.

    python tests/wheel/steps.py                    the list; nothing is run
    python tests/wheel/steps.py --run locked sdist these, then the list with what came of them

`wheel` and `sdist-install` compile everything. What is written lies in build/steps.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/wheels.yml"
HASHED = "--require-hashes --no-deps --only-binary=:all:"
LOCKED = f"{HASHED} -r third_party/requirements-locked.txt"
# Each with the Python that runs this script, in the repository's root.
COMMANDS = {
    "locked": f"""
        "$PYTHON" -m venv --clear build/steps/locked
        build/steps/locked/bin/python -m pip install -q {LOCKED}""",
    "test-tools": f"""
        "$PYTHON" -m venv --clear build/steps/test-tools
        build/steps/test-tools/bin/python -m pip install -q {HASHED} \\
          -r tests/requirements/wheel-locked.txt""",
    # From what is committed, as a checkout has it.
    "sdist": """
        rm -rf build/steps/source build/steps/dist
        mkdir -p build/steps/source
        git archive HEAD | tar -x -C build/steps/source
        build/steps/locked/bin/python -m build --sdist --no-isolation --skip-dependency-check \\
          -o build/steps/dist build/steps/source""",
    "sdist-install": """
        "$PYTHON" -m venv --clear build/steps/installed
        build/steps/installed/bin/python -m pip install -q build/steps/dist/*.tar.gz numpy
        cd build/steps && installed/bin/python -m anyflash doctor""",
    "wheel": "make check-wheel",
}


@dataclass(frozen=True)
class Rule:
    """What becomes here of the steps whose action or command contains `text`."""

    text: str
    command: str  # of COMMANDS; empty if it does not run here
    note: str  # why it does not, or in what it differs


RULES = [
    Rule("Jimver/cuda-toolkit", "", "needs Windows"),
    Rule("python -m pip wheel --no-deps -w dist", "", "needs Windows"),
    Rule("actions/checkout", "", "the working tree is here"),
    Rule("actions/setup-python", "", "the Python of this script is used, and no other"),
    Rule("GITHUB_REF_NAME", "", "there is no tag here"),
    Rule("actions/upload-artifact", "", "files stay where they are"),
    Rule("actions/download-artifact", "", "files stay where they are"),
    Rule("SOURCE_DATE_EPOCH=", "", "this script sets it for every command"),
    Rule("pypa/cibuildwheel", "wheel", "this C library and nvcc, and one kind of machine"),
    Rule("tests/requirements/wheel-locked.txt", "test-tools", "one Python"),
    Rule("pytest tests/wheel", "wheel", "part of make check-wheel, one Python"),
    Rule("requirements-locked.txt", "locked", "one Python"),
    Rule("python -m build --sdist", "sdist", "what is committed"),
    Rule("installed/bin/pip install dist", "sdist-install", "one Python"),
    Rule("actions/attest-build-provenance", "", "needs the identity of a run on GitHub"),
    Rule("pypa/gh-action-pypi-publish", "", "needs the identity of a run on GitHub; it publishes"),
]


def steps(workflow: Path = WORKFLOW) -> Iterator[tuple[str, str]]:
    """The job and the action or command of every step."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    for job, body in jobs.items():
        for step in body["steps"]:
            yield job, step["uses"] if "uses" in step else " ".join(step["run"].split())


def rule(step: str) -> Rule:
    """Raises KeyError for a step that the rules do not know."""
    found = next((rule for rule in RULES if rule.text in step), None)
    if found is None:
        raise KeyError(f"tests/wheel/steps.py has no rule for the step {step!r}")
    return found


def run(name: str) -> str:
    epoch = ["git", "log", "-1", "--format=%ct"]
    time = subprocess.run(epoch, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    settings = {"SOURCE_DATE_EPOCH": time.strip(), "PYTHON": sys.executable}
    command = ["bash", "-euo", "pipefail", "-c", COMMANDS[name]]
    print(f"-- {name}", flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False)
    return "ran and passed" if done.returncode == 0 else f"FAILED, exit status {done.returncode}"


def report(outcomes: dict[str, str]) -> Iterator[str]:
    """A line a step."""
    for job, step in steps():
        what = rule(step)
        outcome = "not run here"
        if what.command:
            outcome = f"{what.command}: {outcomes.get(what.command, 'was not run')}"
        shown = re.sub(r"^([\w./-]+)@\S+$", r"\1", step)
        yield f"{job:8} {shown[:48]:48} {outcome}; {what.note}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", default=[], choices=list(COMMANDS), metavar="NAME")
    wanted = parser.parse_args().run
    outcomes = {name: run(name) for name in COMMANDS if name in wanted}
    for line in report(outcomes):
        print(line)
    return 1 if any("FAILED" in outcome for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
