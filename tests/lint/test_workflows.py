"""The workflows' permissions, and that what they download is what was meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lock
import pytest
import pythons
import steps
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = [FOLDER / "ci.yml", FOLDER / "wheels.yml"]
USES = re.compile(r"uses: (\S+)@(\S+)(?: # (.+))?$", re.MULTILINE)
PIN = re.compile(r"^([\w.-]+)==([^\s\\]+)", re.MULTILINE)
WHAT_PUBLISHES = {"id-token": "write", "attestations": "write"}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="an sdist holds no workflows")


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def test_every_workflow_is_looked_at() -> None:
    assert sorted(FOLDER.iterdir()) == WORKFLOWS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_or_listed(workflow: Path) -> None:
    """By a whole commit hash, with the tag beside it; else tests/wheel/README.md names them."""
    listed = (ROOT / "tests/wheel/README.md").read_text()
    found = USES.findall(workflow.read_text())
    assert len(found) == len(re.findall(r"\buses:", workflow.read_text()))
    for action, version, tag in found:
        if re.fullmatch(r"[0-9a-f]{40}", version):
            assert re.fullmatch(r"v\d+\.\d+\.\d+", tag), f"{action} does not say its tag"
        else:
            assert tag.startswith("not verified"), f"{action}@{version}"
            assert f"`{action}@{version}`" in listed


def test_an_action_has_one_hash() -> None:
    found = {use for workflow in WORKFLOWS for use in USES.findall(workflow.read_text())}
    assert len({action for action, _, _ in found}) == len(found)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_may_do_what_it_needs(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {}
    for name, job in jobs(workflow).items():
        wanted = WHAT_PUBLISHES if name == "publish" else {"contents": "read"}
        assert job["permissions"] == wanted, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_nothing_is_published_with_a_token() -> None:
    """PyPI trusts the workflow's identity; the repository holds no secret."""
    for workflow in WORKFLOWS:
        assert "secrets." not in workflow.read_text()
        assert "password" not in workflow.read_text()


@pytest.mark.parametrize("locked", lock.LISTS, ids=lambda path: path.name)
def test_a_locked_list_has_every_pin(locked: Path) -> None:
    """After a change of a version: python third_party/lock.py."""
    text = locked.read_text()
    found = dict(PIN.findall(text))
    whole, alone = lock.LISTS[locked]
    for path in whole + alone:
        for package, version in PIN.findall(path.read_text()):
            assert found[package] == version, f"{package} of {path.name}"
    for entry in re.split(r"\n(?=\w)", text):
        assert entry.startswith("#") or re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


def test_released_files_are_built_of_locked_packages() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert (
        f'before-build = "pip install {steps.LOCKED}"'.replace(
            " third_party", " {project}/third_party"
        )
        in settings
    )
    commands = [step for job, step in steps.steps() if job == "sdist" and "@" not in step]
    built = next(i for i, step in enumerate(commands) if "-m build" in step)
    installs = [step for step in commands[:built] if "install" in step]
    assert installs == [f"python -m pip install {steps.LOCKED}"]


def test_every_step_has_a_rule() -> None:
    lines = list(steps.report({"sdist": "ran and passed"}))
    assert len(lines) == len(list(steps.steps()))
    assert sum("sdist: ran and passed" in line for line in lines) == 1
    assert any("wheel: was not run" in line for line in lines)
    with pytest.raises(KeyError, match="no rule for the step 'curl"):
        steps.rule("curl https://example.org | sh")


def test_every_rule_has_a_step() -> None:
    known = [steps.rule(step) for _, step in steps.steps()]
    assert [rule for rule in steps.RULES if rule not in known] == []
    assert {rule.command for rule in steps.RULES} - {""} == steps.COMMANDS.keys()


def test_the_matrix_has_every_python() -> None:
    """From the oldest that pyproject.toml allows on."""
    matrix = jobs(FOLDER / "wheels.yml")["clean"]["strategy"]["matrix"]["python"]
    assert tuple(matrix) == pythons.SERVED
    oldest, newest = (tuple(map(int, pythons.SERVED[i].split("."))) for i in (0, -1))
    assert f'requires-python = ">={pythons.SERVED[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert len(matrix) == newest[1] - oldest[1] + 1
    assert tuple(lock.PYTHONS) == pythons.SERVED
