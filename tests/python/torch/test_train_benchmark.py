"""The training example's measurements (examples/train): speed by model, and losses by attention."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules, whose names are everyday ones: they are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is little to do: threads would only wait for each other
    sys.path.insert(0, str(FOLDER))
    names = ("benchmark", "choices", "compare_losses", "config", "speed")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(FOLDER):
            del sys.modules[name]


def test_flops_as_flash_attention_2_counts_them(example: Any) -> None:
    """By hand: 6 * 10^9 + 12 * 24 * 2048 * 2048 for each token."""
    config = example.config.CONFIGS["1.3b"]
    assert example.speed.flops_per_token(config, 10**9) == 7_207_959_552
    speed = example.speed.speed(config, 10**9, (4, 2.0), 989.0)  # four sequences in two seconds
    assert speed.tokens_per_second == 4096
    assert speed.tflops == pytest.approx(29.523802324992)
    assert speed.mfu == pytest.approx(0.0298521762)
    assert str(speed) == "4,096 tokens/s, 29.5 TFLOP/s, 3.0% MFU"
    unknown = example.speed.speed(config, 10**9, (4, 2.0), None)
    assert unknown.mfu is None
    assert str(unknown) == "4,096 tokens/s, 29.5 TFLOP/s"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", None),  # it has fewer multiprocessors
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        (None, None),
    ],
)
def test_peak_of_a_device(example: Any, name: str | None, peak: float | None) -> None:
    assert example.speed.peak_tflops(name) == peak


def test_measures_each_cell(example: Any, tmp_path: Path) -> None:
    sizes = ("--models=tiny", "--seqlens=32", "--tokens=64", "--warmup=1", "--steps=3")
    command = [sys.executable, str(FOLDER / "benchmark.py"), *sizes, "--json=cells.json"]
    done = subprocess.run(
        [*command, "--recompute", "--attention", "anyflash", "standard"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny 32 anyflash" in done.stdout
    document = json.loads((tmp_path / "cells.json").read_text())
    about = document["about"]
    assert about["command"].startswith("python benchmark.py --models=tiny")
    assert about["gpu"] is None
    assert about["versions"]["torch"] == torch.__version__
    assert {"anyflash", "python"} <= set(about["versions"])
    assert {"commit", "date", "system"} <= set(about)
    cells = document["cells"]
    assert [cell["attention"] for cell in cells] == ["anyflash", "standard"]
    config = example.config.Config(layers=4, dim=128, heads=4, seqlen=32, vocab_size=1024)
    for cell in cells:
        assert (cell["model"], cell["seqlen"], cell["batch_size"]) == ("tiny", 32, 2)
        # Embeddings; of each layer four products, their biases and two norms; the last norm.
        layer = 12 * 128**2 + 9 * 128 + 4 * 128
        assert cell["parameters"] == (1024 + 32) * 128 + 4 * layer + 2 * 128
        assert len(cell["seconds_of_steps"]) == 3
        rate = 3 * 64 / sum(cell["seconds_of_steps"])
        assert cell["tokens_per_second"] == pytest.approx(rate)
        flops = example.speed.flops_per_token(config, cell["parameters"])
        assert cell["tflops"] == pytest.approx(rate * flops / 1e12)
        assert cell["mfu"] is None


def test_steps_of_the_warm_up_do_not_count(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 107.0, 108.0, 110.0])  # ends of two steps of warm-up, and of two more
    monkeypatch.setattr(example.benchmark.time, "perf_counter", lambda: next(clock))
    trainer = SimpleNamespace(step=lambda batch, lr: 0.0)
    assert example.benchmark.times(trainer, None, 2, 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (ValueError("no kernel\nmore"), "ValueError: no kernel"),
    ],
)
def test_a_failure_is_a_result(
    example: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, failure: str
) -> None:
    def trainer(_: object) -> None:
        raise error

    gpt = SimpleNamespace(Trainer=trainer, gpu=lambda: None, versions=dict)
    monkeypatch.setattr(example.choices, "framework_module", lambda *_: gpt)
    options = Namespace(
        framework="torch", device="cpu", tokens=64, recompute=False, compile=False, warmup=1,
        steps=1,
    )  # fmt: skip
    measured = example.benchmark.measure(options, example.benchmark.Cell("tiny", 32, "standard"))
    assert measured["result"] == {"failure": failure}
    assert measured["device"]["gpu"] is None


def test_a_killed_process_is_a_result(example: Any) -> None:
    def outcome(program: str) -> Any:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return example.benchmark.outcome(done)["result"]

    assert outcome("import os; os.kill(os.getpid(), 9)") == {"failure": "ended by SIGKILL"}
    assert outcome("raise SystemExit('no GPU')") == {"failure": "no GPU"}
    assert outcome("raise SystemExit(1)") == {"failure": "it said nothing"}
    assert outcome("print('noise'); print('{\"result\": 1}')") == 1


@pytest.mark.parametrize(("failure", "status"), [("out of memory", 0), ("ended by SIGKILL", 1)])
def test_what_failed_is_recorded_and_the_rest_goes_on(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: str, status: int
) -> None:
    def in_a_process(_: object, cell: Any) -> dict[str, Any]:
        works = {"tflops": 412.3, "mfu": 0.417}
        return {"device": None, "result": {"failure": failure} if cell.seqlen == 64 else works}

    monkeypatch.setattr(example.benchmark, "in_a_process", in_a_process)
    file = tmp_path / "cells.json"
    given = ["--models=tiny", "--seqlens", "64", "32", "--attention=flash", f"--json={file}"]
    assert example.benchmark.main(given) == status
    first, second = json.loads(file.read_text())["cells"]
    assert first["failure"] == failure
    assert (second["seqlen"], second["mfu"]) == (32, 0.417)


def test_a_cell_has_its_time(example: Any) -> None:
    options = example.benchmark.parse(["--timeout=1", "--models=tiny"])
    options.timeout = 0.01
    cell = example.benchmark.Cell("tiny", 32, "standard")
    assert example.benchmark.in_a_process(options, cell)["result"] == {
        "failure": "no end in 0.01 s"
    }


def test_compares_every_so_many_steps(example: Any) -> None:
    runs = ([9.0, 5.0, 9.0, 3.0, 9.0], [0.0, 5.1, 0.0, 3.3, 0.0], [0.0, 5.5, 0.0, 3.2, 0.0])
    found = example.compare_losses.compare(runs, 2)
    assert found.steps == [2, 4]
    assert found.difference == pytest.approx(0.3)
    assert found.gap == pytest.approx(0.4)
    assert found.within
    anyflash, flash, other = runs
    assert not example.compare_losses.compare((other, flash, anyflash), 2).within
    # A loss that is no number lies nowhere.
    assert not example.compare_losses.compare(([1.0, float("nan")], *([1.0, 2.0],) * 2), 1).within


def test_losses_lie_within_the_gap_of_seeds(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "losses.json"
    sizes = ("--model=tiny", "--steps=4", "--every=2", "--batch-size=2")
    assert example.compare_losses.main([*sizes, f"--json={file}"]) == 0
    assert "anyflash is within the seeds' gap" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["losses"]["steps"] == [2, 4]
    assert document["difference"] < 1e-4 < document["gap"]
    assert document["about"]["versions"]["torch"] == torch.__version__


def test_other_losses_fail(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {("anyflash", 0): 5.0, ("flash", 0): 4.0, ("flash", 1): 4.5}

    def train(arguments: list[str]) -> list[float]:
        options = parse(arguments)
        assert (options.model, options.steps) == ("tiny", 2)
        return [6.0, losses.pop((options.attention, options.seed))]

    parse = example.compare_losses.train.parse
    monkeypatch.setattr(example.compare_losses.train, "main", train)
    assert example.compare_losses.main(["--model=tiny", "--steps=2", "--every=1"]) == 1
    assert "anyflash is NOT within the seeds' gap" in capsys.readouterr().out
    assert not losses
