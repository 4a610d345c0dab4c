"""anyflash_backward against float64, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from backends import capi
from backends.capi import Backend
from backends.tensors import Tensor, empty, place, sparse
from cases.case import VALUES, Bias, Case, Features, Packed, Ranges
from cases.gradient_case import Call, GradientCase, make
from cases.random_cases import random_gradient_cases
from oracle.attention import Array, Problem, truth
from oracle.gradients import Given, check_gradients, gradient_bounds
from oracle.problem import DTYPES
from run.backward import backward, run_call, supports_backward, verify_backward
from run.forward import bits, run

pytestmark = pytest.mark.hopper


def test_case(backend: Backend, gradient_case: GradientCase) -> None:
    verify_backward(backend, gradient_case)


def test_random(backend: Backend) -> None:
    examples = {"emulated-sm80": 40, "emulated-sm90": 40, "cuda": 500}.get(backend.name, 100)
    dtypes = sorted({row.dtype for row in backend.rows("backward")})
    able = random_gradient_cases(dtypes).filter(lambda case: supports_backward(backend.name, case))

    @settings(max_examples=examples)
    @given(able)
    def verify_one(case: GradientCase) -> None:
        verify_backward(backend, case)

    verify_one()


END_TO_END = {
    "plain": Features(),
    "softcap": Features(softcap=2.0),
    "dropout": Features(dropout_p=0.3, seed=3, offset=9),
    "bias": Features(bias=Bias(axes="hk"), sinks="normal", alibi="h"),
    "packed": Features(packed=Packed((70, 0, 33), (90, 5, 64)), window=(30, 10)),
}


@pytest.mark.parametrize("name", END_TO_END)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_after_the_forward(backend: Backend, name: str, dtype: str) -> None:
    """Of exact attention, from the out and LSE that the forward has made, with its dropout mask."""
    if not any(row.dtype == dtype for row in backend.rows("backward")):
        return
    features = END_TO_END[name]
    case = Case(f"end-to-end-{name}", dtype, 2, 70, 90, 4, 2, causal=True, features=features)
    gradient_case = GradientCase(case)
    call, forward = gradient_case.call(), run(backend, case)
    call.tensors["out"], call.tensors["lse"] = forward.out, forward.lse
    run_call(backend, call)
    exact = replace(gradient_case.given(gradient_case.inputs()), out=None, lse=None)
    outputs = {name: tensor.view for name, tensor in call.outputs().items()}
    check_gradients(outputs, gradient_bounds(exact))


def infinite_query(q: Array, k: Array, v: Array) -> None:
    """Row 5's scores of its keys are -inf without a softcap."""
    q[:, 5, :, 0] = np.inf
    k[..., 0] = -np.abs(k[..., 0]) - 0.1


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("features", [{"softcap": 2.0}, {"sinks": "normal"}], ids=str)
def test_infinite_query_with_finite_lse(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any], d: int
) -> None:
    """It reaches dk and dv of the keys that it sees alone."""
    if not any(row.dtype == "fp16" for row in backend.rows("backward")):
        return
    monkeypatch.setitem(VALUES, "infinite_query", infinite_query)
    shape = {"batch": 1, "sq": 150, "sk": 170, "heads": 1, "heads_k": 1, "d": d}
    case = make(f"infinite-query-{features}", **shape, **features, causal=True,
                values="infinite_query", deterministic=False)  # fmt: skip
    if not supports_backward(backend.name, case):
        return
    call = backward(backend, case)
    first_hidden = 5 + (170 - 150) + 1
    for name in ("dk", "dv"):
        assert np.isfinite(call.tensors[name].view[:, first_hidden:].astype(np.float32)).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"alibi": "h"}], ids=str)
def test_infinite_sink(backend: Backend, features: dict[str, Any], deterministic: bool) -> None:
    """No key of its head has a weight: all gradients are 0."""
    if not any(row.dtype == "fp16" for row in backend.rows("backward")):
        return
    case = make(f"infinite-sink-{features}", heads_k=2, **features, causal=True, dlse=False,
                sinks="normal", small_dtype="fp32", deterministic=deterministic)  # fmt: skip
    calls = []
    for sink in (1.0, np.inf):
        call, sinks = case.call(), place(np.float32([sink, 0.5]), axes="h")
        forward = run(backend, case.forward, sinks=sinks)
        call.tensors["out"], call.tensors["lse"] = forward.out, forward.lse
        call.options["sinks"] = sinks
        run_call(backend, call)
        calls.append(call)
    one, other = ({name: x.view for name, x in call.outputs().items()} for call in calls)
    for name in ("dq", "dk", "dv"):
        assert (other[name][:, :, 0] == 0).all(), name
        assert bits(other[name][:, :, 1]) == bits(one[name][:, :, 1]), name
    for name in other.keys() - {"dq", "dk", "dv"}:
        assert other[name][0] == 0, name
        assert other[name][1] == one[name][1], name


def masked_by_infinity(q: Array, k: Array, v: Array) -> None:
    """All scores of key 7 are -inf: it is hidden."""
    q[..., 3] = np.abs(q[..., 3]) + 0.1
    k[:, 7, :, 3] = -np.inf


ONE_HEAD = {"heads": 1, "heads_k": 1}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"alibi": "h"},
        {"dropout_p": 0.2},
        {"bias": Bias(axes="k")},
        {"ranges": Ranges()},
        {"packed": Packed((70, 33), (40, 50))},
        {"sq": 130},
        {"d": 128, "sq": 130, **ONE_HEAD},
        {"d": 64, "causal": True, "sq": 384, "sk": 384, **ONE_HEAD},
        {"d": 96, "causal": True, "sq": 300, "sk": 300, **ONE_HEAD},
        {"d": 256, **ONE_HEAD},
        {"d": 512, **ONE_HEAD},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_key_hidden_by_infinity(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    deterministic: bool,
) -> None:
    """Its gradients are 0, also where a GPU's last tile has more rows than there are."""
    monkeypatch.setitem(VALUES, "masked_by_infinity", masked_by_infinity)
    case = make("masked-by-infinity", deterministic=deterministic, **changes,
                values="masked_by_infinity")  # fmt: skip
    if not supports_backward(backend.name, case):
        return
    call = backward(backend, case)
    outputs = {name: x.view.astype(np.float32) for name, x in call.outputs().items()}
    for name in ("dk", "dv"):
        rows = outputs[name].reshape(-1, *outputs[name].shape[-2:])
        assert (rows[7] == 0).all(), name
        assert np.isfinite(rows).all(), name
    for name in outputs.keys() - {"dq", "dk", "dv"}:
        assert np.isfinite(outputs[name]).all(), name


def call_of(inputs: dict[str, Array], grad_dtype: Any = None) -> tuple[Call, dict[str, Any]]:
    """Of dout, q, k and v, and what must come out."""
    problem = Problem(inputs["q"], inputs["k"], inputs["v"])
    forward = truth(problem)
    lse = forward.lse.astype(np.float32)
    out = forward.out.astype(inputs["q"].dtype)
    dtypes = {} if grad_dtype is None else dict.fromkeys(("dq", "dk", "dv"), grad_dtype)
    bounds = gradient_bounds(Given(problem, inputs["dout"], None, out, lse, dtypes))
    tensors = {name: place(x) for name, x in inputs.items()}
    tensors |= {"out": place(out), "lse": place(lse, axes="bhs")}
    tensors |= {name: empty(bound.truth.shape, bound.dtype) for name, bound in bounds.items()}
    return Call(tensors, {}, {}), bounds


@pytest.mark.parametrize("which", ["dk", "dv"])
@pytest.mark.parametrize("grad_dtype", ["", "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_group_is_summed_before_rounding(
    backend: Backend, dtype: str, grad_dtype: str, which: str
) -> None:
    """flash-attn sums dk and dv of a group's heads after rounding each to 16 bits.

    All probabilities are 1 / 64 and all sums are exact in float32, but a head's own has more bits
    than 11; the last head takes away nearly all of what the others have added.
    """
    if not any(row.dtype == dtype for row in backend.rows("backward")):
        return
    random = np.random.default_rng(0)
    heads, rows, keys, d = 8, 128, 64, 64
    parts = random.integers(1, 31, (1, rows, heads, d)).astype(np.float32)
    parts[:, :, -1] = random.integers(0, 2, (1, rows, d)) - parts[:, :, :-1].sum(2)
    ones, zeros = np.ones_like(parts), np.zeros((1, keys, 1, d), np.float32)
    v = zeros + (-1) ** np.arange(keys)[:, None, None]  # out is 0
    # dv is a sum of dout; dk is one of q, as all heads have the same dout and k is 0.
    given = {"q": parts, "dout": ones} if which == "dk" else {"q": 0 * parts, "dout": parts}
    inputs = {name: x.astype(DTYPES[dtype]) for name, x in (given | {"k": zeros, "v": v}).items()}
    call, bounds = call_of(inputs, DTYPES[grad_dtype or dtype])
    run_call(backend, call)
    check_gradients({name: tensor.view for name, tensor in call.outputs().items()}, bounds)


def test_default_options_and_compact_strides(backend: Backend) -> None:
    """Null options and null strides mean the defaults."""
    case = GradientCase(Case("defaults", sq=70, sk=90), dlse=False)
    call = case.call()
    tensors = [call.tensors[name] for name in capi.BACKWARD_TENSORS]
    with backend.on_device(tensors) as dl:
        for tensor in dl:
            tensor.strides = None
        size = backend.library.workspace_size(dl, None, None)
        workspace = np.empty(size, np.uint8)
        with backend.memory.resident([workspace]) as (address,):
            backend.library.backward(dl, (None, None), address, size)
    outputs = {name: tensor.view for name, tensor in call.outputs().items()}
    check_gradients(outputs, case.expected().bounds)


def test_rows_beyond_the_last_sequence_are_not_written(gpu: Backend) -> None:
    """On the CPU there must not be any."""
    features = Features(packed=Packed((33, 20), (40, 30)), poison=False)
    case = GradientCase(Case("beyond", features=features, causal=True))
    call = case.call()
    for name, tensor in list(call.tensors.items()):
        axis = 1 if name == "lse" else 0
        shape = [n + 9 * (i == axis) for i, n in enumerate(tensor.shape)]
        longer = empty(tuple(shape), tensor.view.dtype, axes="hs" if axis else "shd")
        longer.view[tuple(slice(n) for n in tensor.shape)] = tensor.view
        call.tensors[name] = longer
    dlse = call.gradient["dlse"].view
    call.gradient["dlse"] = place(np.pad(dlse, ((0, 0), (0, 9))), axes="hs")
    run_call(gpu, call)
    bounds = case.expected().bounds
    outputs = {name: tensor.view for name, tensor in call.outputs().items()}
    check_gradients({n: x[: len(bounds[n].truth)] for n, x in outputs.items()}, bounds)
    for name, x in outputs.items():
        assert np.isnan(x[len(bounds[name].truth) :]).all(), f"{name} was written too far"


# Strides that are beyond 2**31 elements on one axis.
FAR = (1 << 31) + 64


@pytest.mark.parametrize("names", [("q", "k", "v", "dout"), ("dq", "dk", "dv", "out")])
@pytest.mark.parametrize(
    "strides",
    [
        pytest.param((FAR, 2 * 64, 64, 1), id="batch"),
        pytest.param((2 * 64, FAR, 64, 1), id="row"),
        pytest.param((3 * 64, 64, FAR, 1), id="head"),
    ],
)
def test_strides_beyond_int32(
    backend: Backend, names: tuple[str, ...], strides: tuple[int, int, int, int]
) -> None:
    case = GradientCase(Case("far", batch=2, sq=3, sk=3, causal=True))
    call = case.call()
    outputs = call.outputs()
    for name in names:
        call.tensors[name] = sparse(call.tensors[name].view, strides)
        call.tensors[name].storage.flags.writeable = name in outputs
    run_call(backend, call)
    outputs = {name: tensor.view for name, tensor in call.outputs().items()}
    check_gradients(outputs, case.expected().bounds)


@pytest.mark.parametrize("axis", range(4))
def test_dbias_beyond_int32(backend: Backend, axis: int) -> None:
    features = Features(bias=Bias())
    case = GradientCase(Case("far-dbias", batch=2, sq=3, sk=3, features=features))
    call = case.call()
    strides = [72, 36, 12, 4]
    strides[axis] = FAR
    call.gradient["dbias"] = sparse(call.gradient["dbias"].view, tuple(strides))
    run_call(backend, call)
    outputs = {name: tensor.view for name, tensor in call.outputs().items()}
    check_gradients(outputs, case.expected().bounds)


# ---- memory ----


def workspace(backend: Backend, case: Case, deterministic: bool, **options: Any) -> int:
    """Of tensors that need no memory."""

    def one(dtype: str, *shape: int) -> Tensor:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        return Tensor(np.zeros(1, DTYPES[dtype]), shape, tuple(strides), 0)

    q = one(case.dtype, case.batch, case.sq, case.heads, case.d)
    k = one(case.dtype, case.batch, case.sk, case.heads_k, case.d)
    lse = one("fp32", case.batch, case.heads, case.sq)
    with backend.on_device([q, q, k, k, q, lse, q, k, k]) as dl:
        backward = capi.structure(capi.BackwardOptions, {"deterministic": deterministic})
        return backend.library.workspace_size(dl, backend.options(**options), backward)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("axes", ["sq", "sk", "sq sk"])
def test_workspace_is_linear(backend: Backend, deterministic: bool, axes: str) -> None:
    """Not quadratic, and no copy of dq for each split of the keys."""

    def size(length: int) -> int:
        case = Case("linear", batch=2, sq=1024, sk=1024, heads=8, heads_k=2)
        case = replace(case, **dict.fromkeys(axes.split(), length))
        return workspace(backend, case, deterministic)

    for length in (1024, 4096, 1 << 16):
        assert size(2 * length) <= 2 * size(length) + 65536
    # In bytes: at most float32 copies of all gradients, and three numbers a row.
    for length in (1 << 14, 1 << 18):
        rows = 2 * 8 * length
        case = Case("linear", batch=2, sq=length, sk=length, heads=8, heads_k=8)
        assert workspace(backend, case, deterministic) <= 4 * rows * (3 * 64 + 3) + (1 << 24)


def test_a_float16_dq_costs_no_more_when_deterministic(backend: Backend) -> None:
    for length in (1024, 1 << 16):
        case = Case("splits", batch=2, sq=length, sk=length, heads=8, heads_k=2)
        assert workspace(backend, case, True) <= workspace(backend, case, False) + 65536
