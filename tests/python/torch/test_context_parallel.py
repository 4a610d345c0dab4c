"""anyflash.torch.distributed.ContextParallel: ranks of gloo compute what one process computes.

The cases are in support/calls/context_parallel.py; one program on each rank runs them all.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases.case import FULL
from run import ranks

pytest.importorskip("torch.distributed")
TRAINING = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train_long_text.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8] if FULL else [1, 2, 4])
def test_ranks_compute_what_one_computes(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if FULL:
        monkeypatch.setattr(ranks, "SECONDS", 3600.0)
    check_ranks(size, tmp_path, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gpus_compute_what_one_computes(size: int, tmp_path: Path, torch: ModuleType) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    check_ranks(size, tmp_path, "cuda")


@pytest.mark.cuda
def test_pytorch_shares_sequences_among_gpus(tmp_path: Path, torch: ModuleType) -> None:
    """Its own context_parallel with our kernels; on the CPU this is among the cases above."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for found in ranks.run("calls.context_parallel_pytorch", 2, tmp_path, "cuda"):
        assert set(found.values()) == {""}, found


def check_ranks(size: int, folder: Path, device: str) -> None:
    results = ranks.run("calls.context_parallel_program", size, folder, device)
    for rank, found in enumerate(results):
        assert len(found) > 250
        wrong = {name: error for name, error in found.items() if error}
        texts = "\n".join(f"{name}\n{error}" for name, error in list(wrong.items())[:3])
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(found)} cases\n{texts}"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.run("calls.context_parallel_faults", 3, tmp_path_factory.mktemp("ranks"))


def test_bits_do_not_depend_on_who_is_late(faults: list[Any]) -> None:
    """Each rank waits before more than 200 steps, none of them for no time."""
    for found in faults:
        for method, (same, delays) in found["late"].items():
            assert same, method
            assert delays > 50, method
        assert sum(delays for _, delays in found["late"].values()) > 200


# Of a rank, in bfloat16: 64 keys and values of three heads, 8 columns each.
CHUNK = 64 * 3 * (8 + 8) * 2


def check_work(
    found: Any, wanted: list[tuple[tuple[float, float], ...]], launches: list[tuple[int, int]]
) -> None:
    """``wanted``: of each rank, chunks that it sends and receives in each hop. Their gradients are
    of float32, and go the other way."""
    for of_rank, chunks, launched in zip(found, wanted, launches, strict=True):
        sizes = [[sent * CHUNK, received * CHUNK] for sent, received in chunks]
        assert of_rank["forward"] == of_rank["backward"] == sizes
        assert of_rank["gradients"] == [[2 * received, 2 * sent] for sent, received in sizes]
        assert of_rank["launches"] == list(launched)


BOTH, SENDS, RECEIVES, NEITHER = (1, 1), (1, 0), (0, 1), (0, 0)


def test_chunks_that_nobody_sees_cost_nothing(faults: list[Any]) -> None:
    """Ranks 0, 1 and 2 have a chunk of rows and one of keys each. In hop h a rank has keys of the
    rank h before it. The backward of several hops has one launch more, which writes dq."""
    check_work([x["all"] for x in faults], [(BOTH, BOTH)] * 3, [(3, 4)] * 3)
    causal = [(SENDS, SENDS), (BOTH, NEITHER), (RECEIVES, RECEIVES)]
    check_work([x["causal"] for x in faults], causal, [(1, 1), (2, 3), (3, 4)])
    window = [(SENDS, NEITHER), (BOTH, NEITHER), (RECEIVES, NEITHER)]
    check_work([x["window"] for x in faults], window, [(1, 1), (2, 3), (2, 3)])


def test_runs_are_joined(faults: list[Any]) -> None:
    """Ranks 0 and 1 have two runs of rows and of keys, rank 2 one: one launch a hop, and without
    joining one a pair. Of a rank before it, a rank needs the first run alone."""
    needed = [((0.5, 1), (0.5, 1)), ((0.5, 0.5), (1, 1)), ((1, 0.5), (1, 0.5))]
    check_work([x["zigzag"] for x in faults], needed, [(3, 4)] * 3)
    check_work([x["placed"] for x in faults], needed, [(6, 6), (6, 6), (3, 3)])


NAME = "anyflash.torch.distributed.ContextParallel"


@pytest.mark.parametrize("name", ["silent", "silent in backward", "dead"])
def test_errors_name_the_hop_and_the_neighbour(faults: list[Any], name: str) -> None:
    first, last = (
        x[name][0] if name == "dead" else x[name]["ring"][0] for x in (faults[0], faults[2])
    )
    step = "backward: " if "backward" in name else ""
    assert re.match(rf"{NAME}: rank 2: {step}hop 1 of 2: k and v to rank 0 and from rank 1: ", last)
    assert re.match(rf"{NAME}: rank 0: {step}hop [12] of 2: k and v to rank 1 ", first) or (
        re.match(rf"{NAME}: rank 0: {step}hop 2 of 2: k and v to rank 2 and from rank 1: ", first)
    ), first


@pytest.mark.parametrize(
    ("method", "step"), [("gather", "gathering k and v"), ("ulysses", "exchanging q")]
)
def test_errors_name_the_step_and_the_ranks(faults: list[Any], method: str, step: str) -> None:
    for rank in (0, 2):
        for name, doing in (("silent", ""), ("silent in backward", "backward: ")):
            error = faults[rank][name][method][0]
            assert error.startswith(f"{NAME}: rank {rank}: {doing}{step} of ranks 0 to 2: "), error


def test_errors_leave_no_thread(faults: list[Any]) -> None:
    """Of the operating system."""
    for found in (faults[0], faults[2]):
        silent = (*found["silent"].values(), *found["silent in backward"].values())
        assert [found["dead"][1], *(left for _, left in silent)] == [0] * 7


def output_of(*arguments: str) -> str:
    """Of a Python process, which finds the same packages."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example() -> None:
    """In a process of its own, since it makes a process group."""
    module = importlib.import_module("anyflash.torch.distributed._context_parallel")
    output_of("doctest", module.__file__ or "")


def losses(size: int, method: str) -> list[float]:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    program = (str(TRAINING), "--steps", "4", "--length", "500", "--method", method)
    return [float(line.split()[-1]) for line in output_of(*torchrun, *program).splitlines()]


def test_training_goes_as_on_one_rank() -> None:
    """With FSDP2, activation checkpointing and rotary positions."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    one = losses(1, "ring")
    assert len(one) == 4
    assert one[-1] < one[0] - 0.5, "it does not learn, and would show nothing"
    for size, method in ((2, "ulysses"), (3, "ring")):
        assert losses(size, method) == pytest.approx(one, abs=2e-5)


def test_checkpoints_drop_the_same(torch: ModuleType, alone: Any) -> None:
    """The state that dropout draws is drawn again."""
    cp, checkpoint = alone(method="ring"), importlib.import_module("torch.utils.checkpoint")
    q = torch.randn(1, 70, 2, 8, dtype=torch.float64, requires_grad=True)

    def attend(q: Any) -> Any:
        return cp.attention(q, q, q, causal=True, dropout_p=0.5, seqlen=70)

    grads = []
    for run in (attend, lambda q: checkpoint.checkpoint(attend, q, use_reentrant=False)):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(run(q).square().sum(), q)[0])
    assert torch.equal(*grads)


def test_whole_results(torch: ModuleType, alone: Any) -> None:
    """The state repeats what was dropped."""
    cp, q = alone(method="gather"), torch.randn(1, 70, 2, 8)
    plain = cp.attention(q, q, q, return_result=True)
    assert plain.max_logits is plain.rng_state is plain.dropout_mask is None
    found = cp.attention(q, q, q, dropout_p=0.5, return_result=True)
    again = cp.attention(q, q, q, dropout_p=0.5, rng_state=found.rng_state, return_lse=True)
    assert torch.equal(found.out, again[0]) and torch.equal(found.lse, again[1])
    assert not torch.equal(found.out, plain.out)
