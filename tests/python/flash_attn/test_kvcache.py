"""flash_attn_with_kvcache, and pages in flash_attn_varlen_func."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import anyflash.flash_attn as fa
from calls.flash_attn_calls import (
    Case,
    close,
    cumulative,
    integers,
    one_thread,
    paged,
    randn,
    reference,
    scores_of,
)

torch: Any = importlib.import_module("torch")

__all__ = ["one_thread"]


def rotate(x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """x (rows, heads, head_dim), in float64."""
    half = cos.shape[1]
    c, s = (y.double()[positions][:, None] for y in (cos, sin))
    turned, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    return torch.cat([torch.stack([a * c - b * s, a * s + b * c], axis).flatten(-2), rest], -1)


CAPACITY, NEW = 96, 5
FILLED = [0, 17, 91, 64]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3), "softcap": 4.0},
    "alibi": {"causal": True, "alibi": "(b, h)", "scale": 0.4},
}


@pytest.mark.parametrize(
    ("size", "dtype"), [(None, "float16"), (16, "bfloat16"), (24, "float32"), (7, "float32")]
)
@pytest.mark.parametrize("rotary", ["", "interleaved", "halves"])
@pytest.mark.parametrize("name", CASES)
def test_appending(name: str, rotary: str, size: int | None, dtype: str) -> None:
    """New keys are rotated, written and seen; in pages of any size; q is rotated all alike where
    nothing counts positions; LSE."""
    case = Case(
        **CASES[name],
        dtype=dtype,
        heads=4,
        heads_k=2,
        head_dim=40,
        seqlens=tuple((NEW, filled + NEW) for filled in FILLED),
    )
    number = case.number()
    kv_cache = randn(2, 4, CAPACITY, 2, 40, dtype=number)
    q = randn(4, NEW, 4, 40, seed=1, dtype=number)
    k, v = randn(2, 4, NEW, 2, 40, seed=2, dtype=number)
    cos, sin = (f(torch.rand(CAPACITY, 16) * 6).to(number) for f in (torch.cos, torch.sin))
    caches, table = list(kv_cache.clone()), None
    if size:
        blocks = -(-CAPACITY // size)
        table = torch.randperm(4 * blocks).view(4, blocks).to(torch.int32)
        caches = [paged(x, table, 4 * blocks, size) for x in kv_cache]
        for row, filled in zip(table, FILLED, strict=True):
            row[-(-(filled + NEW) // size) :] = -1  # not read
    before = [x.clone() for x in caches]
    out, lse = fa.flash_attn_with_kvcache(
        *(q, *caches, k, v, *((cos, sin) if rotary else (None, None)), integers(FILLED)),
        block_table=table,
        softmax_scale=case.scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        rotary_interleaved=rotary == "interleaved",
        alibi_slopes=case.slopes(),
        return_softmax_lse=True,
    )
    assert (out.dtype, lse.dtype, lse.shape) == (number, torch.float32, (4, 4, NEW))

    alike = not case.causal and case.window == (-1, -1)
    outs: list[list[Any]] = [[], []]
    lses: list[Any] = []
    for b, filled in enumerate(FILLED):
        turned, keys = q[b].double(), k[b].double()
        if rotary:
            positions = filled + torch.arange(NEW)
            keys = rotate(keys, positions, cos, sin, rotary == "interleaved")
            seen = torch.full_like(positions, filled) if alike else positions
            turned = rotate(turned, seen, cos, sin, rotary == "interleaved")
        for precision, results in zip((torch.float64, number), outs, strict=True):
            # The new keys as the cache holds them.
            whole_k = torch.cat([kv_cache[0, b, :filled], keys.to(number)]).to(precision)
            whole_v = torch.cat([kv_cache[1, b, :filled], v[b]]).to(precision)
            s = scores_of(case, b, turned.to(number).to(precision), whole_k)
            p = torch.softmax(s, -1)
            results.append(torch.einsum("hij,jhd->ihd", p, whole_v.repeat_interleave(2, 1)))
            if precision is torch.float64:
                lses.append(torch.logsumexp(s, -1))
    close("out", 3, list(out), *outs)
    torch.testing.assert_close(
        lse.double(),
        torch.stack(lses),
        rtol=1e-5,
        atol=2e-3 if rotary and dtype != "float32" else 1e-5,
    )

    for cache, old, new in zip(caches, before, (k, v), strict=True):
        for b, filled in enumerate(FILLED):
            for t in range(NEW):
                row = filled + t
                at = (b, row) if table is None else (table[b, row // size], row % size)
                written = new[b, t].double()
                if rotary and new is k:
                    written = rotate(
                        written[None], torch.tensor([row]), cos, sin, rotary == "interleaved"
                    )[0]
                    torch.testing.assert_close(cache[at].double(), written, rtol=1e-2, atol=1e-2)
                else:
                    assert torch.equal(cache[at], new[b, t])
                cache[at] = old[at]
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))  # nothing else was written


def test_lengths_places_and_padding() -> None:
    """An int, or none: all rows; cache_batch_idx; cache_leftpad; num_splits."""
    q, cache = randn(2, 3, 4, 16), randn(2, 5, 64, 2, 16, seed=1)
    whole = fa.flash_attn_with_kvcache(q, *cache[:, :2], causal=True)
    torch.testing.assert_close(whole, fa.flash_attn_func(q, *cache[:, :2], causal=True))
    one = fa.flash_attn_with_kvcache(q, *cache[:, :2], cache_seqlens=40, num_splits=3)
    torch.testing.assert_close(one, fa.flash_attn_func(q, *cache[:, :2, :40]))
    places = integers([4, 1])
    out = fa.flash_attn_with_kvcache(
        *(q, *cache),
        cache_seqlens=integers([40, 50]),
        cache_batch_idx=places,
        cache_leftpad=integers([10, 0]),
        window_size=(12, 0),
    )
    for b, (place, first, last) in enumerate([(4, 10, 40), (1, 0, 50)]):
        kv = cache[:, place : place + 1, first:last]
        right = fa.flash_attn_func(q[b : b + 1], *kv, window_size=(12, 0))
        torch.testing.assert_close(out[b : b + 1], right)


@pytest.mark.parametrize("lengths", [[17, 40], 17])
@pytest.mark.parametrize("window", [(-1, -1), (12, -1), (-1, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_counts_the_pad(lengths: Any, window: tuple[int, int], interleaved: bool) -> None:
    """By the row in the cache: the same as q and k that were rotated by it before. Queries are
    rotated all alike where there is no window."""
    filled = lengths if isinstance(lengths, list) else [lengths] * 2
    q, (k, v) = randn(2, 3, 4, 16), randn(2, 2, 3, 2, 16, seed=1)
    cos, sin = torch.rand(2, 48, 6)
    turned_q, turned_k = q.clone(), k.clone()
    for b, first in enumerate(filled):
        rows = first + torch.arange(3)
        turned_k[b] = rotate(k[b], rows, cos, sin, interleaved)
        rows = rows if max(window) >= 0 else torch.full_like(rows, first)
        turned_q[b] = rotate(q[b], rows, cos, sin, interleaved)
    caches, right = (randn(2, 2, 64, 2, 16, seed=2) for _ in range(2))
    options = {
        "cache_leftpad": integers([16, 9]),
        "cache_seqlens": integers(lengths) if isinstance(lengths, list) else lengths,
        "window_size": window,
        "rotary_interleaved": interleaved,
    }
    out = fa.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, **options)
    same = fa.flash_attn_with_kvcache(turned_q, *right, turned_k, v, **options)
    torch.testing.assert_close(out, same)
    torch.testing.assert_close(caches, right)


def test_a_bound_that_nothing_meets_is_none() -> None:
    """Of a window as wide as the cache: queries are then rotated all alike, as in flash-attn."""
    q, (k, v) = randn(1, 3, 2, 16), randn(2, 1, 3, 2, 16, seed=1)
    cos, sin = torch.rand(2, 32, 8)
    results = []
    for window in ((-1, -1), (32, 32), (32, -1), (31, -1)):
        caches = randn(2, 1, 32, 2, 16, seed=2)
        results.append(
            fa.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, 7, window_size=window)
        )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.allclose(results[0], results[3])


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("size", [16, 24])
def test_lengths_that_run_past_the_table(new: int, size: int) -> None:
    """Nothing is written; an int is refused before any device sees it; all of the table is fine."""
    q, pages, table = randn(1, 1, 2, 16), randn(2, 4, size, 2, 16), integers([[0, 2]])
    before = pages.clone()
    k, v = randn(2, 1, new, 2, 16) if new else (None, None)
    most = 2 * size - new
    for lengths, name in ((integers([most + 1]), r"\[0\]"), (most + 1, "")):
        message = rf"cache_seqlens{name} is {most + 1}; 0 to {most} is allowed: block_table has"
        with pytest.raises(ValueError, match=message):
            fa.flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table)
        assert torch.equal(pages, before)
    out = fa.flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=most, block_table=table)
    keys = [x[[0, 2]].flatten(0, 1)[None] for x in pages]
    torch.testing.assert_close(out, fa.flash_attn_func(q, *keys))


def test_no_keys() -> None:
    q, cache = randn(2, 1, 4, 16), torch.full((2, 2, 8, 2, 16), torch.nan)
    out, lse = fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=0, return_softmax_lse=True)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


def test_no_gradients_are_recorded() -> None:
    """As in flash-attn; and parameters may be given without no_grad."""
    q, cache = randn(2, 1, 4, 16).requires_grad_(), randn(2, 2, 8, 2, 16)
    k = randn(2, 1, 2, 16).requires_grad_()
    assert not fa.flash_attn_with_kvcache(q, *cache, k, k, cache_seqlens=3).requires_grad


def test_pages_that_cannot_be_split() -> None:
    """Written pages are not copied behind the caller's back."""
    pages = randn(4, 24, 2, 2, 16)[:, :12]  # each page is part of a larger one
    q, table = randn(1, 1, 2, 16), integers([[0, 1]])
    with pytest.raises(ValueError, match=r"with_kvcache: k_cache has pages of 12 rows"):
        fa.flash_attn_with_kvcache(
            q, pages[:, :, 0], pages[:, :, 1], cache_seqlens=3, block_table=table
        )


# flash_attn_varlen_func with pages ----------------------------------------------------------------

LENGTHS = ((5, 40), (0, 7), (1, 0), (33, 33), (20, 3), (1, 64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "alibi": "(b, h)"}, {"window": (9, 2), "softcap": 3.0, "alibi": "(h)"}],
)
def test_varlen_pages(options: dict[str, Any], size: int, dtype: str) -> None:
    case = Case(seqlens=LENGTHS, heads=4, heads_k=2, dtype=dtype, **options)
    q, k, v, _ = zip(*case.tensors(), strict=True)
    blocks = -(-64 // size)
    table = torch.randperm(len(LENGTHS) * blocks).view(-1, blocks).to(torch.int32)
    dense = [torch.zeros(len(LENGTHS), blocks * size, 2, 32, dtype=case.number()) for _ in "kv"]
    for x, rows in zip(dense, (k, v), strict=True):
        for b, row in enumerate(rows):
            x[b, len(row) :] = torch.nan
            x[b, : len(row)] = row
    pools = [paged(x, table, table.numel(), size) for x in dense]
    rows, keys = zip(*LENGTHS, strict=True)
    arguments = case.options() | {"return_attn_probs": True, "block_table": table}
    packing = (cumulative(rows), cumulative(keys), torch.tensor(33), 64)
    out, lse, mask = fa.flash_attn_varlen_func(torch.cat(q), *pools, *packing, **arguments)
    assert mask.shape == (0,)
    truth, naive = (reference(case, x) for x in (torch.float64, case.number()))
    close("out", 2, list(out.split(rows)), truth.out, naive.out)
    close(
        "lse", 2, list(lse.split(rows, 1)), truth.lse, [x.float() * (1 + 1e-6) for x in truth.lse]
    )


def test_varlen_lengths_that_run_past_the_table() -> None:
    q, pages, cu = randn(1, 2, 16), randn(2, 4, 16, 2, 16), cumulative([1])
    table = integers([[0, 2]])
    out = fa.flash_attn_varlen_func(q, *pages, cu, cumulative([32]), 1, 32, block_table=table)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match="is 33; 0 to 32 is allowed: block_table has room for 32"):
        fa.flash_attn_varlen_func(q, *pages, cu, cumulative([33]), 1, 33, block_table=table)


def test_varlen_pages_have_no_backward() -> None:
    pool = randn(2, 3, 16, 2, 16)
    q, cu, table = randn(0, 2, 16), cumulative([0]), integers([[0]])
    assert fa.flash_attn_varlen_func(q, *pool, cu, cu, 0, 0, block_table=table).shape == q.shape
    q, cu = randn(4, 2, 16).requires_grad_(), cumulative([4])
    arguments = (q, *pool, cu, cu, 4, 4)
    out = fa.flash_attn_varlen_func(*arguments, block_table=table)
    with pytest.raises(NotImplementedError, match=r"^anyflash\.flash_attn.*block_table is given"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.5"):
        fa.flash_attn_varlen_func(*arguments, 0.5, block_table=table)
    with torch.no_grad():
        assert not fa.flash_attn_varlen_func(*arguments, block_table=table).requires_grad
