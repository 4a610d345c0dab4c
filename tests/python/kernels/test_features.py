"""How features relate to one another; single results are the tables' (cases/features.py)."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.capi import Backend, CallError
from backends.tensors import Tensor, empty, place, sparse
from cases.auxiliary import UINT64
from cases.case import Bias, Blocks, Case, Features, Packed, Ranges
from oracle import philox
from oracle.attention import DTYPES, Array, check, reference
from run.forward import assert_same_bits, bits, call, expected_row, run

pytestmark = pytest.mark.hopper

BASE = Case("feature", sq=131, sk=200, heads=4, heads_k=2, batch=2)


def with_(case: Case, **features: Any) -> Case:
    return replace(case, features=replace(case.features, **features))


# ---- windows ----


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("sq", "sk"), [(131, 200), (200, 131), (1, 70), (64, 64)])
def test_bug_895_windows_that_are_one(backend: Backend, dtype: str, sq: int, sk: int) -> None:
    """(S, 0), (S - 1, 0), (-1, 0), causal and causal with a window on the right are the same."""
    if not any(row.dtype == dtype for row in backend.rows()):
        dtype = "bf16"
    case = replace(BASE, dtype=dtype, sq=sq, sk=sk)
    causal = run(backend, replace(case, causal=True))
    most = max(sq, sk)
    for left in (most, most - 1, -1, None, UINT64 >> 1):
        assert_same_bits(run(backend, case, window_left=left, window_right=0), causal)
        assert_same_bits(run(backend, case, window_left=left, causal=True, window_right=5), causal)
    full = run(backend, case)
    for left, right in ((-1, -1), (most, most), (most - 1, most - 1), (UINT64 >> 1,) * 2):
        assert_same_bits(run(backend, case, window_left=left, window_right=right), full)


# ---- biases and masks that are the same ----


def test_a_keep_mask_is_a_bias_of_minus_infinity(backend: Backend) -> None:
    keep = np.random.default_rng(0).random((2, 4, 131, 200)) < 0.5
    keep[:, :, 7] = False
    results = [
        run(backend, BASE, bias=place(x))
        for x in (
            keep,
            np.where(keep, 3, 0).astype(np.uint8),
            *(np.where(keep, 0, -np.inf).astype(DTYPES[name]) for name in ("fp16", "bf16", "fp32")),
        )
    ]
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_a_block_map_is_a_keep_mask(backend: Backend) -> None:
    blocks = np.random.default_rng(0).random((1, 4, 3, 4)) < 0.5
    keep = blocks.repeat(64, 2).repeat(64, 3)[:, :, :131, :200]
    by_map = run(backend, BASE, block_mask=place(blocks), block_size=(64, 64))
    by_mask = run(backend, BASE, bias=place(np.ascontiguousarray(keep)))
    expected = reference(*(x.view for x in by_map[:3]), bias=keep)
    check(by_map.out.view, by_map.lse.view, expected)
    check(by_mask.out.view, by_mask.lse.view, expected)


RANGES = {
    "documents": [(0, 70), (70, 131)],
    "two": [(0, 20, 90, 131), (30, 40, 120, 121)],
    "empty": [(5, 5), (9, 2)],
    "any": [(-(1 << 31), (1 << 31) - 1), (131, 200)],
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("causal", [False, True])
def test_key_ranges_are_a_keep_mask(backend: Backend, name: str, causal: bool) -> None:
    numbers = np.array(RANGES[name], np.int32)[np.arange(200) // 100]
    ranges = np.stack([numbers, numbers[::-1]])[None]  # of each key head
    row = np.arange(131)[:, None, None]
    keep = [((r[:, 0::2] <= row) & (row < r[:, 1::2])).any(-1) for r in ranges[0]]
    keep = np.array(keep)[None].repeat(2, 1)
    case = replace(BASE, causal=causal)
    by_ranges = run(backend, case, key_ranges=place(ranges))
    by_mask = run(backend, case, bias=place(keep))
    expected = reference(*(x.view for x in by_ranges[:3]), bias=keep, causal=causal)
    check(by_ranges.out.view, by_ranges.lse.view, expected)
    check(by_mask.out.view, by_mask.lse.view, expected)
    if backend.is_cpu:  # where the same kernel runs
        assert_same_bits(by_ranges, by_mask)


def test_nothing_is_the_same_as_no_feature(backend: Backend) -> None:
    plain = run(backend, BASE)
    nothing = place(np.full(4, -np.inf, np.float32), axes="h")
    assert_same_bits(run(backend, BASE, sinks=nothing), plain)
    assert_same_bits(run(backend, BASE, softcap=0.0, dropout_p=0.0), plain)
    used = place(np.full(2, 200, np.int32), axes="b")
    assert_same_bits(run(backend, BASE, seqused_k=used), plain)


def test_outputs_do_not_change_results(backend: Backend) -> None:
    for case in (BASE, with_(BASE, softcap=4.0, dropout_p=0.3, seed=3)):
        with_outputs, _ = call(backend, with_(case, max_logits=True))
        assert_same_bits(run(backend, case, max_logits=None, dropout_mask=None), with_outputs)


def test_float32_out_is_out_before_rounding(backend: Backend) -> None:
    for dtype, features in itertools.product(
        ("fp16", "bf16"), (BASE.features, Features(softcap=4.0, dropout_p=0.2), Features(alibi="h"))
    ):
        case = replace(BASE, dtype=dtype, features=features)
        rounded = run(backend, case)
        exact = run(backend, replace(case, out_dtype="fp32"))
        assert bits(exact.out.view.astype(DTYPES[dtype])) == bits(rounded.out.view)
        assert bits(exact.lse.view) == bits(rounded.lse.view)


def test_features_repeat_the_same_bits(backend: Backend) -> None:
    """Races: flash-attn 2229, flashinfer 1661."""
    features = Features(
        window=(100, 90),
        softcap=5.0,
        alibi="bh",
        bias=Bias(values="some_inf"),
        blocks=Blocks(),
        sinks="normal",
        dropout_p=0.2,
    )
    case = replace(BASE, features=features)
    first, options = call(backend, case)
    for _ in range({"cuda": 250, "emulated-sm80": 3, "emulated-sm90": 3}.get(backend.name, 10)):
        again, other = call(backend, case)
        assert_same_bits(again, first)
        assert bits(other["max_logits"].view) == bits(options["max_logits"].view)


@pytest.mark.usefixtures("many_threads")
def test_features_do_not_depend_on_threads(cpu: Backend) -> None:
    features = Features(softcap=5.0, dropout_p=0.2, packed=Packed((1, 300, 0, 70), (50, 9, 3, 200)))
    for dtype in ("fp32", "bf16"):
        case = Case("threads", dtype, heads=3, heads_k=1, causal=True, features=features)
        one, options = call(cpu, case, num_threads=1)
        for num_threads in (2, 5, 64):
            many, other = call(cpu, case, num_threads=num_threads)
            assert_same_bits(many, one)
            assert bits(other["max_logits"].view) == bits(options["max_logits"].view)


# ---- sinks ----


WITH_SINKS = {
    "plain": Features(),
    "softcap": Features(softcap=4.0),
    "dropout": Features(dropout_p=0.2),
    "ranges": Features(ranges=Ranges()),
    "bias": Features(bias=Bias(), alibi="h"),
}


@pytest.mark.parametrize("name", WITH_SINKS)
def test_infinite_sink(backend: Backend, name: str) -> None:
    """It has all the weight of its head's rows, also of those that see no key."""
    case = replace(BASE, batch=1, sq=150, sk=100, heads=2, heads_k=1, causal=True)
    case = replace(case, features=WITH_SINKS[name])
    one, other = (
        run(backend, case, sinks=place(np.float32([0.5, x]), axes="h")) for x in (2, np.inf)
    )
    assert (other.out.view[:, :, 1] == 0).all()
    assert np.isposinf(other.lse.view[:, 1]).all()
    assert bits(other.out.view[:, :, 0]) == bits(one.out.view[:, :, 0])
    assert bits(other.lse.view[:, 0]) == bits(one.lse.view[:, 0])


# ---- dropout ----

DROPOUT = with_(BASE, dropout_p=0.3, seed=77, offset=5)


def mask_of(backend: Backend, case: Case, **changes: Any) -> Array:
    return call(backend, case, **changes)[1]["dropout_mask"].view.astype(bool)


def test_fraction_of_dropout(backend: Backend) -> None:
    """The draws are independent: five sigma of a binomial, in all and in each row of keys."""
    for p in (0.1, 0.5, 0.9):
        mask = mask_of(backend, with_(DROPOUT, dropout_p=p))
        sigma = np.sqrt(p * (1 - p))
        assert abs((1 - mask.mean()) - p) < 5 * sigma / np.sqrt(mask.size)
        assert np.abs((1 - mask.mean(-1)) - p).max() < 5 * sigma / np.sqrt(mask.shape[-1])
        assert np.abs((1 - mask.mean(-2)) - p).max() < 5 * sigma / np.sqrt(mask.shape[-2])


def test_p_is_not_rounded_to_255ths(backend: Backend) -> None:
    """flash-attn keeps p in a byte; here its error is below 2^-17."""
    case = replace(DROPOUT, sq=256, sk=512, d=8)
    draws = philox.draws((2, 4, 256, 512), 77, 5)
    for p in (0.0017, 0.17, 0.3333, 0.99):
        mask = mask_of(backend, with_(case, dropout_p=p))
        threshold = round(p * 65536)
        assert draws[mask].min() >= threshold
        assert draws[~mask].max() < threshold


def test_dropout_is_unbiased(backend: Backend) -> None:
    """The mean over seeds tends to the result without dropout."""
    case = replace(DROPOUT, batch=1, sq=8, sk=64, heads=1, heads_k=1)
    plain = run(backend, replace(case, features=Features())).out.view.astype(float)
    count = 400
    outs = [run(backend, with_(case, seed=seed)).out.view.astype(float) for seed in range(count)]
    sigma = np.std(outs, axis=0) / np.sqrt(count)
    error = np.abs(np.mean(outs, axis=0) - plain)
    assert (error < 5 * sigma + 1e-3).all()
    assert error.mean() < 1.2 * sigma.mean()


def test_probability_that_rounds_to_nothing(backend: Backend) -> None:
    plain = run(backend, BASE)
    tiny, options = call(backend, with_(DROPOUT, dropout_p=2.0**-18))
    assert_same_bits(tiny, plain)
    assert options["dropout_mask"].view.all()


def test_probability_that_rounds_to_one(backend: Backend) -> None:
    """It stays below 1: what is kept is finite."""
    case = with_(DROPOUT, dropout_p=1 - 2.0**-30)
    tensors, options = call(backend, replace(case, out_dtype="fp32"))
    assert np.isfinite(tensors.out.view).all()
    kept = philox.kept((2, 4, 131, 200), 65535 / 65536, 77, 5)
    assert (options["dropout_mask"].view == kept).all()


def test_seed_and_offset_count_only_with_dropout(backend: Backend) -> None:
    """PaddlePaddle 70298, ROCm 2088: p = 0 is the same with every seed; others are not."""
    plain = run(backend, BASE)
    state = place(np.array([1, 2], np.int64), axes="b")
    assert_same_bits(run(backend, BASE, seed=1, offset=2, dropout_p=0.0), plain)
    assert_same_bits(run(backend, BASE, rng_state=state), plain)
    masks = [mask_of(backend, DROPOUT)] + [
        mask_of(backend, DROPOUT, **changes)
        for changes in ({"seed": 78}, {"offset": 6}, {"seed": 77 + (1 << 32)}, {"offset": 1 << 40})
    ]
    for a, b in itertools.combinations(masks, 2):
        assert 0.3 < (a != b).mean() < 0.54, "two masks have much in common"  # 2 p (1 - p) is 0.42


def test_rng_state_is_seed_and_offset(backend: Backend) -> None:
    first = run(backend, DROPOUT)
    for dtype in (np.int64, np.uint64):
        state = place(np.array([77, 5], dtype), axes="b")
        assert_same_bits(run(backend, DROPOUT, rng_state=state, seed=0, offset=0), first)


def test_dropout_does_not_change_lse(backend: Backend) -> None:
    """LSE and the softmax's sum are of the probabilities before dropout."""
    case = with_(BASE, softcap=9.0)
    dropped = run(backend, with_(DROPOUT, softcap=9.0))
    np.testing.assert_allclose(dropped.lse.view, run(backend, case).lse.view, rtol=1e-6)


# ---- which kernel ----

CHOICES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi": "h"},
    "bias": {"bias": Bias()},
    "keep": {"bias": Bias("bool")},
    "blocks": {"blocks": Blocks()},
    "dropout": {"dropout_p": 0.1},
    "window": {"window": (1, 1)},
    "sinks": {"sinks": "normal"},
    "seqused": {"seqused_k": (3,)},
    "packed": {"packed": Packed((2,), (3,))},
}


@pytest.mark.parametrize("names", [(), *itertools.combinations(CHOICES, 1), tuple(CHOICES)[3:]])
def test_every_combination_has_its_kernel(backend: Backend, names: tuple[str, ...]) -> None:
    """flash-attn 2143, flashinfer 4014: dispatch that forgets a parameter."""
    features = Features()
    for name in names:
        features = replace(features, **CHOICES[name])
    rows = backend.rows()
    dims = {(row.head_dim or 64, row.head_dim_v or 64) for row in rows}
    smaller = {(d - 1, max(dv - 1, 1)) for d, dv in dims} | {(d, 1) for d, _ in dims}
    dtypes = sorted({row.dtype for row in rows})
    for (d, dv), dtype in itertools.product(sorted(dims | smaller), dtypes):
        case = Case("kernel", dtype, 1, 2, 3, d=d, dv=dv, features=features)
        expected = expected_row(backend, case)
        if expected is None:
            continue
        before = backend.library.launches()
        run(backend, case)
        after = backend.library.launches()
        assert {backend.usual(n) for n in after if after[n] != before[n]} == {expected.name}


# ---- memory ----


def test_a_bias_takes_no_workspace(backend: Backend) -> None:
    """Broadcast axes are never materialised, and strides never copied."""

    def for_bias(length: int) -> int:
        tensors = Case("workspace", sq=length, sk=length).tensors()
        one = Tensor(np.zeros(1, np.float16), (1, 2, length, length), (0, 0, 0, 0), 0)
        with backend.on_device([*tensors, one]) as dl:
            options = backend.options(softcap=1.0)
            plain = backend.library.workspace_size(dl[:5], options)
            options.bias = ctypes.pointer(dl[5])
            return backend.library.workspace_size(dl[:5], options) - plain

    assert for_bias(4096) == for_bias(1024)


FAR = (1 << 31) + 64


@pytest.mark.parametrize("axis", range(4))
def test_bug_flashinfer_1290_bias_beyond_int32(backend: Backend, axis: int) -> None:
    """An element's place in the bias does not fit 32 bits."""
    case = Case("far-bias", batch=2, sq=3, sk=3, features=Features(bias=Bias()))
    tensors, options = case.tensors(), case.options()
    strides = [72, 36, 12, 4]
    strides[axis] = FAR
    bias = sparse(options["bias"].view, tuple(strides))
    bias.storage.flags.writeable = False
    if axis == 3 and not backend.is_cpu:
        with pytest.raises(CallError, match=rf"bias has stride {FAR} along the keys"):
            backend.forward(*tensors, **options | {"bias": bias})
        return
    backend.forward(*tensors, **options | {"bias": bias})
    check(tensors.out.view, tensors.lse.view, case.expected(), options["max_logits"].view)


@pytest.mark.parametrize("axis", range(4))
def test_dropout_mask_beyond_int32(backend: Backend, axis: int) -> None:
    case = Case("far-mask", batch=2, sq=3, sk=3, features=Features(dropout_p=0.5))
    strides = [72, 36, 12, 4]
    strides[axis] = FAR
    mask = sparse(np.zeros((2, 2, 3, 3), bool), tuple(strides))
    run(backend, case, dropout_mask=mask)
    assert (mask.view == case.problem().dropout_mask()).all()


def test_max_logits_per_head(backend: Backend) -> None:
    """Of all rows and tiles: one large score, somewhere; and none where nothing is seen."""
    random = np.random.default_rng(0)
    case = replace(BASE, sq=300, sk=330, features=Features())
    for i, j in ((0, 0), (299, 329), (150, 64), (64, 200)):
        tensors, options = case.tensors(), case.options()
        head = int(random.integers(4))
        tensors.q.view[1, i, head] = 3
        tensors.k.view[1, j, head // 2] = 3
        backend.forward(*tensors, **options)
        assert options["max_logits"].view[1, head] == 9 * 64 / 8
    keyless = empty((2, 4), DTYPES["fp32"], axes="bh")
    run(backend, replace(case, sk=0), max_logits=keyless)
    assert np.isneginf(keyless.view).all()
