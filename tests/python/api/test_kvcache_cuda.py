"""anyflash.attention_with_kvcache on a GPU, against the same call on the CPU in float32."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from calls.kvcache import angles

pytestmark = pytest.mark.cuda

LONG = 200_000_000  # GPU clock cycles: a tenth of a second
BATCH, PAGES, PAGE_SIZE, SLOTS = 4, 64, 16, 32
CAPACITY = SLOTS * PAGE_SIZE  # of a sequence; all of them together have less


def random(torch: ModuleType, *shape: int, dtype: str = "float16", seed: int = 0) -> Any:
    values = np.random.default_rng([len(shape), seed]).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to("cuda", getattr(torch, dtype))


def integers(torch: ModuleType, values: Any) -> Any:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


def call(
    torch: ModuleType, dtype: str = "float16", new: int = 1, page_size: int = PAGE_SIZE
) -> Any:
    """Four sequences of 0, 1, 100 and 300 tokens, 8 heads on 2, head dim 64, in pages."""
    pages = PAGES * PAGE_SIZE // page_size
    table = np.random.default_rng(1).permutation(pages).astype(np.int32)
    shape = (pages, page_size, 2, 64)
    return {
        "q": random(torch, BATCH, new, 8, 64, dtype=dtype),
        "k_cache": random(torch, *shape, dtype=dtype, seed=1),
        "v_cache": random(torch, *shape, dtype=dtype, seed=2),
        "k": random(torch, BATCH, new, 2, 64, dtype=dtype, seed=1),
        "v": random(torch, BATCH, new, 2, 64, dtype=dtype, seed=2),
        "cache_seqlens": integers(torch, [0, 1, 100, 300]),
        # TileConfig for 8, 8, 128 and 496 tokens.
        "block_table": integers(torch, spread(table, [8, 8, 128, 496], page_size)),
        "causal": True,
    }


def spread(pages: Any, lengths: list[int], page_size: int) -> Any:
    """A block table; what belongs to no sequence is -1."""
    table = np.full((len(lengths), CAPACITY // page_size), -1, np.int32)
    first = 0
    for row, length in zip(table, lengths, strict=True):
        count = -(-length // page_size)
        row[:count] = pages[first : first + count]
        first += count
    assert first <= len(pages)
    return table


def on_cpu(x: Any) -> Any:
    if not hasattr(x, "cpu"):
        return x
    x = x.cpu()
    return x.float() if x.dtype.is_floating_point and x.element_size() > 1 else x.clone()


def close(torch: ModuleType, actual: Any, right: Any) -> None:
    torch.testing.assert_close(on_cpu(actual), on_cpu(right), rtol=2e-2, atol=2e-2)


def verify(torch: ModuleType, given: dict[str, Any], **options: Any) -> Any:
    arguments = given | options
    host = {name: on_cpu(x) for name, x in arguments.items()}
    out, lse = anyflash.attention_with_kvcache(**arguments, return_lse=True)
    right, right_lse = anyflash.attention_with_kvcache(**host, return_lse=True)
    assert (out.dtype, out.device) == (given["q"].dtype, given["q"].device)
    close(torch, out, right)
    close(torch, lse, right_lse)
    for name in ("k_cache", "v_cache"):
        if arguments[name].element_size() > 1:
            close(torch, arguments[name], host[name])
    return out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("new", [1, 4])
def test_paged(torch: ModuleType, dtype: str, page_size: int, new: int) -> None:
    verify(torch, call(torch, dtype, new, page_size))


@pytest.mark.parametrize("length", [0, 7, 200])
def test_contiguous_and_one_length(torch: ModuleType, length: int) -> None:
    given = call(torch)
    del given["block_table"]
    for name in ("k_cache", "v_cache"):
        given[name] = random(torch, BATCH, 256, 2, 64)
    out = verify(torch, given | {"cache_seqlens": length})
    array = anyflash.attention_with_kvcache(
        **given | {"cache_seqlens": integers(torch, [length] * BATCH)}
    )
    assert torch.equal(out, array)


@pytest.mark.parametrize("interleaved", [False, True])
def test_options(torch: ModuleType, interleaved: bool) -> None:
    cos, sin = (torch.from_numpy(x).cuda() for x in angles(CAPACITY, 24))
    tree = torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()
    tree[2, 1] = False
    verify(
        torch,
        call(torch, new=3),
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        tree_mask=tree,
        window_size=(50, -1),
        softcap=5.0,
        sinks=random(torch, 8, dtype="float32"),
        alibi_slopes=random(torch, 8, dtype="float32").abs() / 50,
    )


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_eight_bits(torch: ModuleType, kind: str) -> None:
    given = call(torch)
    for name in ("k", "v"):
        cache = given[f"{name}_cache"].float() * 40
        given[f"{name}_cache"] = cache.clamp(-128, 127).to(getattr(torch, kind))
        scale = random(torch, len(cache), 2, dtype="float32").abs() / 40 + 1e-3
        given[f"{name}_scale"] = scale
    verify(torch, given)


def test_current_stream(torch: ModuleType) -> None:
    """The work waits for the framework's current stream, and the caller for nothing."""
    given = call(torch)
    right = anyflash.attention_with_kvcache(**given)
    late = given | {
        "k": torch.zeros_like(given["k"]),
        "cache_seqlens": integers(torch, [0] * BATCH),
    }
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for name in ("k", "cache_seqlens"):
            late[name].copy_(given[name])
        out = anyflash.attention_with_kvcache(**late)
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(out, right)


@pytest.mark.parametrize("length", [100, None])
def test_stream_argument(torch: ModuleType, length: int | None) -> None:
    given = call(torch)
    if length is not None:
        pages = np.arange(PAGES)
        given["block_table"] = integers(torch, spread(pages, [112] * BATCH, PAGE_SIZE))
        given["cache_seqlens"] = length
    right = anyflash.attention_with_kvcache(**given)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    out = anyflash.attention_with_kvcache(**given, stream=stream.cuda_stream)
    assert not stream.query()
    for _ in range(8):  # would reuse memory that the work still needs
        torch.full((BATCH,), 1 << 20, dtype=torch.int32, device="cuda")
    stream.synchronize()
    assert torch.equal(out, right)


# Lengths that a captured step meets; the batch's last sequences may be idle.
STEPS = [
    [0, 0, 0, 0],
    [1, 15, 16, 17],
    [31, 32, 33, 0],
    [63, 64, 65, 127],
    [128, 300],
    [500],
    *[[length, 2 * length] for length in range(60, 70)],
]


@pytest.mark.parametrize("splits", [{}, {"num_splits": 5}, {"split_size": 64}])
@pytest.mark.parametrize("new", [1, 4])
def test_cuda_graph(torch: ModuleType, new: int, splits: dict[str, int]) -> None:
    """Captured once, replayed for other lengths, pages and batches: all are read by the replay."""
    given = call(torch, new=new) | splits
    given["out"] = torch.empty_like(given["q"])
    size = anyflash.kvcache_workspace_size(**given)
    given["workspace"] = torch.empty(size, dtype=torch.uint8, device="cuda")
    anyflash.attention_with_kvcache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        anyflash.attention_with_kvcache(**given)
    for seed, lengths in enumerate(STEPS):
        active = len(lengths)
        idle = [0] * (BATCH - active)
        pages = np.random.default_rng(seed).permutation(PAGES)
        table = spread(pages, [n + new for n in lengths] + idle, PAGE_SIZE)
        given["cache_seqlens"].copy_(integers(torch, lengths + idle))
        given["block_table"].copy_(integers(torch, table))
        for name in ("q", "k", "v"):
            given[name].copy_(random(torch, *given[name].shape, seed=seed + 10))
        for name in ("out", "workspace"):
            given[name].fill_(255)
        tensors = {name: x for name, x in given.items() if name not in ("out", "workspace")}
        host = {name: on_cpu(x) for name, x in tensors.items()}
        for name in ("q", "k", "v", "cache_seqlens", "block_table"):
            host[name] = host[name][:active]
        graph.replay()
        torch.cuda.synchronize()
        right = anyflash.attention_with_kvcache(**host)
        close(torch, given["out"][:active], right)
        assert not given["out"][active:].isnan().any()
        for name in ("k_cache", "v_cache"):
            assert torch.equal(given[name].cpu().float(), host[name]), name


def test_cuda_graph_of_one_length(torch: ModuleType) -> None:
    """The array that an int is turned into is part of the graph."""
    given = call(torch) | {"cache_seqlens": 100}
    given["block_table"] = integers(torch, spread(np.arange(PAGES), [112] * BATCH, PAGE_SIZE))
    right = anyflash.attention_with_kvcache(**given)
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros_like(right)
    with torch.cuda.graph(graph):
        anyflash.attention_with_kvcache(**given, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, right)


def test_nothing_is_allocated(torch: ModuleType) -> None:
    """With an out, a workspace and lengths of one's own."""
    given = call(torch) | {"num_splits": 4}
    given["out"] = torch.empty_like(given["q"])
    size = anyflash.kvcache_workspace_size(**given)
    given["workspace"] = torch.empty(size, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    anyflash.attention_with_kvcache(**given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_wrong_integers_are_harmless(torch: ModuleType) -> None:
    given = call(torch)
    for name, value in (
        ("cache_seqlens", 1 << 30),
        ("cache_seqlens", -5),
        ("block_table", 1 << 30),
    ):
        changed = given[name].clone()
        changed[-1] = value
        anyflash.attention_with_kvcache(**given | {name: changed})
    torch.cuda.synchronize()


def test_devices_do_not_mix(torch: ModuleType) -> None:
    given = call(torch)
    message = r"anyflash\.attention_with_kvcache: cache_seqlens is on cpu.*q is on cuda"
    with pytest.raises(ValueError, match=message):
        anyflash.attention_with_kvcache(**given | {"cache_seqlens": given["cache_seqlens"].cpu()})


@pytest.mark.parametrize("length", [None, 3])
def test_cupy(torch: ModuleType, cupy: ModuleType, length: int | None) -> None:
    given = call(torch) | {"num_splits": 3}
    if length is not None:
        given["cache_seqlens"] = length
    arrays = {
        name: cupy.asarray(x.cpu().numpy()) if hasattr(x, "cpu") else x for name, x in given.items()
    }
    right = anyflash.attention_with_kvcache(**given)
    out = anyflash.attention_with_kvcache(**arrays)
    assert type(out) is cupy.ndarray
    assert (out.get() == right.cpu().numpy()).all()
    for name in ("k_cache", "v_cache"):
        assert (arrays[name].get() == given[name].cpu().numpy()).all()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        again = anyflash.attention_with_kvcache(**arrays, stream=stream.ptr)
        stream.synchronize()
    assert (again == out).all()
