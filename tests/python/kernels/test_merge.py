"""merge_states: attention over parts of the keys, joined."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from backends.capi import Backend
from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS, Tensor, empty, place
from cases.case import Case, Features, Packed
from oracle.attention import DTYPES, Array, Reference, check
from run.forward import bits


def dtypes_of(backend: Backend) -> list[str]:
    names = list(DTYPES) if backend.is_cpu else ["fp16", "bf16"]
    return [name for name in names if any(row.dtype == name for row in backend.library.rows)]


def attend_part(
    backend: Backend, case: Case, keys: slice, dtype: str, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys; the mask is that of all keys."""
    q, k, v, out, lse = case.tensors()
    part = empty(out.shape, DTYPES[dtype])
    # Causal over all keys: as many more on the right as there are keys behind this part.
    right = case.sk - keys.stop if case.causal else None
    inputs = q, place(k.view[:, keys]), place(v.view[:, keys])
    backend.forward(*inputs, part, lse, window_right=right, sinks=sinks)
    return part, lse


def expected_of(case: Case) -> Reference:
    """Weights are no more exact than the float32 LSEs that they are made of."""
    expected = case.expected()
    lse = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=1)
    v = np.abs(case.problem().v).max(initial=0)
    weight = 2 * float(np.finfo(np.float32).eps) * float(lse) * float(v)
    errors = expected.max_error + weight, expected.mean_error + weight
    return replace(expected, max_error=errors[0], mean_error=errors[1])


SPLITS = ((0, 40, 150), (0, 149, 150), (0, 0, 150), (0, 150, 150), (0, 64, 100, 150))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_parts_make_the_whole(backend: Backend, splits: tuple[int, ...], causal: bool) -> None:
    """Parts in float32 from 16-bit inputs; causal, some rows see no key of a part, or none."""
    for dtype in dtypes_of(backend):
        part_dtype = "fp64" if dtype == "fp64" else "fp32"
        for out_dtype in {dtype, part_dtype}:
            case = Case(f"parts-{dtype}", dtype, 2, 170, 150, 4, 2, causal=causal)
            case = replace(case, out_dtype=out_dtype)
            parts = [
                attend_part(backend, case, slice(*pair), part_dtype)
                for pair in itertools.pairwise(splits)
            ]
            merged, merged_lse = parts[0]
            for out, lse in parts[1:-1]:
                backend.merge_states(merged, merged_lse, out, lse, merged, merged_lse)
            _, _, _, result, result_lse = case.tensors()
            backend.merge_states(merged, merged_lse, *parts[-1], result, result_lse)
            check(result.view, result_lse.view, expected_of(case))
            result.check_canaries("out")
            result_lse.check_canaries("lse")


def test_a_sink_is_one_more_part(backend: Backend) -> None:
    for dtype in dtypes_of(backend):
        case = Case("sink", dtype, 2, 70, 40, 4, 2, causal=True, features=Features(sinks="normal"))
        sinks = case.options()["sinks"]
        part_dtype = "fp64" if dtype == "fp64" else "fp32"
        out, lse = attend_part(backend, case, slice(0, case.sk), part_dtype)
        # One zero, and one number for each head: the other strides are 0.
        zero = Tensor(np.zeros(1, out.view.dtype), out.shape, (0, 0, 0, 0), 0)
        sink = Tensor(sinks.view.astype(np.float32), lse.shape, (0, 1, 0), 0)
        _, _, _, result, result_lse = case.tensors()
        backend.merge_states(out, lse, zero, sink, result, result_lse)
        check(result.view, result_lse.view, expected_of(case))


def states(dtype: str, packed: bool, seed: int) -> tuple[Array, Array]:
    """A part's out and LSE; in some rows it saw no key, by either convention."""
    random = np.random.default_rng(seed)
    shape, lse_shape = ((70, 3, 20), (3, 70)) if packed else ((2, 35, 3, 20), (2, 3, 35))
    out = random.standard_normal(shape).astype(DTYPES[dtype])
    lse = random.choice([0.01, 1, 100, 10000], lse_shape) * random.standard_normal(lse_shape)
    kind = random.integers(0, 8, lse_shape)
    lse = np.where(kind == 0, -np.inf, np.where(kind == 1, np.inf, lse)).astype(np.float32)
    out[np.isinf(lse).swapaxes(-1, -2)] = 0
    return out, lse


def merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    lses = np.stack([np.where(np.isposinf(lse), -np.inf, lse) for _, lse in parts]).astype(float)
    top = np.where(np.isneginf(lses.max(0)), 0, lses.max(0))
    weights = np.exp(lses - top)
    total = weights.sum(0)
    weights /= np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    weights = weights.swapaxes(-1, -2)[..., None]
    return sum(w * out.astype(float) for w, (out, _) in zip(weights, parts, strict=True)), lse


def check_merged(out: Tensor, lse: Tensor, parts: list[tuple[Array, Array]]) -> None:
    expected, expected_lse = merged(parts)
    digits = {2: 2.0**-8, 4: 1e-6, 8: 1e-6}  # a weight's error is that of a float32 LSE
    tolerance = digits[out.view.dtype.itemsize] * (1 if out.view.dtype != np.float16 else 2.0**-3)
    np.testing.assert_allclose(out.view.astype(float), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.view, expected_lse, rtol=1e-6, atol=1e-6)
    out.check_canaries("out")
    lse.check_canaries("lse")


@pytest.mark.parametrize("packed", [False, True])
def test_dtypes_layouts_and_parts_without_keys(backend: Backend, packed: bool) -> None:
    axes, lse_axes = ("shd", "hs") if packed else ("bshd", "bhs")
    kinds = ("fp32", "fp16", "bf16", *(("fp64",) if backend.is_cpu else ()))
    inputs = [n for n in LAYOUTS if not n.startswith("fused") and not LAYOUTS[n].expand]
    outputs = [n for n in WRITABLE_LAYOUTS if not n.startswith("fused")]
    random = np.random.default_rng(1)
    for number, (kind, out_kind) in enumerate(itertools.product(kinds, kinds)):
        for repeat in range(3):
            seed = 100 * number + repeat
            parts = [states(kind, packed, 2 * seed), states(kind, packed, 2 * seed + 1)]
            tensors = [
                place(x, str(random.choice(inputs)), letters)
                for part in parts
                for x, letters in zip(part, (axes, lse_axes), strict=True)
            ]
            out = empty(parts[0][0].shape, DTYPES[out_kind], str(random.choice(outputs)), axes)
            lse = empty(parts[0][1].shape, DTYPES["fp32"], str(random.choice(outputs)), lse_axes)
            backend.merge_states(*tensors, out, lse)
            check_merged(out, lse, parts)
            without = empty(out.shape, out.view.dtype, axes=axes)
            backend.merge_states(*tensors, without, None)
            assert bits(without.view) == bits(out.view)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("lse_target", [0, 1])
@pytest.mark.parametrize("layout", ["contiguous", "flip_all_step_d"])
def test_result_over_a_part(backend: Backend, target: int, lse_target: int, layout: str) -> None:
    parts = [states("fp32", False, 5), states("fp32", False, 6)]
    outs = [place(out, layout) for out, _ in parts]
    lses = [place(lse, layout, "bhs") for _, lse in parts]
    out, lse = outs[target], lses[lse_target]
    backend.merge_states(outs[0], lses[0], outs[1], lses[1], out, lse)
    check_merged(out, lse, parts)


def test_large_and_equal_lses(backend: Backend) -> None:
    """Nothing overflows, and equal parts count equally."""
    pairs = [(3e38, 3e38), (-3e38, -3e38), (3e38, -3e38), (88.0, 89.0), (-1e4, 1e4), (0.0, 0.0)]
    lses = np.array(pairs, np.float32).T
    parts = [
        (np.full((len(pairs), 1, 8), value, np.float32), lse[None])
        for value, lse in zip((1, 3), lses, strict=True)
    ]
    out, lse = (
        empty(x.shape, DTYPES["fp32"], axes=n) for x, n in zip(parts[0], ("shd", "hs"), strict=True)
    )
    tensors = [place(x, axes=n) for part in parts for x, n in zip(part, ("shd", "hs"), strict=True)]
    backend.merge_states(*tensors, out, lse)
    weight = 1 / (1 + np.e)
    np.testing.assert_allclose(out.view[:, 0, 0], [2, 2, 1, 3 - 2 * weight, 3, 2], rtol=1e-6)
    check_merged(out, lse, parts)


def test_nothing_to_merge(backend: Backend) -> None:
    for shape in ((0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)):
        out, part = empty(shape, DTYPES["fp32"]), place(np.ones(shape, np.float32))
        lse_shape = (shape[0], shape[2], shape[1])
        lse, part_lse = (place(np.ones(lse_shape, np.float32), axes="bhs") for _ in range(2))
        backend.merge_states(part, part_lse, part, part_lse, out, lse)
        out.check_canaries("out")


def test_packed_parts(backend: Backend) -> None:
    """Two halves of every packed sequence's keys; one half is empty in some."""
    dtype = "fp32" if backend.is_cpu else "fp16"
    halves = (Packed((70, 5, 1), (64, 0, 30)), Packed((70, 5, 1), (26, 9, 0)))
    whole = Packed((70, 5, 1), (90, 9, 30))
    case = Case("packed-parts", dtype, heads=4, heads_k=2, features=Features(packed=whole))
    q, k, v, out, lse = case.tensors()
    starts = np.cumsum([0, *whole.k])[:-1]
    tensors: list[Tensor] = []
    for number, half in enumerate(halves):
        first = starts + (np.array(halves[0].k) if number else 0)
        rows = np.concatenate([np.arange(a, a + n) for a, n in zip(first, half.k, strict=True)])
        part = Case("half", dtype, heads=4, heads_k=2, features=Features(packed=half))
        options = part.options()
        part_out, part_lse = empty(out.shape, DTYPES["fp32"], axes="shd"), part.tensors().lse
        inputs = q, place(k.view[rows], axes="shd"), place(v.view[rows], axes="shd")
        backend.forward(*inputs, part_out, part_lse, **options)
        tensors += [part_out, part_lse]
    backend.merge_states(*tensors, out, lse)
    check(out.view, lse.view, case.expected())
