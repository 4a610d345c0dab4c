"""anyflash.attention_varlen_backward with each framework's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyflash
from anyflash import AttentionGrads
from calls.backward import FIELDS, NUMPY, near
from calls.frameworks import EVERY_KIND, Kind, bits, random
from calls.varlen import LENGTHS_K, LENGTHS_Q, alone, packed
from oracle.attention import Array
from oracle.torch_reference import gradients

DOUT, DLSE = random(15, 4, 12), random(4, 15)
SINKS, SLOPES = random(4), random(5, 4)


def call(kind: Kind, given: list[Any], options: dict[str, Any], **more: Any) -> AttentionGrads:
    """Forward and backward."""
    given, options = [*map(kind.give, given)], kind.give(options)
    result = anyflash.attention_varlen(*given, **options, return_result=True)
    options = {key: x for key, x in options.items() if key != "seed"}
    return anyflash.attention_varlen_backward(
        kind.give(DOUT),
        *given[:3],
        result.out,
        result.lse,
        *given[3:],
        **options,
        rng_state=result.rng_state,
        dlse=kind.give(DLSE),
        **more,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scored": {
        **{"window_size": (2, 1), "softcap": 0.7, "sinks": SINKS, "alibi_slopes": SLOPES[0]},
        "softmax_scale": 0.4,
    },
}


@EVERY_KIND
@pytest.mark.parametrize("options", OPTIONS)
def test_sequences_have_the_bits_that_they_have_alone(kind: Kind, options: str) -> None:
    given, arguments = packed(), OPTIONS[options]
    grads = [*map(kind.take, call(kind, given, arguments)[:3])]
    assert [x.shape for x in grads] == [x.shape for x in given[:3]]
    for i in range(5):
        parts = alone(given, i)
        forward = anyflash.attention(*parts, **arguments, return_lse=True)
        rows, columns = (slice(cu[i], cu[i + 1]) for cu in given[3:5])
        dout, dlse = DOUT[None, rows], DLSE[None, :, rows]
        single = anyflash.attention_backward(dout, *parts, *forward, **arguments, dlse=dlse)
        for one, other, where in zip(single, grads, (rows, columns, columns), strict=False):
            assert bits(one[0]) == bits(other[where])


def expected(
    given: list[Any], options: dict[str, Any], bias: Array, kept: Array | None
) -> AttentionGrads:
    """Sequence by sequence; bias, sinks and slopes gather what each one gives."""
    arrays = [*given[:3], bias, SINKS, SLOPES]
    whole = AttentionGrads(*(np.zeros(x.shape) for x in arrays))
    used = options.get("seqused_k", LENGTHS_K)
    for i, (rows, keys) in enumerate(zip(LENGTHS_Q, used, strict=True)):
        if rows == 0:
            continue
        first, begin = given[3][i], given[4][i]
        where, columns = slice(first, first + rows), slice(begin, begin + keys)
        parts = {"q": given[0][None, where], "k": given[1][None, columns]}
        parts["v"] = given[2][None, columns]
        own = {"sinks": SINKS, "alibi_slopes": SLOPES[i : i + 1], "causal": options["causal"]}
        own["bias"] = bias[:, :, :rows, :keys] if len(bias) == 1 else bias[i, None, :, :rows, :keys]
        own["kept"] = kept if kept is None else kept[i, None, :, :rows, :keys]
        one = gradients(parts, DOUT[None, where], DLSE[None, :, where], **own)
        whole.dq[where], whole.dk[columns], whole.dv[columns] = (x[0] for x in one[:3])
        whole.dbias[0 if len(bias) == 1 else i, :, :rows, :keys] += one.dbias[0]
        whole.dsinks[...] += one.dsinks
        whole.dalibi_slopes[i] = one.dalibi_slopes[0]
    return whole


@EVERY_KIND
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.25, "seed": 5}], ids=["", "dropout"])
@pytest.mark.parametrize("used", [None, (3, 4, 0, 0, 11)], ids=["", "seqused"])
def test_gradients_of_options(
    kind: Kind, used: tuple[int, ...] | None, dropout: dict[str, Any], batch: int
) -> None:
    """All of them are written: dbias is 0 beyond a sequence's lengths, dk beyond seqused_k."""
    given, bias = packed(), random(batch, 4, 9, 20)
    options: dict[str, Any] = {"causal": True, "validate": True}
    options |= {} if used is None else {"seqused_k": np.array(used, np.int32)}
    kept = None
    if dropout:
        kept = anyflash.attention_varlen(*given, **dropout, return_dropout_mask=True)[4] / 0.75
    right = expected(given, options, bias, kept)
    options |= {"bias": bias, "sinks": SINKS, "alibi_slopes": SLOPES, **dropout}
    flags = {f"return_{name}": True for name in FIELDS[3:]}
    grads = call(kind, given, options, **flags)
    for name, actual, truth in zip(FIELDS, grads, right, strict=True):
        taken = kind.take(actual)
        assert (taken.shape, taken.dtype) == (truth.shape, np.float32), name
        assert not taken[truth == 0].any(), name
        near(name, taken, truth)


def test_given_gradients() -> None:
    given = packed(np.float16)
    wide = call(NUMPY, given, {}, grad_dtype="float32")
    target = np.full_like(wide.dk, np.nan)
    grads = call(NUMPY, given, {}, dk=target)
    assert grads.dk is target
    assert [*map(bits, grads[:3])] == [*map(bits, wide[:3])]
    narrow = call(NUMPY, given, {})
    assert [bits(x.astype(np.float16)) for x in wide[:3]] == [*map(bits, narrow[:3])]


@pytest.mark.parametrize("validate", [False, True])
def test_lengths_are_checked_on_the_cpu(validate: bool) -> None:
    given = packed()
    out, lse = anyflash.attention_varlen(*given, return_lse=True)
    given[3] = given[3].copy()
    given[3][2] = 16
    targets = {f"d{name}": np.full_like(x, 7) for name, x in zip("qkv", given, strict=False)}
    with pytest.raises(ValueError, match=r"^anyflash\.attention_varlen_backward: .*cu_seqlens_q"):
        anyflash.attention_varlen_backward(
            *(DOUT, *given[:3], out, lse, *given[3:]), validate=validate, **targets
        )
    assert all((x == 7).all() for x in targets.values())
