"""The example of block-sparse attention (examples/block_sparse): exact, measured, drawn."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anyflash

FOLDER = Path(__file__).parents[3] / "python" / "docs" / "examples" / "block_sparse"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Its modules, whose names are everyday ones: they are forgotten afterwards."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    names = ("block_sparse", "about", "patterns", "plot")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def patterns(example: Any) -> Any:
    return example.patterns


def blocks(patterns: Any, name: str, count: int) -> np.ndarray:
    mask = patterns.block_mask(patterns.PATTERNS[name], count * patterns.BLOCK, "cpu")
    assert mask.shape == (1, 1, count, count)
    return mask[0, 0].numpy()


def test_local_and_global(patterns: Any) -> None:
    assert blocks(patterns, "local + global", 5).astype(int).tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 0, 1, 1, 1],
        [1, 0, 0, 1, 1],
    ]


def test_butterfly(patterns: Any) -> None:
    kept = blocks(patterns, "butterfly", 16).astype(int)
    assert np.flatnonzero(kept[0]).tolist() == [0, 1, 2, 4, 8]
    assert np.flatnonzero(kept[5]).tolist() == [1, 4, 5, 7, 13]
    assert (np.linalg.matrix_power(kept, 3) == 0).any()
    assert (np.linalg.matrix_power(kept, 4) > 0).all()  # four layers reach all


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("kind", ["standard", "dense", "local + global", "butterfly"])
def test_as_dense_with_the_expanded_mask(patterns: Any, kind: str, length: int) -> None:
    torch.manual_seed(0)
    *inputs, dout = torch.randn(4, 2, length, 3, 16, dtype=torch.float64)
    for x in inputs:
        x.requires_grad_()
    attend, kept = patterns.attention(kind, length, "cpu")
    keep = torch.ones(length, length, dtype=torch.bool)
    if kind in patterns.PATTERNS:
        mask = patterns.block_mask(patterns.PATTERNS[kind], length, "cpu")
        assert 0.5 < kept < 0.9
        assert kept == pytest.approx(mask.double().mean().item())
        size = (patterns.BLOCK, patterns.BLOCK)
        keep = torch.from_numpy(anyflash.expand_block_mask(mask, length, length, size))
    out, expected = attend(*inputs), dense(*inputs, keep)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(expected, inputs, dout)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # by an LSE of float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_command(device: str, tmp_path: Path) -> None:
    sizes = ("--lengths", "1024", "--heads=1", "--head-dim=16", "--repeats=1")
    command = [sys.executable, str(FOLDER / "block_sparse.py"), f"--device={device}", *sizes]
    done = subprocess.run(
        [*command, "--json", "--plot=plots"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    about = document["about"]
    assert about["command"].startswith(f"python block_sparse.py --device={device}")
    assert (about["gpu"] is None) == (device == "cpu")
    assert {"commit", "date", "processors", "versions"} <= set(about)
    cells = {cell["kind"]: cell for cell in document["cells"]}
    assert list(cells) == ["standard", "dense", "local + global", "butterfly"]
    for cell in cells.values():
        assert cell["both_s"] > 0
        assert cell["forward_s"] > 0
    assert cells["butterfly"]["kept"] == pytest.approx(5 / 16)
    scores = (4 if device == "cpu" else 2) << 20
    assert cells["butterfly"]["memory_bytes"] < scores < cells["standard"]["memory_bytes"]
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["block_sparse-dark.svg", "block_sparse.svg"]


@pytest.mark.parametrize(
    ("name", "packages"), [("torch", "torch rich matplotlib"), ("anyflash", ".")]
)
def test_says_how_to_install_what_is_missing(name: str, packages: str) -> None:
    program = f"import sys; sys.path.append({str(FOLDER)!r}); sys.modules[{name!r}] = None"
    command = [sys.executable, "-c", f"{program}; import block_sparse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    advice = f"in the repository's root run: pip install {packages}"
    assert done.stderr == f"the package {name} is missing; {advice}\n"


def test_says_that_there_is_no_gpu(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        example.block_sparse.main(["--device=cuda"])
    assert "--device cuda: PyTorch finds no GPU" in capsys.readouterr().err


def test_too_large_a_matrix_is_left_out(example: Any) -> None:
    cells = []
    for limit in (1, 2):
        problem = example.block_sparse.Problem("standard", 512, 2, 16, "cpu", 1, limit)
        cells.append(example.block_sparse.measure(problem))
    assert cells[0].both_s is None
    assert cells[1].both_s > 0


def test_shows_what_was_measured(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.block_sparse.main([f"--read={FOLDER / 'cpu.json'}"])
    printed = capsys.readouterr().out.splitlines()
    assert "31.2%" in next(line for line in printed if "butterfly" in line and "1,024" in line)
    assert " - " in next(line for line in printed if "standard" in line and "8,192" in line)


@pytest.mark.parametrize("ending", ["", "-dark"])
@pytest.mark.parametrize(("run", "plot"), [("cpu", "block_sparse"), ("gpu", "block_sparse-gpu")])
def test_plot_has_the_figures(example: Any, run: str, plot: str, ending: str) -> None:
    """The same bytes: matplotlib's version is pinned."""
    drawn = example.plot.drawings(json.loads((FOLDER / f"{run}.json").read_text())["cells"])
    right = drawn[f"block_sparse{ending}.svg"]
    assert (FOLDER / f"{plot}{ending}.svg").read_text() == right, f"run: --read {run}.json --plot"
