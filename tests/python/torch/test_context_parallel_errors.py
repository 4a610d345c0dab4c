"""What ContextParallel refuses, and in which words."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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


def test_meshes_of_two_axes_are_ascending(alone: Any) -> None:
    """The joined group numbers its ranks so, whatever their places in the mesh."""
    mesh = SimpleNamespace(ndim=2, get_group=None, _flatten=None)
    mesh.mesh = importlib.import_module("torch").tensor([[0, 2], [1, 3]])
    with pytest.raises(ValueError, match=r"mesh of the ranks \[\[0, 2\], \[1, 3\]\]; along both"):
        alone(mesh)


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
    }


def calls_of_other_shapes(torch: ModuleType) -> dict[str, Refused]:
    """Refused before anything travels."""
    x = torch.zeros(1, 70, 2, 8)
    return {
        "k-batch": (
            {"k": x.expand(2, 70, 2, 8)},
            ValueError,
            r"k has shape \(2, 70, 2, 8\); expected \(1, 70, 2, 8\), with q of shape \(1, 70, 2",
        ),
        "v-rows": (
            {"v": x[:, :69]},
            ValueError,
            r"v has shape \(1, 69, 2, 8\); expected \(1, 70, 2",
        ),
        "v-heads": (
            {"v": x[:, :, :1]},
            ValueError,
            r"v has shape \(1, 70, 1, 8\); expected \(1, 70",
        ),
        "head-dim": (
            {"k": x[..., :7]},
            ValueError,
            r"k has shape \(1, 70, 2, 7\); expected \(1, 70",
        ),
        "groups": (
            {"k": x.repeat(1, 1, 2, 1), "v": x.repeat(1, 1, 2, 1)},
            ValueError,
            "q has 2 heads, and k 4; a multiple of k's heads is allowed",
        ),
        "no-heads": (
            {"k": x[:, :, :0], "v": x[:, :, :0]},
            ValueError,
            "q has 2 heads, and k 0; a multiple of k's heads is allowed",
        ),
        "dtype": (
            {"v": x.double()},
            TypeError,
            "v is float64 on cpu; expected float32 on cpu, as q",
        ),
        "integers": (
            {"q": x.int(), "k": x.int(), "v": x.int()},
            TypeError,
            "q is int32; floating-point numbers are allowed",
        ),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        *("mask", "flag", "heads", "total", "batch"),
        *("rank", "type", "length", "lengths", "window", "dropout"),
        *("seeds", "bias", "blocks", "block-size", "ranges", "dtype"),
        *("k-batch", "v-rows", "v-heads", "head-dim", "groups", "no-heads", "integers"),
    ],
)
def test_wrong_calls(torch: ModuleType, alone: Any, wrong: str) -> None:
    x = torch.zeros(1, 70, 2, 8)
    given, kind, message = (calls(torch) | calls_of_other_shapes(torch))[wrong]
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
