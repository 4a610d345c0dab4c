"""What the benchmark shows and writes: tables, comparisons, plots, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from anyflash import __main__ as command_line
from anyflash.bench import _cli, _compare, _mma, _plot, _report
from anyflash.bench._presets import Wanted, cases_of
from calls.bench_cases import TINY, document_of, entry_of


def test_tables_and_markdown():
    cases = [replace(TINY, seqlen=n, causal=causal) for causal in (False, True) for n in (256, 512)]
    times = [(1e-3, 2e-3), (2e-3, 2e-3), (1e-3, 0.5e-3), (4e-3, 16e-3)]
    entries = [
        entry_of(case, anyflash=ours, flash=theirs)
        for case, (ours, theirs) in zip(cases, times, strict=True)
    ]
    document = document_of(entries, gpu="a GPU", versions={"torch": "2"})
    (table,) = _report.tables(document)
    assert list(table.header) == [
        "mask", "seqlen", "anyflash", "flash", "/ flash", "% of gemm", "spread ±%",
    ]  # fmt: skip
    speed = cases[0].flop / 1e-3 / 1e9
    first = [_report.number(x) for x in (speed, speed / 2)]
    share = f"{100 * speed / 200:.0f}"
    assert list(table.rows[0]) == ["full", "256", *first, "2.00", share, "1.0"]
    assert (
        "anyflash / flash: 1.41 in the geometric mean of 4 cases, 0.50 to 4.00, 1 below 1"
        in (table.notes[0])
    )
    text = _report.markdown(document)
    assert "- versions: torch 2" in text
    assert "- roofline gemm float32: 200 GFLOP/s" in text
    assert "| --- | --- | ---: |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {len(table.header) + 1}


def test_rich_shows_the_same_table(monkeypatch, capsys):
    entry = entry_of(TINY, anyflash=1e-3, flash=2e-3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    _report.show(document_of([entry], gpu="a GPU"))
    text = capsys.readouterr().out
    assert "gpu: a GPU" in text
    assert "2.00" in text
    assert "┃" in text


def test_comparison_with_an_earlier_run():
    cases = [replace(TINY, seqlen=n) for n in (256, 512, 1024)]
    old = document_of([entry_of(case, anyflash=2e-3, flash=1e-3) for case in cases], gpu="A")
    new = document_of(
        [entry_of(cases[0], anyflash=1e-3, flash=1e-3), entry_of(cases[1], anyflash=8e-3)], gpu="B"
    )
    text = _compare.compare(old, new)
    assert "not the same gpu: A, now B" in text
    lines = {
        line.split("seqlen=")[1].split()[0]: line for line in text.splitlines() if "seqlen=" in line
    }
    assert "2.000  faster" in lines["256"]
    assert "0.250  slower" in lines["512"]
    assert "anyflash: 0.707 of the earlier speed in the geometric mean of 2 cases" in text
    assert "only in the earlier run: 1; only in this one: 0" in text
    assert "the same machine" in _compare.compare(old, old)
    for share, word in ((0.95, "faster"), (0.995, "same"), (1.005, "same"), (1.05, "slower")):
        was, now = (entry_of(TINY, a=x)["results"]["a"] for x in (1.0, share))
        assert _compare.verdict(was, now) == word


def test_plots(tmp_path):
    cases = cases_of(
        "cpu", Wanted("cpu", ("float32",), quick=False), {"op": frozenset({"forward"})}
    )
    document = document_of([entry_of(case, anyflash=1e-3, flash=2e-3) for case in cases], cpu="C")
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        written = _plot.plot(document, tmp_path / name)
        assert written == [tmp_path / name]
        assert written[0].read_bytes().startswith(start)


def test_what_cannot_be_plotted_says_so(tmp_path):
    document = document_of([entry_of(TINY, anyflash=1e-3)], preset="features")
    with pytest.raises(ValueError, match="no lengths to plot against"):
        _plot.plot(document, tmp_path / "a.svg")


def test_the_mma_kernel_multiplies_as_often_as_it_says():
    text = _mma.ptx("bfloat16")
    assert text.count("mma.sync") == _mma.ROWS * _mma.COLUMNS
    assert text.count("f32.bf16.bf16.f32") == _mma.ROWS * _mma.COLUMNS
    assert "f32.f16.f16.f32" in _mma.ptx("float16")


# -- the command
def test_the_command_writes_and_reads_its_files(tmp_path, capsys):
    path, table = tmp_path / "new.json", tmp_path / "new.md"
    command = ["bench", "overhead", "--backend", "cpu", "--quick", "--only", "framework=numpy"]
    assert command_line.main([*command, "--json", str(path), "--markdown", str(table)]) == 0
    document = json.loads(path.read_text())
    assert document["preset"] == "overhead"
    assert document["about"]["command"].startswith("python -m anyflash bench overhead --backend")
    assert {"cpu", "threads", "date", "versions"} <= set(document["about"])
    assert document["cells"][0]["results"]["anyflash"]["samples"]
    assert "numpy" in table.read_text()
    captured = capsys.readouterr()
    assert "1/1 " in captured.err
    again = ["bench", "--load", str(path), "--compare", str(path)]
    assert command_line.main(again) == 0
    assert "the same machine, versions, commit and command" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paper", "--backend", "cpu", "--dtype", "int8"], "--dtype: 'int8' is not one of"),
        (["paper", "--backend", "cpu", "--only", "d"], "--only d: write LABEL=VALUE"),
        (["paper", "--backend", "cpu", "--cold"], "only a GPU's L2 cache"),
        (["paper", "--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["--load", "nowhere.json"], "not a run of this benchmark"),
    ],
)
def test_wrong_arguments_are_told(arguments, message, capsys):
    assert command_line.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_numpy_is_enough(tmp_path):
    """In a process to which PyTorch, rich and matplotlib do not exist."""
    code = (
        "import importlib.util, sys; real = importlib.util.find_spec; "
        "hidden = {'torch', 'rich', 'matplotlib', 'jax'}; "
        "seen = lambda name, *a: None if name.split('.')[0] in hidden else real(name, *a); "
        "importlib.util.find_spec = seen; "
        "sys.modules.update(dict.fromkeys(hidden)); "
        "from anyflash.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["bench", "cpu", "--quick", "--dtype", "float32", "--only", "seqlen=512"]
    arguments += ["--only", "d=64", "--only", "op=forward", "--only", "mask=causal"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "arrays: numpy" in done.stdout
    assert "roofline gemm float32" in done.stdout


def test_dtypes_by_default():
    assert _cli.dtypes_of(None, "cuda", "paper") == ("bfloat16",)
    assert _cli.dtypes_of(None, "cpu", "cpu") == ("float32", "bfloat16")
    assert _cli.dtypes_of("float16,bfloat16", "cuda", "paper") == ("float16", "bfloat16")
