"""`python -m anyflash doctor`, and a machine or a device that it must tell of."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import anyflash
from anyflash import __main__ as command_line
from anyflash._cli import doctor, machine, terminal

ROOT = Path(__file__).resolve().parents[3]
NO_KERNELS = "this build of anyflash has no CUDA kernels; build it where nvcc is found"
OLD_DRIVER = (
    "the NVIDIA driver supports CUDA up to 12.2, but this build of anyflash needs CUDA 13.0"
)
NO_DEVICE = "no CUDA device can be used: no CUDA-capable device is detected"
GPU = {"index": 0, "name": "Some GPU", "compute_capability": "9.0", "supported": False}


@pytest.fixture
def lists_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi does."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Some GPU, 535.1, 80 GB'\necho 'Its twin, 535.1, 80 GB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def found(name: str) -> Any:
        return None if name == "numpy" else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setitem(sys.modules, "numpy", None)


def examine(**changes: Any) -> tuple[bool, str]:
    """(whether all is good, the key of what is next) of a build and a machine without a GPU."""
    cuda = {"runtime_version": "13.0", "archs": ["sm_80"]}
    info = {**anyflash.build_info(), "cuda": cuda, "devices": [], "device_error": None}
    found = doctor.examine({**info, **changes})
    assert found["good"] == all(check["good"] for check in found["checks"])
    (step,) = (name for name, sentence in doctor.NEXT.items() if sentence == found["next"])
    return found["good"], step


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    assert command_line.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"anyflash {anyflash.__version__}\n")
    for word in ("built", "this machine", "packages", "environment", sys.executable, "driver"):
        assert word in text
    assert "attention computes" in text


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["--json", "doctor"]])
def test_json_has_what_is_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], lists_a_gpu: None
) -> None:
    status = command_line.main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["good"] else 1)
    assert found["build_info"]["version"] == anyflash.__version__
    assert found["machine"]["driver"] == ["Some GPU, 535.1, 80 GB", "Its twin, 535.1, 80 GB"]
    assert found["checks"][0] == {"where": "CPU", "said": "attention computes", "good": True}
    command_line.main(["doctor"])
    assert capsys.readouterr().out.endswith(terminal.plain(doctor.sections(found)) + "\n")


def test_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    found = doctor.examine(anyflash.build_info())
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("fault", [0.5, float("nan"), ValueError("broken")])
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
    said = "ValueError: broken" if isinstance(fault, Exception) else f"gives {fault}, not 0.88"
    text = capsys.readouterr().out
    assert said in text
    assert text.endswith(f"next\n  {doctor.NEXT['report']}\n")


def test_without_numpy_and_without_a_driver_program() -> None:
    """The package itself needs neither, and attention is computed all the same."""
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
    assert "attention computes" in done.stdout
    assert "nvidia-smi cannot be run" in done.stdout
    assert done.stdout.endswith(f"next\n  {doctor.NEXT['numpy']}\n")


def test_without_numpy_a_wrong_result_is_told(
    monkeypatch: pytest.MonkeyPatch, without_numpy: None
) -> None:
    assert examine() == (True, "numpy")
    monkeypatch.setattr(doctor, "PROBLEM", ([2.0], [0.0, 1.0], [1.0, 0.0]))
    assert examine() == (False, "report")


# -- what is next
def test_all_is_well() -> None:
    assert examine() == (True, "demo")


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"cuda": None, "device_error": NO_KERNELS}, "build"),
        ({"device_error": OLD_DRIVER}, "driver"),
        ({"device_error": NO_DEVICE}, "device"),
    ],
)
def test_no_gpu_can_be_used(
    monkeypatch: pytest.MonkeyPatch, lists_a_gpu: None, changes: dict[str, Any], step: str
) -> None:
    assert examine(**changes) == (False, step)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # none is wanted
    assert examine(**changes) == (True, "demo")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "/nowhere")  # none is there
    assert examine(**changes) == (True, "demo")


@pytest.mark.parametrize(("capability", "step"), [("9.0", "build"), ("7.5", "old GPU")])
def test_gpu_without_kernels(capability: str, step: str) -> None:
    assert examine(devices=[{**GPU, "compute_capability": capability}]) == (False, step)


def test_gpu_without_pytorch(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    """NumPy and the driver serve the check; a program wants a library that holds arrays there."""
    monkeypatch.setattr(doctor, "_torch_on_gpu", lambda: None)
    devices = anyflash.build_info()["devices"]
    monkeypatch.setattr(machine, "versions", lambda packages: {"numpy": "2.0"})
    assert examine(devices=devices) == (True, "arrays")
    assert "cuMemcpyDtoH_v2" in driver.called
    monkeypatch.setattr(machine, "versions", lambda packages: {"cupy-cuda12x": "13.0"})
    assert examine(devices=devices) == (True, "demo")
    driver.fails = "cuMemcpyHtoD_v2"
    assert examine(devices=devices) == (False, "report")


def test_gpu_with_pytorch(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    numpy = pytest.importorskip("numpy")
    made = []

    def tensor(values: list[float], **options: Any) -> Any:
        made.append(options)
        return numpy.array(values, "float32")

    there = SimpleNamespace(tensor=tensor, bfloat16="bfloat16")
    monkeypatch.setattr(doctor, "_torch_on_gpu", lambda: there)
    assert examine(devices=anyflash.build_info()["devices"]) == (True, "demo")
    assert made == [{"dtype": "bfloat16", "device": "cuda:1"}] * 3
    assert driver.called == []


def test_gpu_with_neither(
    monkeypatch: pytest.MonkeyPatch, driver: Any, without_numpy: None
) -> None:
    monkeypatch.setattr(doctor, "_torch_on_gpu", lambda: None)
    monkeypatch.delitem(sys.modules, "anyflash._cli.gpu")
    assert examine(devices=anyflash.build_info()["devices"]) == (False, "numpy")


def test_every_step_is_in_the_guide() -> None:
    page = (ROOT / "python/docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    missing = [sentence for sentence in doctor.NEXT.values() if f"| {sentence} |" not in page]
    assert not missing


def test_the_core_says_of_an_old_driver_what_is_looked_for() -> None:
    source = (ROOT / "cpp/src/device_cuda.cu").read_text(encoding="utf-8")
    assert f'"{doctor.OLD_DRIVER} "' in source
