"""Large problems: more than 2^31 elements, 70,000 sequences, a million tokens, far strides.

On a GPU with 78 GiB they run at full size, some rows and keys of each against float64; on the CPU
small ones go through the same code. tests/gpu/README.md has the command.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import anyflash

torch: Any = pytest.importorskip("torch")
anyflash_torch: Any = pytest.importorskip("anyflash.torch")

NEEDED = 60 << 30  # bytes that are free on the GPU
# bfloat16's roundings of P and of the results make 0.4 % of a row's norm; a wrong tile makes all.
MOST, MOST_OF_GRADIENTS = 0.02, 0.03


@dataclass(frozen=True)
class Size:
    """Of q, k and v: (batch, seqlen, heads, head_dim)."""

    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int = 64
    causal: bool = False
    window: int = -1

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window_size": (self.window, -1)}

    def keys_of(self, row: int) -> slice:
        first = max(row - self.window, 0) if self.window >= 0 else 0
        return slice(first, row + 1 if self.causal else self.seqlen)

    def rows_of(self, key: int) -> slice:
        last = key + self.window + 1 if self.window >= 0 else self.seqlen
        return slice(key if self.causal else 0, min(last, self.seqlen))

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Some (sequence, row, head): the first, the last, and beside where 16 bits end."""
        batches = {0, self.batch // 2, self.batch - 1, *(65535, 65536)}
        rows = {0, (self.seqlen + 1) // 2, self.seqlen - 1} - {self.seqlen}
        for b in sorted(b for b in batches if b < self.batch):
            for row in sorted(rows):
                for head in {0, self.heads - 1}:
                    yield b, row, head


CPU, CUDA = "cpu", pytest.param("cuda", marks=pytest.mark.cuda)
SMALL = {
    "elements": Size(3, 100, 4, 4, 128, causal=True),
    "elements of a sequence": Size(1, 300, 4, 4, 128, causal=True, window=40),
    "sequences": Size(70, 16, 2, 1, causal=True),
    "tokens": Size(1, 1000, 2, 1, causal=True),
}
LARGE = {
    "elements": Size(17, 8192, 128, 128, 128, causal=True),
    "elements of a sequence": Size(1, 140_000, 128, 128, 128, causal=True, window=512),
    "sequences": Size(70_000, 16, 2, 1, causal=True),
    "tokens": Size(1, 1 << 20, 2, 1, causal=True),
}


def size_of(name: str, device: str) -> Size:
    return (LARGE if device == "cuda" else SMALL)[name]


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.node.callspec.params["device"]
    if device == "cuda" and torch.cuda.mem_get_info()[0] < NEEDED:
        pytest.skip(f"{NEEDED >> 30} GiB of free memory are needed")
    torch.manual_seed(1)
    yield
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def normal(device: str, *shape: int) -> Any:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def check(found: Any, expected: Any, most: float, what: object) -> None:
    difference = torch.linalg.vector_norm(found.double() - expected)
    size = torch.linalg.vector_norm(expected)
    assert bool(difference <= most * size + 1e-6), f"{what}: {difference} of {size}"


def check_forward(size: Size, x: list[Any], out: Any, lse: Any) -> None:
    """q, k, v; out and lse at some places."""
    q, k, v = x
    group = size.heads // size.heads_k
    for b, row, head in size.places():
        keys = size.keys_of(row)
        scores = k[b, keys, head // group].double() @ q[b, row, head].double()
        scores /= math.sqrt(size.head_dim)
        expected = torch.softmax(scores, 0) @ v[b, keys, head // group].double()
        check(out[b, row, head], expected, MOST, ("out", b, row, head))
        exact = torch.logsumexp(scores, 0).item()
        assert abs(lse[b, head, row].item() - exact) < 1e-3, ("lse", b, row, head)


def pairs(size: Size, x: list[Any], place: tuple[int, int, int], rows: Any, keys: Any) -> Any:
    """P and dS of a head's rows and keys; x is q, k, v, out, lse, dout."""
    b, _, head = place
    q, k, v, out, lse, dout = x
    head_k = head // (size.heads // size.heads_k)
    scores = q[b, rows, head].double() @ k[b, keys, head_k].double().T / math.sqrt(size.head_dim)
    p = torch.exp(scores - lse[b, head, rows].double()[:, None])
    dp = dout[b, rows, head].double() @ v[b, keys, head_k].double().T
    delta = (dout[b, rows, head].double() * out[b, rows, head].double()).sum(-1)
    return p, p * (dp - delta[:, None])


def check_gradients(size: Size, x: list[Any], gradients: tuple[Any, ...]) -> None:
    """Some rows of dq, and some keys of dk and dv; x is q, k, v, out, lse, dout."""
    q, k, _, _, _, dout = x
    dq, dk, dv = gradients
    group, scale = size.heads // size.heads_k, 1 / math.sqrt(size.head_dim)
    for place in size.places():
        b, at, head = place
        keys = size.keys_of(at)
        _, ds = pairs(size, x, place, slice(at, at + 1), keys)
        expected = scale * ds[0] @ k[b, keys, head // group].double()
        # A row that sees one key has no gradient, but for what rounding leaves.
        if keys.stop - keys.start > 1:
            check(dq[b, at, head], expected, MOST_OF_GRADIENTS, ("dq", *place))
        if head % group:
            continue
        rows, column = size.rows_of(at), slice(at, at + 1)
        sums = [torch.zeros(size.head_dim, dtype=torch.float64, device=q.device) for _ in range(2)]
        for each in range(head, head + group):
            p, ds = pairs(size, x, (b, at, each), rows, column)
            sums[0] += scale * ds[:, 0] @ q[b, rows, each].double()
            sums[1] += p[:, 0] @ dout[b, rows, each].double()
        check(dk[b, at, head // group], sums[0], MOST_OF_GRADIENTS, ("dk", *place))
        check(dv[b, at, head // group], sums[1], MOST_OF_GRADIENTS, ("dv", *place))


def inputs(size: Size, device: str) -> list[Any]:
    heads = (size.heads, size.heads_k, size.heads_k)
    shapes = [(size.batch, size.seqlen, n, size.head_dim) for n in heads]
    return [normal(device, *shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name: str, device: str) -> None:
    size = size_of(name, device)
    x = inputs(size, device)
    if device == "cuda" and "elements" in name:
        assert x[0].numel() > 2**31
    out, lse = anyflash_torch.attention(*x, **size.options, return_lse=True)
    dout = normal(device, *out.shape)
    gradients = torch.autograd.grad(out, x, dout)
    with torch.no_grad():
        check_forward(size, x, out, lse)
        check_gradients(size, [*x, out, lse, dout], gradients)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_packed_sequences(device: str) -> None:
    """70,000 of them, of other lengths, some of none."""
    size = size_of("sequences", device)
    lengths = torch.arange(size.batch) % (size.seqlen + 1)
    ends = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
    total = int(ends[-1])
    x = [
        normal(device, total, n, size.head_dim).requires_grad_()
        for n in (size.heads, size.heads_k, size.heads_k)
    ]
    starts = ends.to(device)
    packing = (starts, starts, size.seqlen, size.seqlen)
    out, lse = anyflash_torch.attention_varlen(*x, *packing, causal=True, return_lse=True)
    dout = normal(device, *out.shape)
    gradients = torch.autograd.grad(out, x, dout)
    for b in (1, size.batch // 2, min(65535, size.batch - 2), size.batch - 1):
        part = slice(int(ends[b]), int(ends[b + 1]))
        if part.stop == part.start:
            continue
        one = Size(1, part.stop - part.start, size.heads, size.heads_k, causal=True)
        q, k, v, o, d = (t.detach()[part][None] for t in (*x, out, dout))
        tensors = [q, k, v, o, lse.detach()[:, part][None], d]
        check_forward(one, tensors[:3], *tensors[3:5])
        check_gradients(one, tensors, tuple(g[part][None] for g in gradients))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_decode_of_many_sequences(device: str) -> None:
    """One token each, appended to pages of a cache with more than 2^31 elements."""
    large = device == "cuda"
    batch, page, heads_k = (70_000, 256, 2) if large else (70, 64, 2)
    caches = [normal(device, batch, page, heads_k, 64) for _ in range(2)]
    assert not large or caches[0].numel() > 2**31
    table = torch.flip(torch.arange(batch, dtype=torch.int32, device=device), (0,))[:, None]
    filled = torch.full((batch,), page - 1, dtype=torch.int32, device=device)
    q, k, v = (normal(device, batch, 1, n, 64) for n in (4, heads_k, heads_k))
    before = [cache[0, :-1].clone() for cache in caches]
    out, lse = anyflash_torch.attention_with_kvcache(
        q, *caches, k, v, cache_seqlens=filled, block_table=table, causal=True, return_lse=True
    )
    for cache, new, kept in zip(caches, (k, v), before, strict=True):
        assert torch.equal(cache[:, -1], torch.flip(new[:, 0], (0,)))
        assert torch.equal(cache[0, :-1], kept)
    for b in (0, batch // 2, min(65536, batch - 2), batch - 1):
        of = batch - 1 - b
        one = Size(1, page, 4, heads_k)
        rows = q[b : b + 1].expand(1, page, 4, 64)
        tensors = [rows, *(cache[of : of + 1] for cache in caches)]
        check_forward(
            one, tensors, out[b : b + 1].expand_as(rows), lse[b : b + 1].expand(1, 4, page)
        )


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_decode_of_a_million_tokens(device: str, num_splits: int) -> None:
    length = 1 << 20 if device == "cuda" else 1000
    caches = [normal(device, 1, length, 2, 64) for _ in range(2)]
    q = normal(device, 1, 1, 4, 64)
    out, lse = anyflash_torch.attention_with_kvcache(
        q, *caches, num_splits=num_splits, return_lse=True
    )
    rows = q.expand(1, length, 4, 64)
    check_forward(
        Size(1, length, 4, 2), [rows, *caches], out.expand_as(rows), lse.expand(1, 4, length)
    )


# Extents, and elements from one to the next; a step of the axis that is far crosses 2^31 elements.
def far_shapes(far: int) -> dict[str, tuple[Size, tuple[int, ...]]]:
    return {
        "batch": (Size(9, 130, 2, 2), (far, 128, 64, 1)),
        "rows": (Size(2, 9, 2, 2), (128, far, 64, 1)),
        "heads": (Size(2, 70, 9, 9), (70 * 64, 64, far, 1)),
        "rows, no multiple of 8": (Size(2, 9, 2, 2), (131, far + 1, 65, 1)),
        "one sequence, any stride": (Size(1, 130, 2, 2), (1 << 61, 128, 64, 1)),
    }


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("axis", far_shapes(0))
def test_far_strides(axis: str, device: str) -> None:
    """q, k, v and out lie in one block, far apart."""
    far = (1 << 29) + 64 if device == "cuda" else (1 << 17) + 64
    size, strides = far_shapes(far)[axis]
    shape = (size.batch, size.seqlen, size.heads, size.head_dim)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)
    apart = 1 << 15  # more than what is close together
    block = torch.zeros(extent + 4 * apart, dtype=torch.bfloat16, device=device)
    views = [block.as_strided(shape, strides, i * apart) for i in range(4)]
    if device == "cuda" and "any" not in axis:
        assert extent > 2**32
    for i, view in enumerate(views[:3]):
        view.copy_(normal(device, *shape) * (i + 1) / 2)
    out, lse = anyflash.attention(*views[:3], out=views[3], return_lse=True)
    assert out is views[3]
    check_forward(size, views[:3], out, lse)
    dout = normal(device, *shape)
    gradients = anyflash.attention_backward(dout, *views[:3], out, lse)
    check_gradients(size, [*views[:3], out, lse, dout], tuple(gradients[:3]))
