"""What all commands have in common: exit statuses, JSON, colours, and completion by a shell."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anyflash
from anyflash import __main__ as command_line
from anyflash._cli import completion, terminal
from calls.bench_cases import TINY, document_of, entry_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "anyflash"]


# -- exit statuses; those of 1 are tested with the commands
def test_statuses_are_in_the_help_and_in_the_reference() -> None:
    text = command_line._parser().format_help()
    page = (ROOT / "python/docs/reference/command_line.md").read_text(encoding="utf-8")
    for status, means in command_line.EXIT_STATUS.items():
        assert f"  {status:<5}{means}\n" in text
        assert f"| {status} | {means} |\n" in page
    assert page.count("\n| 1") == sum(str(s)[0] == "1" for s in command_line.EXIT_STATUS)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"]])
def test_questions_about_the_program_succeed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 0


def test_an_interrupt_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(anyflash, "build_info", interrupted)
    assert command_line.main([]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--json"], ["--help"]])
def test_a_reader_may_go_away(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PROGRAM, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_other_pipes_that_break_are_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise BrokenPipeError("of another process")

    monkeypatch.setattr(anyflash, "build_info", broken)
    with pytest.raises(BrokenPipeError, match="of another process"):
        command_line.main([])


# -- JSON; that of doctor and demo is tested with them
@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document_of([entry_of(TINY, anyflash=1e-3)])))
    return path


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("option", [["--json"], ["--json", "-"]])
def test_bench_prints_json(
    recorded: Path, capsys: pytest.CaptureFixture[str], option: list[str], before: bool
) -> None:
    command = ["bench", "--load", str(recorded), "--compare", str(recorded)]
    command = ["--json", *command] if before else [*command, *option]
    assert command_line.main(command) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads(recorded.read_text())
    assert "the same machine, versions, commit and command" in shown.err
    assert not Path("-").exists()


def test_a_preset_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["bench", "--load", "nowhere.json", "--json", "paper"]) == 2
    assert "write the preset before --json" in capsys.readouterr().err
    assert not Path("paper").exists()


def test_completion_has_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main(["--json", "completion", "bash"])
    assert stop.value.code == 2
    assert "has no --json" in capsys.readouterr().err


# -- colours
def on_a_terminal(*arguments: str, hide: str = "", **environment: str) -> str:
    """What a terminal of 80 columns is sent; the package `hide` does not exist."""
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda n, *a: None if n == {hide!r} else found(n, *a)\n"
        f"from anyflash.__main__ import main; sys.exit(main({list(arguments)}))"
    )
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    inherited |= {"TERM": "xterm", "COLUMNS": "80", **environment}
    terminal_end, program_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=program_end, env=inherited
    ) as running:
        os.close(program_end)
        sent = b""
        try:
            while piece := os.read(terminal_end, 4096):
                sent += piece
        except OSError:  # the program has ended
            pass
        os.close(terminal_end)
    assert running.returncode == 0
    return sent.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours() -> None:
    pytest.importorskip("rich")
    assert "\x1b[32mattention computes\x1b[0m" in on_a_terminal("doctor")
    assert "\x1b[" in on_a_terminal("--help")


@pytest.mark.parametrize(
    "reason", [{"NO_COLOR": "1"}, {"hide": "rich"}], ids=["NO_COLOR", "without rich"]
)
def test_a_terminal_gets_plain_text(reason: dict[str, str]) -> None:
    shown = on_a_terminal("doctor", **reason)
    assert "  CPU  attention computes\n" in shown
    assert "\x1b" not in shown
    if "NO_COLOR" in reason or sys.version_info < (3, 14):
        assert "\x1b" not in on_a_terminal("--help", **reason)


def test_rows_of_plain_text_are_aligned() -> None:
    section = terminal.Section("title", [("a", "bb"), ("ccc", "d")], header=("x", "y"))
    assert terminal.plain([section, terminal.Section("alone")]) == (
        "title\n  x    y\n  a    bb\n  ccc  d\n\nalone"
    )


# -- completion
def script(shell: str) -> str:
    return completion.script(shell, command_line._parser())


def completed(line: str, folder: Path) -> set[str]:
    """What bash offers for the last word of a command line after `anyflash`."""
    (folder / "script").write_text(script("bash"))
    program = """
        source ./script
        [[ $(complete -p anyflash) == *'-F _anyflash anyflash' ]] || exit 1
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _anyflash
        for word in "${COMPREPLY[@]}"; do echo "$word"; done
    """
    done = subprocess.run(
        ["bash", "-c", program, "bash", "anyflash", *line.split(" ")],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return set(done.stdout.splitlines())


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@needs_bash
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("do", {"doctor"}),
        ("--json do", {"doctor"}),
        ("demo --backend ", {"cuda", "cpu"}),
        ("demo --query ", set()),
        ("demo --query x --t", {"--top"}),
        ("bench pa", {"paper"}),
        ("bench demo --pl", {"--plot"}),
        ("bench --json --pl", {"--plot"}),
        ("bench --load a", {"a b.json", "another.json"}),
        ("completion ", {"bash", "zsh", "fish", "--help", "-h"}),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    for name in ("a b.json", "another.json", "else.json"):
        (tmp_path / name).touch()
    assert completed(line, tmp_path) == expected


@needs_bash
@pytest.mark.parametrize("command", completion._commands(command_line._parser()))
def test_every_option_is_completed(tmp_path: Path, command: str) -> None:
    parser = completion._commands(command_line._parser())[command]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert completed(f"{command} -".lstrip(), tmp_path) == flags
    fish = [line for line in script("fish").splitlines() if f"_from {command}'" in line]
    for flag in flags if command else ():
        kind = "l" if flag.startswith("--") else "s"
        assert sum(f" -{kind} {flag.lstrip('-')} " in line for line in fish) == 1


def test_other_shells_are_told_the_same() -> None:
    assert "\n    bench:--backend) compadd -- cuda cpu ;;\n" in script("zsh")
    assert "\n    bench:--load) _files ;;\n" in script("zsh")
    assert " -l backend -x -a 'cuda cpu' -d 'default: cuda where it is'\n" in script("fish")
    assert " -l load -rF -d " in script("fish")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_their_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert command_line.main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    subprocess.run([shell, "-n", str(path)], check=True)
