"""The example that trains a GPT (examples/train): it learns, an interrupt costs nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

FOLDER = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train"
# Prints the losses of several runs, or why there is none.
SEVERAL = """
import json, sys
import train

def run(arguments):
    try:
        return train.main(arguments)
    except SystemExit as end:
        return str(end)

print(json.dumps([run(arguments) for arguments in json.loads(sys.argv[1])]))
"""
# Sends itself a signal at the beginning of a step.
SIGNALLED = """
import json, os, sys
import data, train

def batch(tokens, step, *others, made=data.batch):
    if step == 2:
        os.kill(os.getpid(), int(sys.argv[1]))
    return made(tokens, step, *others)

data.batch = batch
train.main(json.loads(sys.argv[2]))
"""
SIGNALS = {"torch": signal.SIGTERM, "jax": signal.SIGINT}
STEPS = 150
LEARNED = 5.6  # nats per token after so many steps; without the order of tokens it is 5.8


def python(
    program: str, *arguments: str, folder: Path = FOLDER
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    # There is little to do: threads would only wait for each other.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )


def several(wanted: list[list[str]], folder: Path = FOLDER) -> list[Any]:
    """In one process, which takes most of its time to begin."""
    done = python(SEVERAL, json.dumps(wanted), folder=folder)
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return results


class Runs(NamedTuple):
    whole: list[float]
    after_signal: list[float]
    standard: list[float]
    recomputed: list[float]
    folder: Path
    signalled: subprocess.CompletedProcess[str]
    saved: list[float]  # the losses that it kept


def mark(file: Path) -> list[float]:
    """Replaces the losses that `file` keeps, so that one sees who goes on from it; returns them.
    Beside it then lies a file that was not written to its end."""
    if not file.exists():
        return []
    with safe_open(file, "np") as found:
        metadata = found.metadata()
    losses: list[float] = json.loads(metadata["losses"])
    marks = json.dumps(list(range(len(losses))))
    save_file(load_file(file), file, metadata | {"losses": marks})
    file.with_suffix(".part").write_bytes(file.read_bytes()[:5000])
    return losses


@pytest.fixture(scope="module", params=["torch", "jax"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("train")
    common = (f"--framework={request.param}", "--batch-size=4", "--lr=3e-3")
    options = json.dumps([f"--folder={folder / 'signalled'}", *common])
    signalled = python(SIGNALLED, str(SIGNALS[request.param].value), options)
    saved = mark(folder / "signalled" / "checkpoint.safetensors")
    wanted = [
        ("whole", f"--steps={STEPS}"),
        ("signalled", "--steps=6"),
        ("standard", "--steps=3", "--attention=standard"),
        ("recomputed", "--steps=3", "--recompute"),
    ]
    losses = several([[f"--folder={folder / name}", *common, *more] for name, *more in wanted])
    return Runs(*losses, folder, signalled, saved)


def test_learns(runs: Runs) -> None:
    assert len(runs.whole) == STEPS
    assert 6.8 < runs.whole[0] < 7.1  # 1,024 tokens that are all as probable: 6.93
    assert sum(runs.whole[-10:]) / 10 < LEARNED
    assert (runs.folder / "whole" / "loss.png").stat().st_size > 5000


def test_frequencies_of_tokens_alone_cost_more(tmp_path: Path) -> None:
    """What a model would cost that knows how often each token occurs, and no order."""
    program = "import data, pathlib; print(*data.load(pathlib.Path('.'), 1024)[1])"
    tokens = [int(token) for token in python(program, folder=tmp_path).stdout.split()]
    share = np.bincount(tokens) / len(tokens)
    share = share[share > 0]
    assert -(share * np.log(share)).sum() > LEARNED + 0.15


def test_a_signal_costs_nothing(runs: Runs) -> None:
    """The step that it came in is done and saved; a torn file of the next save spoils nothing."""
    assert runs.signalled.returncode in {128 + number for number in SIGNALS.values()}
    assert "interrupted after 3 steps" in runs.signalled.stdout
    assert "Traceback" not in runs.signalled.stderr
    assert runs.saved == runs.whole[:3]
    assert runs.after_signal == [0, 1, 2, *runs.whole[3:6]]
    files = {path.name for path in (runs.folder / "signalled").iterdir()}
    assert files == {"checkpoint.safetensors", "tokenizer.json", "loss.png"}


def test_a_second_signal_ends_at_once() -> None:
    program = "import os, loop\nwith loop.Interrupts():\n    for i in range(2):"
    done = python(f"{program}\n        os.kill(os.getpid(), 15)\n        print(i)")
    assert done.returncode == -signal.SIGTERM
    assert done.stdout in ("", "0\n")  # nothing was written after the second


def test_as_standard_attention(runs: Runs) -> None:
    assert runs.standard == pytest.approx(runs.whole[:3], rel=1e-4)


def test_activation_checkpointing(runs: Runs) -> None:
    assert runs.recomputed == pytest.approx(runs.whole[:3], rel=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_learns_on_a_gpu(framework: str, tmp_path: Path) -> None:
    """Also behind a checkpoint, whose AdamW goes on."""
    common = [f"--framework={framework}", "--device=cuda", "--batch-size=4", "--lr=3e-3"]
    wanted = [
        ["--folder=run", "--compile", "--steps=20"],
        ["--folder=run", "--compile", "--steps=40"],
        ["--folder=whole", "--attention=standard", "--recompute", "--steps=40"],
    ]
    found = several([[*common, *more] for more in wanted], tmp_path)
    if "jax finds no GPU" in found[0]:
        pytest.skip("JAX has no CUDA")
    begun, run, whole = found
    assert run[:20] == begun
    assert 6.8 < run[0] < 7.1
    assert sum(run[-5:]) / 5 < 6.2
    assert run == pytest.approx(whole, rel=0.02)


def checkpoint(folder: Path, **of: object) -> None:
    """One that holds nothing but what it is of."""
    folder.mkdir()
    origin = {"framework": "torch", "model": "tiny", "seqlen": 128, "vocabulary": "0123"} | of
    metadata = {"origin": json.dumps(origin), "losses": "[]"} if of else None
    save_file({"x": np.zeros(1)}, folder / "checkpoint.safetensors", metadata)


# Options, and what is said.
REFUSALS = {
    "--folder=jax": "is of framework jax, and not of torch; choose another --folder",
    "--folder=125m": "is of model 125m, and not of tiny; choose another --folder",
    "--folder=tiny --seqlen=64": "is of seqlen 128, and not of 64; choose another --folder",
    "--folder=tiny": "is of vocabulary 0123, and not of",
    "--folder=unnamed": "is not of this train.py; choose another --folder",
    "--folder=damaged": "is damaged; choose another --folder, or delete the file",
    "--folder=many": "tokenizer.json has 2000 tokens, the model 1024; use another --folder",
    "--seqlen=1000000": "--seqlen 1000000: the text has",
    "--attention=cudnn": "--attention cudnn needs a GPU; add --device cuda",
    "--framework=jax --attention=flash": "in jax there is anyflash, cudnn, standard",
    "--device=cuda": "--device cuda: torch finds no GPU",
    "--framework=jax --device=cuda": "--device cuda: jax finds no GPU",
    "--steps=0": "2",  # the status of a wrong usage
}


def test_says_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence each, without a model being made."""
    for name, of in (("jax", "framework"), ("125m", "model"), ("tiny", "model")):
        checkpoint(tmp_path / name, **{of: name})
    checkpoint(tmp_path / "unnamed")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.safetensors").write_bytes(b"no tensors")
    (tmp_path / "many").mkdir()
    numbers = Tokenizer(WordLevel({str(i): i for i in range(2000)}, unk_token="0"))
    numbers.save(str(tmp_path / "many" / "tokenizer.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    said = several([options.split() for options in REFUSALS], tmp_path)
    for options, reason, text in zip(REFUSALS, REFUSALS.values(), said, strict=True):
        assert reason in text, options
        assert "\n" not in text


def test_says_how_to_install_what_is_missing() -> None:
    names = ["tokenizers", "matplotlib", "rich", "anyflash", "torch", "jax"]
    program = """
import sys, train
for name in sys.argv[1:]:
    sys.modules[name] = None
    try:
        train.main(["--framework=jax"] if name == "jax" else [])
    except SystemExit as end:
        print(end)
    del sys.modules[name]
"""
    lines = python(program, *names).stdout.splitlines()
    for name, line in zip(names, lines, strict=True):
        begin = f"the package {name} is missing; in the repository's root run: pip install "
        assert line.startswith(begin)
        assert ("." if name == "anyflash" else name) in line.removeprefix(begin).split()
