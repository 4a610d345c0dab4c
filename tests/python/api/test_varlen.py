"""anyflash.attention_varlen and anyflash.merge_states with each framework's arrays."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import EVERY_KIND, KINDS, Formula, Kind, bits, close, inputs, random
from calls.varlen import LENGTHS_K, LENGTHS_Q, alone, packed

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "all": {
        "window_size": (8, 4),
        "softcap": 0.7,
        "alibi_slopes": random(4),
        "sinks": random(4),
        "dropout_p": 0.3,
        "seed": 5,
    },
}


@EVERY_KIND
@pytest.mark.parametrize("options", OPTIONS)
def test_sequences_have_the_bits_that_they_have_alone(kind: Kind, options: str) -> None:
    given = packed()
    arguments = OPTIONS[options]
    result = anyflash.attention_varlen(
        *map(kind.give, given), return_max_logits=True, **kind.give(arguments)
    )
    out, lse, max_logits = map(kind.take, result[:3])
    assert (out.shape, lse.shape, max_logits.shape) == ((15, 4, 12), (4, 15), (5, 4))
    cu_q = given[3]
    for i in range(5 if "seed" not in arguments else 1):  # a sequence's number is in its dropout
        single = anyflash.attention(*alone(given, i), return_max_logits=True, **arguments)
        rows = slice(cu_q[i], cu_q[i + 1])
        assert bits(single.out[0]) == bits(out[rows])
        assert bits(single.lse[0]) == bits(lse[:, rows])
        assert bits(single.max_logits[0]) == bits(max_logits[i])


@EVERY_KIND
def test_bias_and_dropout_mask_of_packed_sequences(kind: Kind) -> None:
    given = packed()
    bias = random(5, 4, 9, 20)
    result = anyflash.attention_varlen(
        *map(kind.give, given),
        bias=kind.give(bias),
        dropout_p=0.5,
        seed=1,
        return_dropout_mask=True,
    )
    mask = kind.take(result.dropout_mask)
    assert (mask.dtype, mask.shape) == (np.bool_, (5, 4, 9, 20))
    for i, (rows, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        if rows == 0 or keys == 0:
            continue
        formula = Formula(*alone(given, i))
        formula.scores = formula.scores + bias[i, :, :rows, :keys]
        formula.factors = mask[i, :, :rows, :keys] / 0.5
        part = slice(given[3][i], given[3][i + 1])
        close(kind.take(result.out)[part], formula.result()[0][0])
        close(kind.take(result.lse)[:, part], formula.result()[1][0])


def test_seqused_k_of_packed_sequences() -> None:
    given = packed()
    used = np.array([3, 4, 0, 0, 11], np.int32)
    out = anyflash.attention_varlen(*given, seqused_k=used, causal=True)
    for i, n in enumerate(used):
        q, k, v = alone(given, i)
        single = anyflash.attention(q, k[:, :n], v[:, :n], causal=True)
        assert bits(single[0]) == bits(out[given[3][i] : given[3][i + 1]])


@pytest.mark.parametrize("validate", [False, True])
def test_lengths_are_checked_on_the_cpu(validate: bool) -> None:
    given = packed()
    given[3] = given[3].copy()
    given[3][2] = 16
    before = np.full((15, 4, 12), 7, np.float32)
    with pytest.raises(ValueError, match=r"^anyflash\.attention_varlen: .*cu_seqlens_q") as error:
        anyflash.attention_varlen(*given, out=before, validate=validate)
    assert "16" in str(error.value)
    assert (before == 7).all()


def test_out_of_packed_sequences(torch: ModuleType) -> None:
    given = Kind("torch").give(packed(np.float16))
    expected, lse = anyflash.attention_varlen(*given, return_lse=True, out_dtype=torch.float32)
    assert (expected.dtype, lse.dtype) == (torch.float32, torch.float32)
    out = torch.zeros_like(expected)
    assert anyflash.attention_varlen(*given, out=out) is out
    assert torch.equal(out, expected)


# merge_states -------------------------------------------------------------------------------------


def parts(kind: Kind, **arguments: Any) -> tuple[list[Any], Any, Any]:
    """The halves' results, then the whole one's."""
    q, k, v = inputs()
    halves = [
        x
        for keys in (slice(0, 20), slice(20, 50))
        for x in anyflash.attention(
            *kind.give([q, k[:, keys], v[:, keys]]), return_lse=True, **arguments
        )
    ]
    return halves, *anyflash.attention(*kind.give([q, k, v]), return_lse=True, **arguments)


@EVERY_KIND
def test_merge(kind: Kind) -> None:
    halves, out, lse = parts(kind)
    merged, merged_lse = anyflash.merge_states(*halves)
    assert type(merged) is type(out)
    close(kind.take(merged), kind.take(out))
    close(kind.take(merged_lse), kind.take(lse))


def test_merge_packed() -> None:
    q, cu_q = packed()[0], packed()[3]
    wide = anyflash.attention_varlen(q, q, q, cu_q, cu_q, 9, 9, return_lse=True)
    nothing = np.zeros_like(wide[0]), np.full_like(wide[1], -np.inf)
    for given in ((*wide, *nothing), (*nothing, *wide)):
        out, lse = anyflash.merge_states(*given)
        close(out, wide[0])
        np.testing.assert_array_equal(lse, wide[1])


def test_merge_into_its_inputs() -> None:
    halves, *_ = parts(Kind("numpy"))
    right = anyflash.merge_states(*halves)
    out, lse = anyflash.merge_states(*halves, out=halves[0], lse=halves[3])
    assert out is halves[0]
    assert lse is halves[3]
    assert (bits(out), bits(lse)) == (bits(right[0]), bits(right[1]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_merge_dtypes(dtype: str) -> None:
    kind = Kind("numpy")
    halves, whole, _ = parts(kind)
    halves = [x if x.ndim == 3 else x.astype(dtype) for x in halves]
    whole = np.zeros_like(whole, dtype) + whole.astype(dtype)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2}.get(dtype, 1e-5)
    for arguments in ({}, {"out_dtype": dtype}, {"out": np.empty_like(whole)}):
        out, lse = anyflash.merge_states(*halves, **arguments)
        assert (out.dtype, lse.dtype) == (whole.dtype, np.float32)
        np.testing.assert_allclose(
            out.astype(float), whole.astype(float), rtol=tolerance, atol=tolerance
        )
    wide, _ = anyflash.merge_states(*halves, out_dtype=np.float32)
    assert wide.dtype == np.float32
    narrow, _ = anyflash.merge_states(*halves, out_dtype="bfloat16")
    assert narrow.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_merge_bfloat16(kind: Kind) -> None:
    halves, whole, _ = parts(kind)
    halves = [kind.take(x) for x in halves]
    halves = [x if x.ndim == 3 else x.astype(ml_dtypes.bfloat16) for x in halves]
    out, _ = anyflash.merge_states(*map(kind.give, halves))
    assert kind.take(out).dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(kind.take(out).astype(float), kind.take(whole), atol=3e-2)


def test_a_sink_is_a_part() -> None:
    q, k, v = inputs()
    sinks = random(4)
    sink = (
        np.zeros((2, 30, 4, 12), np.float32),
        np.ascontiguousarray(np.broadcast_to(sinks[:, None], (2, 4, 30))),
    )
    out, lse = anyflash.merge_states(*anyflash.attention(q, k, v, return_lse=True), *sink)
    right = anyflash.attention(q, k, v, sinks=sinks, return_lse=True)
    close(out, right[0])
    close(lse, right[1])
