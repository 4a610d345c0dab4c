"""The yardsticks themselves: attention as loops over numbers, and Philox's known answers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cases.case import Bias, Case, Features, Packed
from cases.features import EVERYTHING, EVERYTHING_PACKED
from oracle import philox
from oracle.attention import DTYPES, Array, Problem, Reference, check, naive, reference_of, truth


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Of the authors' test vectors (Random123, kat_vectors).
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((philox.WORD,) * 4, (philox.WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(philox.philox(np.array(counter, np.uint64), key)) == words


def test_which_draw_belongs_to_a_column() -> None:
    seed, offset = 0x1111111122222222, 0x3333333344444444
    draws = philox.draws((2, 3, 4, 21), seed, offset)
    for batch, head, row, column in ((0, 0, 0, 0), (1, 2, 3, 20), (1, 0, 2, 9)):
        counter = np.array((column // 8, row, batch * 3 + head, 0x44444444), np.uint64)
        words = philox.philox(counter, (0x22222222, 0x11111111 ^ 0x33333333))
        bits = sum(int(word) << 32 * n for n, word in enumerate(words))
        assert draws[batch, head, row, column] == bits >> 16 * (column % 8) & 0xFFFF


def _at(x: Array, index: tuple[int, ...]) -> float:
    """An element of a tensor that is broadcast."""
    return float(x[tuple(min(i, n - 1) for i, n in zip(index, x.shape, strict=True))])


def _at_head(ranges: Array, head: int) -> Array:
    return ranges[min(head, len(ranges) - 1)]


def _row(p: Problem, sequence: dict[str, Any], head: int, i: int) -> tuple[list[float], list[bool]]:
    """Scores of one query, and which of them a mask hides: options.h, line by line."""
    batch, keys = sequence["batch"], sequence["k"]
    shift = len(keys) - sequence["seqlen_q"]
    scores, hidden = [], []
    for j, key in enumerate(keys[:, head * keys.shape[1] // p.shape[1]]):
        s = float(np.dot(sequence["q"][i, head], key))
        s *= len(key) ** -0.5 if p.softmax_scale is None else p.softmax_scale
        if p.softcap > 0:
            s = p.softcap * math.tanh(s / p.softcap)
        hides = p.causal and j > i + shift
        hides |= p.window_left >= 0 and j < i + shift - p.window_left
        hides |= p.window_right >= 0 and j > i + shift + p.window_right
        if p.bias is not None:
            bias = _at(p.bias, (batch, head, i, j))
            hides |= bias == (0 if p.bias.dtype == bool else -math.inf)
            s += 0 if p.bias.dtype == bool else bias
        if p.alibi_slopes is not None:
            slope = _at(np.atleast_2d(p.alibi_slopes), (batch, head))
            s -= slope * abs(i + shift - j)
        if p.block_mask is not None:
            block = (i // p.block_size[0], j // p.block_size[1])
            hides |= _at(p.block_mask, (batch, head, *block)) == 0
        if p.key_ranges is not None:
            numbers = _at_head(sequence["ranges"], head * keys.shape[1] // p.shape[1])[j]
            pairs = zip(numbers[0::2], numbers[1::2], strict=True)
            hides |= not any(first <= i < end for first, end in pairs)
        scores.append(s)
        hidden.append(hides)
    return scores, hidden


def _sequences(p: Problem) -> list[dict[str, Any]]:
    sequences = []
    for batch in range(p.shape[0]):
        rows_q: Any = batch
        rows_k: Any = batch
        if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
            rows_q = slice(*p.cu_seqlens_q[batch : batch + 2])
            rows_k = slice(*p.cu_seqlens_k[batch : batch + 2])
        q, k, v = p.q[rows_q], p.k[rows_k], p.v[rows_k]
        used = len(k) if p.seqused_k is None else p.seqused_k[batch]
        one = {"batch": batch, "rows": rows_q, "seqlen_q": len(q)}
        if p.key_ranges is not None:
            ranges = p.key_ranges
            one["ranges"] = ranges[:, rows_k] if p.packed else ranges[min(batch, len(ranges) - 1)]
        sequences.append(one | {"q": q, "k": k[:used], "v": v[:used]})
    return sequences


def _attend(p: Problem, sequence: dict[str, Any], head: int, i: int) -> tuple[list[float], float]:
    scores, hidden = _row(p, sequence, head, i)
    v = sequence["v"][:, head * sequence["v"].shape[1] // p.shape[1]]
    weights = [0.0 if hides else math.exp(s) for s, hides in zip(scores, hidden, strict=True)]
    total = math.fsum(weights) + (0 if p.sinks is None else math.exp(p.sinks[head]))
    out = [0.0] * v.shape[1]
    threshold = philox.threshold(p.dropout_p)
    draws = philox.draws(p.shape, p.seed, p.offset)[sequence["batch"], head, i]
    for j, weight in enumerate(weights):
        if not hidden[j] and draws[j] >= threshold:
            factor = weight / total / (1 - threshold / 65536)
            out = [a + factor * float(b) for a, b in zip(out, v[j], strict=True)]
    return out, math.log(total) if total else -math.inf


SMALL = {"dropout_p": 0.3, "window": (9, 5)}
FEATURES = {
    "plain": Features(),
    "keep": Features(bias=Bias("bool", "hk"), alibi="h"),
    "dense": replace(EVERYTHING, seqused_k=(11, 0), **SMALL),
    "packed": replace(
        EVERYTHING_PACKED, packed=Packed((7, 5, 0), (12, 3, 9), 2), seqused_k=(11, 3, 9), **SMALL
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_oracle_is_the_definition(name: str) -> None:
    case = Case(f"oracle-{name}", "fp64", 2, 7, 12, 4, 2, 5, 3, features=FEATURES[name])
    p = case.problem()
    result = truth(p)
    for sequence in _sequences(p):
        rows = sequence["rows"]
        for head, i in itertools.product(range(4), range(sequence["seqlen_q"])):
            out, lse = _attend(p, sequence, head, i)
            oracle_lse = (result.lse[head, rows] if p.packed else result.lse[rows][head])[i]
            np.testing.assert_allclose(result.out[rows][i, head].astype(float), out, atol=1e-14)
            np.testing.assert_allclose(float(oracle_lse), lse, atol=1e-14)


def _results(case: Case) -> tuple[Reference, Array, Array, Array]:
    plain = naive(case.problem())
    float32 = DTYPES["fp32"]
    results = plain.out.astype(case.dtype_of_out), plain.lse, plain.max_logits
    return reference_of(case.problem()), results[0], *(x.astype(float32) for x in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_naive_passes(dtype: str, name: str) -> None:
    case = Case("naive", dtype, 2, 7, 12, 4, 2, 5, 3, features=FEATURES[name])
    expected, out, lse, max_logits = _results(case)
    check(out, lse, expected, max_logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_results_do_not_pass(dtype: str) -> None:
    """One wrong number is enough."""
    case = Case("wrong", dtype, 2, 70, 40, 4, 2, causal=True, features=Features())
    expected, *results = _results(case)
    keyless, row = (slice(1), 3, 2), (1, 40, 2)
    for position, index, wrong in (
        (0, (*row, 5), results[0][(*row, 5)] + results[0].dtype.type(0.5)),
        (0, (*row, 5), np.nan),
        (0, (*row, 5), np.inf),
        (0, (*keyless, 5), 1e-3),
        (1, (1, 2, 40), results[1][1, 2, 40] + np.float32(1e-3)),
        (1, (1, 2, 40), -np.inf),
        (1, (1, 2, 3), np.inf),
        (2, (1, 2), results[2][1, 2] + np.float32(1e-3)),
        (2, (1, 2), -np.inf),
    ):
        changed = [x.copy() for x in results]
        changed[position][index] = wrong
        with pytest.raises(AssertionError, match=("out", "lse", "max_logits")[position]):
            check(changed[0], changed[1], expected, changed[2])
