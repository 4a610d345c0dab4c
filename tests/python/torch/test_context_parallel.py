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
    rank h before it."""
    check_work([x["all"] for x in faults], [(BOTH, BOTH)] * 3, [(3, 3)] * 3)
    causal = [(SENDS, SENDS), (BOTH, NEITHER), (RECEIVES, RECEIVES)]
    check_work([x["causal"] for x in faults], causal, [(1, 1), (2, 2), (3, 3)])
    window = [(SENDS, NEITHER), (BOTH, NEITHER), (RECEIVES, NEITHER)]
    check_work([x["window"] for x in faults], window, [(1, 1), (2, 2), (2, 2)])


def test_runs_are_joined(faults: list[Any]) -> None:
    """Ranks 0 and 1 have two runs of rows and of keys, rank 2 one: one launch a hop, and without
    joining one a pair. Of a rank before it, a rank needs the first run alone."""
    needed = [((0.5, 1), (0.5, 1)), ((0.5, 0.5), (1, 1)), ((1, 0.5), (1, 0.5))]
    check_work([x["zigzag"] for x in faults], needed, [(3, 3)] * 3)
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
        "mask": ({"return_dropout_mask": True}, NotImplementedError, "return_dropout_mask is set"),
        "flag": ({"return_result": "yes"}, TypeError, "return_result is"),
        "heads": (
            {"head_start": 2, "total_heads": 3},
            ValueError,
            "total_heads is 3, and q has heads 2 to 3; it must be larger than these",
        ),
        "total": ({"head_start": 2}, ValueError, "head_start is 2, and total_heads is not given"),
        "batch": ({"batch_start": -1}, ValueError, "batch_start is -1; 0 to"),
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
        *("mask", "flag", "heads", "total", "batch"),
        *("rank", "type", "length", "lengths", "window", "dropout"),
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
