"""anyflash.torch.distributed.ContextParallel: ranks of gloo compute what one process computes.

The cases are in support/calls/context_parallel.py; one program on each rank runs them all.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cases.case import FULL
from run import ranks

pytest.importorskip("torch.distributed")
TRAINING = Path(__file__).parents[3] / "python" / "docs" / "examples" / "train_long_text.py"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8] if FULL else [1, 2, 4])
def test_ranks_compute_what_one_computes(size: int, tmp_path: Path) -> None:
    check_ranks(size, tmp_path, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gpus_compute_what_one_computes(size: int, tmp_path: Path, torch: ModuleType) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    check_ranks(size, tmp_path, "cuda")


def check_ranks(size: int, folder: Path, device: str) -> None:
    results = ranks.run("calls.context_parallel", size, folder, device)
    for rank, found in enumerate(results):
        assert len(found) > 250
        wrong = {name: error for name, error in found.items() if error}
        texts = "\n".join(f"{name}\n{error}" for name, error in list(wrong.items())[:3])
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(found)} cases\n{texts}"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.run("calls.context_parallel_faults", 3, tmp_path_factory.mktemp("ranks"))


def test_bits_do_not_depend_on_who_is_late(faults: list[Any]) -> None:
    assert [found["late"] for found in faults] == [True] * 3


def test_chunks_that_nobody_sees_cost_nothing(faults: list[Any]) -> None:
    """[messages, launches] of ranks 0, 1 and 2: each has a chunk of rows, and one of keys."""
    assert [found["all"] for found in faults] == [[4, 3]] * 3
    assert [found["causal"] for found in faults] == [[2, 1], [2, 2], [2, 3]]
    assert [found["window"] for found in faults] == [[1, 1], [2, 2], [1, 2]]


def test_runs_are_joined(faults: list[Any]) -> None:
    """Ranks 0 and 1 have two runs of rows and of keys, rank 2 one: one launch a hop, and without
    joining one a pair."""
    assert [found["zigzag"] for found in faults] == [[4, 3]] * 3
    assert [found["placed"] for found in faults] == [[4, 6], [4, 6], [4, 3]]


@pytest.mark.parametrize("name", ["silent", "dead"])
def test_errors_name_the_hop_and_the_neighbour(faults: list[Any], name: str) -> None:
    name_of = "anyflash.torch.distributed.ContextParallel"
    assert re.match(
        rf"{name_of}: rank 2: hop 1 of 2: k and v to rank 0 and from rank 1: ", faults[2][name]
    )
    assert re.match(rf"{name_of}: rank 0: hop [12] of 2: k and v to rank 1 ", faults[0][name]) or (
        re.match(
            rf"{name_of}: rank 0: hop 2 of 2: k and v to rank 2 and from rank 1: ", faults[0][name]
        )
    ), faults[0][name]


def test_errors_leave_no_thread(faults: list[Any]) -> None:
    assert faults[0]["threads"] == faults[2]["threads"] == 0


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The class, in a group of one rank."""
    dist = pytest.importorskip("torch.distributed")
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield importlib.import_module("anyflash.torch.distributed").ContextParallel
    dist.destroy_process_group()


Refused = tuple[dict[str, Any], type[Exception], str]
MADE: dict[str, Refused] = {
    "method": ({"method": "rings"}, ValueError, "method is 'rings'; ring, gather, ulysses, auto"),
    "layout": ({"layout": "striped"}, ValueError, "layout is 'striped'; zigzag, contiguous are"),
    "multiple": ({"multiple": 12}, ValueError, "multiple is 12; a multiple of 8 is allowed"),
    "multiple-zero": ({"multiple": 0}, ValueError, "multiple is 0; a multiple of 8 is allowed"),
    "group": (
        {"group": 3},
        TypeError,
        "group is int; a DeviceMesh of one or two axes or a ProcessGroup is allowed",
    ),
}


@pytest.mark.parametrize("wrong", MADE)
def test_wrong_arguments(alone: Any, wrong: str) -> None:
    given, kind, message = MADE[wrong]
    with pytest.raises(kind, match=rf"^anyflash\.torch\.distributed\.ContextParallel: {message}"):
        alone(**given)


def test_meshes_of_more_axes(alone: Any) -> None:
    """Two say what is done along them."""
    init = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    names = ("data", "ring", "ulysses")
    mesh = init("cpu", (1, 1, 1), mesh_dim_names=names)
    with pytest.raises(ValueError, match="group is a mesh of 3 axes; one or two of its axes"):
        alone(mesh)
    with pytest.raises(ValueError, match="method is 'ring'; auto is allowed with a mesh of two"):
        alone(mesh["ring", "ulysses"], method="ring")


def calls(torch: ModuleType) -> dict[str, Refused]:
    x = torch.zeros(1, 70, 2, 8)
    return {
        "maxima": ({"return_max_logits": True}, NotImplementedError, "return_max_logits is set"),
        "mask": ({"return_dropout_mask": True}, NotImplementedError, "return_dropout_mask is set"),
        "result": ({"return_result": True}, NotImplementedError, "return_result is set; of other"),
        "rank": ({"q": x[0]}, ValueError, r"q has shape \(70, 2, 8\); expected \(batch, rows, hea"),
        "type": ({"v": [1.0]}, TypeError, "v is list; a torch.Tensor is allowed"),
        "length": (
            {"seqlen": 71},
            ValueError,
            "q has 70 rows on rank 0; of 71 the layout zigzag gives it 71, which shard",
        ),
        "lengths": ({"seqlen": (1, 2, 3)}, ValueError, r"seqlen is \(1, 2, 3\); an int or a pair"),
        "window": ({"window_size": 3}, TypeError, "window_size is int; a pair"),
        "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; 0 <= dropout_p < 1"),
        "seeds": (
            {"dropout_p": 0.1, "seed": 1, "rng_state": (1, 0)},
            ValueError,
            "seed and rng_state are both given",
        ),
        "bias": (
            {"bias": torch.zeros(70, 3)},
            ValueError,
            r"bias has shape \(1, 1, 70, 3\); expected .*70 or 1, 70 or 1\): this rank's rows",
        ),
        "blocks": (
            {"block_mask": torch.ones(1, 3, dtype=torch.bool)},
            ValueError,
            r"block_mask has shape \(1, 1, 1, 3\); expected .* 1, 1\), the blocks of the whole",
        ),
        "block-size": (
            {"block_mask": torch.ones(1, 1, dtype=torch.bool)},
            ValueError,
            r"block_size is \(128, 128\), and chunks have a multiple of 64 rows",
        ),
        "ranges": (
            {"key_ranges": torch.zeros(1, 1, 69, 2).int()},
            ValueError,
            r"key_ranges has shape \(1, 1, 69, 2\); expected .*, 70, 2 or 4\), of all keys",
        ),
        "dtype": ({"k": x.double()}, TypeError, "k is float64, but q is float32"),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        *("maxima", "mask", "result", "rank", "type", "length", "lengths", "window", "dropout"),
        *("seeds", "bias", "blocks", "block-size", "ranges", "dtype"),
    ],
)
def test_wrong_calls(torch: ModuleType, alone: Any, wrong: str) -> None:
    x = torch.zeros(1, 70, 2, 8)
    given, kind, message = calls(torch)[wrong]
    name = r"^anyflash\.torch\.distributed\.ContextParallel\.attention: "
    with pytest.raises(kind, match=name + message):
        alone(method="ring").attention(**{"q": x, "k": x, "v": x} | given)


def test_wrong_packed_calls(torch: ModuleType, alone: Any) -> None:
    x = torch.zeros(70, 2, 8)
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    name = r"^anyflash\.torch\.distributed\.ContextParallel\.attention_varlen: "

    def call(ends: Any = ends, **options: Any) -> None:
        alone(method="ring").attention_varlen(x, x, x, ends, ends, 40, 40, **options)

    with pytest.raises(NotImplementedError, match=name + "bias is given, which is not supported"):
        call(bias=torch.zeros(40, 40))
    with pytest.raises(NotImplementedError, match=name + 'dropout_p is 0.5; .*"gather" or'):
        call(dropout_p=0.5)
    with pytest.raises(ValueError, match=name + r"cu_seqlens_q is int64 of shape \(3,\); int32"):
        call(ends.long())


def test_heads_that_ranks_do_not_divide() -> None:
    ulysses = importlib.import_module("anyflash.torch.distributed._ulysses")
    assert ulysses.why_not(4, 8, 2) is None
    assert ulysses.why_not(4, 6, 2) == "q has 6 heads, which 4 ranks do not divide"
    assert "3 heads of k cannot be shared out among 2 ranks" in ulysses.why_not(2, 6, 3)


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_has_one_rank(name: str, size: int) -> None:
    layouts = importlib.import_module("anyflash.torch.distributed._layout")
    layout = layouts.Layout(name, size, 8)
    for length in (0, 1, 7, 8, 9, 100, 128, 1000):
        rows: list[int] = []
        for rank in range(size):
            at = 0
            for run in layout.runs(rank, length):
                assert run.at == at and run.rows > 0
                assert run.start % 8 == 0
                rows += range(run.start, run.stop)
                at += run.rows
            assert at == layout.rows(rank, length)
        assert sorted(rows) == list(range(length))
