"""The checker finds commits that are not in the history, and takes nothing else for one."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
from check_commits import COMMIT, DATA, cited
from checker_runs import status_and_lines

CHECKER = Path(__file__).with_name("check_commits.py")
# The hash of nothing that a test commits.
UNKNOWN = "0123abc" + 33 * "7"


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    command = ["git", "-C", str(root), *settings, "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    """A new one, whose first 7 digits have a digit and a letter."""
    for message in range(20):
        git(root, "commit", "--allow-empty", "--message", str(message))
        made = git(root, "rev-parse", "HEAD")
        if COMMIT.fullmatch(made[:7]):
            return made
    raise AssertionError("no such commit of 20")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--initial-branch", "main")
    commit(root)
    return root


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


run = functools.partial(status_and_lines, CHECKER)


@pytest.mark.parametrize("digits", [7, 12])
def test_commits_of_the_history(repository: Path, digits: int) -> None:
    first, head = git(repository, "rev-parse", "HEAD"), commit(repository)
    write(repository, "a.md", f"At {first[:digits]}, [the same](b.md) since {head[:digits]}.\n")
    write(repository, f"{DATA}a.json", f'{{"commit": "{head}", "other": "{head[:digits]}"}}\n')
    assert run(repository) == (0, [])


@pytest.mark.parametrize(
    ("name", "digits"),
    [
        ("a.md", 7),
        ("a.md", 12),
        ("folder/README.md", 7),
        (f"{DATA}a.json", 7),
        (f"{DATA}a.json", 40),
    ],
)
def test_unknown_commits(repository: Path, name: str, digits: int) -> None:
    head, unknown = git(repository, "rev-parse", "HEAD"), UNKNOWN[:digits]
    write(repository, name, f"Of {head[:9]}.\n\n| `{unknown}`, {head[:9]} | ({unknown}-dirty) |\n")
    finding = f"{name}:3: {unknown} is no commit of this history"
    assert run(repository) == (1, [finding, finding])


def test_a_commit_of_another_branch(repository: Path) -> None:
    git(repository, "checkout", "-b", "other")
    other = commit(repository)[:7]
    write(repository, "a.md", f"{other}\n")
    assert run(repository) == (0, [])
    git(repository, "checkout", "main")
    assert run(repository) == (1, [f"a.md:1: {other} is no commit of this history"])


@pytest.mark.parametrize(
    "text",
    [
        "123abc",  # too short
        "0123456789abc",  # neither abbreviated nor whole
        UNKNOWN,  # of another project
        "1234567",
        "abcdefa",
        "0123ABC",
        "0x123abcd, x_123abcd, 0123abcg",
    ],
)
def test_other_words(repository: Path, text: str) -> None:
    write(repository, "a.md", f"{text}\n")
    assert run(repository) == (0, [])


@pytest.mark.parametrize("name", ["a.py", "a.json", "python/docs/a.json", f"{DATA}a.svg"])
def test_other_files(repository: Path, name: str) -> None:
    write(repository, name, f"{UNKNOWN[:7]}\n")
    assert run(repository) == (0, [])


def test_a_shallow_clone(repository: Path, tmp_path: Path) -> None:
    write(repository, "a.md", f"{UNKNOWN[:7]}\n")
    git(repository, "add", "a.md")
    commit(repository)
    clone = tmp_path / "clone"
    git(repository, "clone", "--depth", "1", repository.as_uri(), str(clone))
    assert (clone / "a.md").is_file()
    assert run(clone) == (0, ["not checked: this clone is shallow"])


def test_no_repository(tmp_path: Path) -> None:
    write(tmp_path, "a.md", f"{UNKNOWN[:7]}\n")
    assert run(tmp_path) == (0, ["not checked: this is no git repository"])


def test_this_repository_cites_commits() -> None:
    """Were they written in another way, nothing would be checked."""
    files = [name for name, _, _ in cited(CHECKER.parents[2])]
    assert files.count("tests/gpu/README.md") > 10
    assert any(name.startswith(DATA) for name in files)
