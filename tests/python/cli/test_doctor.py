"""`python -m anyflash doctor`, and a machine or a device that it must tell of."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import anyflash
from anyflash import __main__ as command_line
from anyflash._cli import doctor


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    assert command_line.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"anyflash {anyflash.__version__}\n")
    for word in ("built", "this machine", "packages", "environment", sys.executable, "driver"):
        assert word in text
    assert "attention computes" in text


def test_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    text, _ = doctor.report(anyflash.build_info())
    assert "OMP_NUM_THREADS" in text
    assert "secret" not in text


@pytest.mark.parametrize("fault", [0.5, ValueError("broken")])
def test_wrong_results_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Any
) -> None:
    numpy = pytest.importorskip("numpy")

    def wrong(*_: Any, **__: Any) -> Any:
        if isinstance(fault, Exception):
            raise fault
        return numpy.full((1, 1, 1, 1), fault)

    monkeypatch.setattr(anyflash, "attention", wrong)
    assert command_line.main(["doctor"]) == 1
    said = "ValueError: broken" if isinstance(fault, Exception) else "attention gives 0.5, not 0.88"
    assert said in capsys.readouterr().out


def test_without_numpy_and_without_a_driver_program() -> None:
    """The package itself needs neither."""
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'numpy' else found(name, *a)\n"
        "from anyflash.__main__ import main\n"
        "sys.exit(main(['doctor']) + 2 * ('numpy' in sys.modules))"
    )
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpy is not installed: nothing was computed" in done.stdout
    assert "nvidia-smi cannot be run" in done.stdout
