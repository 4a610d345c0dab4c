"""The yardstick for attention with a cache: the same as loops over numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cases.cache_case import CacheCase
from cases.kvcache import CACHE_CASES
from oracle.attention import Array, check
from oracle.kvcache import E4M3, E5M2, INT8, CacheProblem, answer, check_written, quantised

NAMES = (
    "everything-fp64-0",
    "everything-int8-fp64-1",
    "single-leftpad-fp64",
    "single-tree1-fp64",
    "single-idx-fp64",
    "single-both-fp64",
    "single-rotary-fp64",
    "e4m3-slot-sq6-fp64-append",
    "int8-bare-sq1-fp64",
    "rotary-leftpad-fp64",
    "rotary-seqlens-fp64-leftpad",
    "rotary-seqlens-fp64-any",
    "rotary-idx-fp64",
    "d20-dv12-fp64",
)
CASES = {case.id: case for case in CACHE_CASES if case.id in NAMES}


def place_of(p: CacheProblem, b: int, row: int) -> tuple[int, int]:
    if p.block_table is not None:
        size = p.k_cache.shape[1]
        return int(p.block_table[b, row // size]), row % size
    return b if p.cache_batch_idx is None else int(p.cache_batch_idx[b]), row


def turned(p: CacheProblem, x: Array, position: int) -> list[float]:
    """One head of one row, rotated by a row of the tables."""
    result = [float(value) for value in x]
    if p.rotary_cos is None or p.rotary_sin is None:
        return result
    half = p.rotary_cos.shape[1]
    for c in range(half):
        one, two = (c, c + half) if p.rotary_neox else (2 * c, 2 * c + 1)
        cos, sin = float(p.rotary_cos[position, c]), float(p.rotary_sin[position, c])
        x1, x2 = float(x[one]), float(x[two])
        result[one], result[two] = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    return result


def first_turn(p: CacheProblem, b: int) -> int:
    if p.rotary_seqlens is not None:
        return int(p.rotary_seqlens[b])
    assert p.cache_seqlens is not None
    return int(p.cache_seqlens[b]) - (0 if p.cache_leftpad is None else int(p.cache_leftpad[b]))


def element_scale(scale: Array | None, slot: int, head: int) -> float:
    if scale is None:
        return 1.0
    return float(scale[head] if scale.ndim == 1 else scale[slot, head])


def append(p: CacheProblem) -> tuple[Array, Array]:
    k_cache, v_cache = p.k_cache.copy(), p.v_cache.copy()
    if p.k_new is None or p.v_new is None or p.cache_seqlens is None:
        return k_cache, v_cache
    for b, t, head in np.ndindex(*p.k_new.shape[:3]):
        slot, row = place_of(p, b, int(p.cache_seqlens[b]) + t)
        k = turned(p, p.k_new[b, t, head], first_turn(p, b) + t)
        for cache, x, scale in ((k_cache, k, p.k_scale), (v_cache, p.v_new[b, t, head], p.v_scale)):
            scaled = [float(value) / element_scale(scale, slot, head) for value in x]
            cache[slot, row, head] = quantised(np.array(scaled), cache.dtype)
    return k_cache, v_cache


def sees(p: CacheProblem, b: int, i: int, j: int, seqlen_k: int) -> bool:
    shift = seqlen_k - p.q.shape[1]
    right = 0 if p.causal else p.window_right
    if p.window_left >= 0 and j < i + shift - p.window_left:
        return False
    if right >= 0 and j > i + shift + right:
        return False
    if p.tree_mask is not None and j >= shift:
        return bool(p.tree_mask[b if len(p.tree_mask) > 1 else 0, i, j - shift])
    return True


def row_of_attention(p: CacheProblem, caches: Any, index: Any) -> tuple[Array, float]:
    """out and lse of one query of one head."""
    b, i, h = index
    new = 0 if p.k_new is None else p.k_new.shape[1]
    assert p.cache_seqlens is not None
    filled = int(p.cache_seqlens[b])
    pad = 0 if p.cache_leftpad is None else int(p.cache_leftpad[b])
    seqlen_k = filled + new - pad
    steps = p.causal or p.window_left >= 0 or p.window_right >= 0
    q = turned(p, p.q[b, i, h], first_turn(p, b) + (i if steps else 0))
    head = h // (p.q.shape[2] // p.k_cache.shape[2])
    scale = len(q) ** -0.5 if p.softmax_scale is None else p.softmax_scale
    total, out = 0.0, np.zeros(p.v_cache.shape[-1])
    if p.sinks is not None:
        total = math.exp(float(p.sinks[h]))
    for j in range(seqlen_k):
        if not sees(p, b, i, j, seqlen_k):
            continue
        place = place_of(p, b, pad + j)
        k, v = (x[place][head].astype(np.float64) for x in caches)
        s = float(np.dot(q, k)) * element_scale(p.k_scale, place[0], head) * scale
        if p.softcap > 0:
            s = p.softcap * math.tanh(s / p.softcap)
        if p.alibi_slopes is not None:
            slopes = np.atleast_2d(p.alibi_slopes)
            distance = abs(i + seqlen_k - p.q.shape[1] - j)
            s -= float(slopes[min(b, len(slopes) - 1), h]) * distance
        total += math.exp(s)
        out += math.exp(s) * element_scale(p.v_scale, place[0], head) * v
    return (out / total, math.log(total)) if total else (out, -math.inf)


@pytest.mark.parametrize("name", NAMES)
def test_loops_over_numbers(name: str) -> None:
    case: CacheCase = CASES[name]
    problem, expected = case.problem(), case.expected()
    caches = append(problem)
    for what, cache, rows in zip("kv", caches, expected[1:], strict=True):
        if rows:
            check_written(what, cache, rows)
    out = np.zeros((*problem.q.shape[:3], case.head_dim_v))
    lse = np.zeros((case.batch, case.heads, case.sq), np.float32)
    for index in np.ndindex(*problem.q.shape[:3]):
        b, i, h = index
        out[index], lse[b, h, i] = row_of_attention(problem, caches, index)
    check(out, lse, expected.reference)


def test_no_lengths_are_all_rows() -> None:
    x = np.zeros((1, 3, 1, 8), np.float32)
    problem = CacheProblem(x[:, :1], x, x)
    assert problem.lengths.tolist() == [3]
    np.testing.assert_allclose(answer(problem).reference.lse, np.log(3))


def test_elements_of_8_bits() -> None:
    """Ties to even, the largest numbers, NaN."""
    x = np.array([0.5, 1.5, -2.5, 126.5, 127.5, 300, -129])
    assert quantised(x, INT8).tolist() == [0, 2, -2, 126, 127, 127, -128]
    x = np.array([1.0625, 1.1875, 447, 449, 1e9, -np.inf, 2.0**-10, 3 * 2.0**-10, 0.0])
    elements = [1.0, 1.25, 448, 448, 448, -448, 0, 2 * 2.0**-9, 0]
    assert quantised(x, E4M3).astype(float).tolist() == elements
    x = np.array([1.125, 1.375, 1e9, -np.inf, 3 * 2.0**-17])
    assert quantised(x, E5M2).astype(float).tolist() == [1.0, 1.5, 57344, -57344, 2 * 2.0**-16]
    assert quantised(np.array([np.nan]), E4M3).view(np.uint8)[0] & 0x7F == 0x7F
    assert ml_dtypes.finfo(E4M3).max == 448


def test_a_wrong_element_is_found() -> None:
    """By an append's check: the next number in either direction, and a row that is not written."""
    for name in ("single-rotary-fp64", "e4m3-slot-sq6-fp64-append"):
        case = CASES[name]
        k, _ = append(case.problem())
        rows = case.expected().k
        assert rows is not None
        place = rows.slots[3], rows.rows[3], 1, 5
        for change in (-1, 1):
            wrong = k.copy()
            bits = np.dtype(f"i{wrong.dtype.itemsize}")
            wrong.view(bits)[place] += change * (256 if case.cache_dtype == "" else 1)
            with pytest.raises(AssertionError, match=r"1 new elements.*\[3, 1, 5\]"):
                check_written("k", wrong, rows)
        with pytest.raises(AssertionError, match="new elements are wrong"):
            check_written("k", case.problem().k_cache, rows)


def test_table_of_cases() -> None:
    """What the tables are to hold, so that a change to them cannot lose it."""
    assert len({case.id for case in CACHE_CASES}) == len(CACHE_CASES)
    for rows, dtype in itertools.product((16, 32, 64), ("fp16", "bf16")):
        fitting = [
            case
            for case in CACHE_CASES
            if case.dtype == dtype and rows // 2 < case.heads // case.heads_k * case.sq <= rows
        ]
        assert {case.eight_bit for case in fitting} == {True, False}, (rows, dtype)
