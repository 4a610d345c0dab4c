"""The training example's measurements (examples/train): speed by model, and losses by attention."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

FOLDER = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The modules, whose names are everyday ones: they are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is little to do: threads would only wait for each other
    sys.path.insert(0, str(FOLDER))
    names = ("benchmark", "choices", "compare_losses", "config", "gpt_torch", "speed")
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
        assert cell["seconds_of_first_step"] > 0
        assert cell["peak_memory_bytes"] is None
        rate = 3 * 64 / sum(cell["seconds_of_steps"])
        assert cell["tokens_per_second"] == pytest.approx(rate)
        flops = example.speed.flops_per_token(config, cell["parameters"])
        assert cell["tflops"] == pytest.approx(rate * flops / 1e12)
        assert cell["mfu"] is None


def test_steps_of_the_warm_up_do_not_count(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A beginning, and ends of two steps of warm-up and of two more.
    clock = iter([40.0, 100.0, 107.0, 108.0, 110.0])
    monkeypatch.setattr(example.benchmark.time, "perf_counter", lambda: next(clock))
    trainer = SimpleNamespace(step=lambda batch, lr: 0.0)
    assert example.benchmark.times(trainer, None, 2, 2) == (60.0, [1.0, 2.0])


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory"),
        (MemoryError(), "out of memory"),
        (ValueError("no kernel\n  at all"), "ValueError: no kernel at all"),
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
    assert measured["result"]["failure"] == failure
    assert ("traceback" in measured["result"]) == (failure != "out of memory")
    assert measured["device"]["gpu"] is None


def test_a_killed_process_is_a_result(example: Any) -> None:
    def outcome(program: str) -> Any:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return example.benchmark.outcome(done)["result"]

    assert outcome("import os; os.kill(os.getpid(), 9)") == {"failure": "ended by SIGKILL"}
    assert outcome("raise SystemExit('no GPU')") == {"failure": "no GPU"}
    assert outcome("raise SystemExit(1)") == {"failure": "it said nothing"}
    printed = "print('noise'); print('{\"result\": 1}'); print('more noise')"
    assert outcome(printed) == 1
    assert outcome(f"{printed}; raise SystemExit(1)") == 1


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


def test_goes_on_with_a_file(example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an earlier run of the same measured is kept; a file is of one choice of options, of one
    commit, and of one GPU."""
    measured = []
    device = {"gpu": "one", "versions": {}}

    def in_a_process(_: object, cell: Any) -> dict[str, Any]:
        measured.append(cell.seqlen)
        return {"device": device, "result": {"tflops": 1.0, "mfu": None}}

    monkeypatch.setattr(example.benchmark, "in_a_process", in_a_process)
    given = ["--models=tiny", "--attention=flash", f"--json={tmp_path / 'cells.json'}"]
    for seqlens in (["32"], ["32", "64"]):
        assert example.benchmark.main([*given, "--seqlens", *seqlens]) == 0
    assert measured == [32, 64]
    document = json.loads((tmp_path / "cells.json").read_text())
    assert [cell["seqlen"] for cell in document["cells"]] == [32, 64]
    assert [path.name for path in tmp_path.iterdir()] == ["cells.json"]

    with pytest.raises(SystemExit, match="is of other options"):
        example.benchmark.main([*given, "--seqlens=128", "--steps=3"])
    device = {"gpu": "another", "versions": {}}
    with pytest.raises(SystemExit, match="is of another GPU"):
        example.benchmark.main([*given, "--seqlens=128"])
    monkeypatch.setattr(example.benchmark.about, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="of another commit"):
        example.benchmark.main([*given, "--seqlens=128"])
    assert document == json.loads((tmp_path / "cells.json").read_text())


CONFIG = {"layers": 3, "dim": 64, "heads": 2, "seqlen": 64, "vocab_size": 128}


def losses(example: Any, attention: str, **options: Any) -> list[float]:
    """Of three steps."""
    config = example.config.Config(**CONFIG)
    common = {"device": "cpu", "recompute": True, "compiled": False}
    setup = example.config.Setup("torch", "small", config, attention, 0, **(common | options))
    trainer = example.gpt_torch.Trainer(setup)
    batch = np.random.default_rng(0).integers(128, size=(2, 65))
    return [trainer.step(batch, 1e-2) for _ in range(3)]


@pytest.mark.parametrize("attention", ["anyflash", "flash", "standard"])
def test_compiled_in_bfloat16(
    example: Any, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """As on a GPU: all blocks are one graph, the loss is another, and both learn as in float32."""
    expected = losses(example, attention)
    dtypes = set()
    chosen = example.gpt_torch.ATTENTION[attention]

    def attend(q: Any, k: Any, v: Any) -> Any:
        dtypes.add(q.dtype)
        return chosen(q, k, v)

    monkeypatch.setitem(example.gpt_torch.DTYPES, "cpu", torch.bfloat16)
    monkeypatch.setitem(example.gpt_torch.ATTENTION, attention, attend)
    eager = losses(example, attention)
    assert dtypes == {torch.bfloat16}
    assert eager == pytest.approx(expected, rel=1e-2)
    assert eager != expected

    torch._dynamo.reset()
    monkeypatch.setitem(example.gpt_torch.ATTENTION, attention, chosen)
    backend = CompileCounterWithBackend("aot_eager")
    compile_with = partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", lambda call, options: compile_with(call))
    assert losses(example, attention, compiled=True) == pytest.approx(eager, rel=1e-3)
    assert backend.frame_count == 2


def test_compiled_standard_attention_remains_standard(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler knows its formula, and would put a fused attention in its place."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    passes = compile_fx.joint_graph_passes
    graphs = []

    def first_passes(graph: Any, *rest: Any, **options: Any) -> Any:
        graphs.append(str(passes(graph, *rest, **options).graph))
        raise RuntimeError("what follows would take a minute")

    monkeypatch.setattr(compile_fx, "joint_graph_passes", first_passes)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    monkeypatch.setitem(example.gpt_torch.DTYPES, "cpu", torch.bfloat16)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="what follows"):
        losses(example, "standard", compiled=True)
    (graph,) = graphs
    assert "amax" in graph  # of a softmax
    assert "scaled_dot_product" not in graph


def test_a_model_is_made_on_its_device(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the same parameters, whatever its attention."""
    config = example.config.Config(**CONFIG)
    made, states = [], []

    class Watched(example.gpt_torch.GPT):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            made.append(torch.get_default_device())
            super().__init__(*given)

    monkeypatch.setattr(example.gpt_torch, "GPT", Watched)
    for attention in ("anyflash", "standard"):
        options = (attention, 3, "cpu", False, False)
        setup = example.config.Setup("torch", "small", config, *options)
        with torch.device("meta"):  # the device that it would have without being told
            states.append(example.gpt_torch.Trainer(setup).model.state_dict())
    assert made == [torch.device("cpu")] * 2
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_cell_has_its_time(example: Any) -> None:
    options = example.benchmark.parse(["--timeout=1", "--models=tiny"])
    options.timeout = 0.01
    cell = example.benchmark.Cell("tiny", 32, "standard")
    assert example.benchmark.in_a_process(options, cell)["result"] == {
        "failure": "no end in 0.01 s"
    }


@pytest.mark.cuda
def test_measures_each_cell_on_a_gpu(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    sizes = ["--models=tiny", "--seqlens=256", "--tokens=512", "--warmup=2", "--steps=3"]
    given = [*sizes, "--device=cuda", "--recompute", "--compile", f"--json={file}"]
    status = example.benchmark.main(given)
    document = json.loads(file.read_text())
    assert status == 0, document["cells"]
    assert document["about"]["gpu"] == torch.cuda.get_device_name()
    assert {"driver", "power_limit_watts"} <= set(document["about"])
    assert [cell["attention"] for cell in document["cells"]] == list(example.choices.ATTENTION)
    for cell in document["cells"]:
        assert cell["peak_memory_bytes"] > 16 * cell["parameters"]
        assert cell["seconds_of_first_step"] > max(cell["seconds_of_steps"])


@pytest.mark.cuda
def test_compares_losses_on_a_gpu(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    sizes = ("--model=tiny", "--steps=4", "--every=2", "--batch-size=2")
    assert example.compare_losses.main([*sizes, "--device=cuda", f"--json={file}"]) == 0
    assert json.loads(file.read_text())["difference"] < 0.02


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
