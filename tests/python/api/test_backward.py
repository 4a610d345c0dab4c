"""anyflash.attention_backward with each framework's arrays, against torch.autograd in float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from anyflash import AttentionGrads
from calls.backward import FIELDS, JAX, NUMPY, OPTIONS, PRODUCER, SINKS, TORCH, Case, check, near
from calls.frameworks import DTYPES, EVERY_KIND, KINDS, Kind, bits, views
from oracle.attention import Array


@EVERY_KIND
@pytest.mark.parametrize("dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kind: Kind, name: str, dlse: bool) -> None:
    case = Case(OPTIONS[name], dlse=dlse)
    check(kind, case, case.backward(kind, **case.asked))


def test_each_gradient_is_asked_for_by_itself() -> None:
    case = Case(OPTIONS["all"])
    whole = case.backward(**case.asked)
    for flag in case.asked:
        some = case.backward(**{flag: True})
        assert [name for name, x in zip(FIELDS[3:], some[3:], strict=True) if x is not None] == [
            flag.removeprefix("return_")
        ]
        for one, other in zip(some, whole, strict=True):
            assert one is None or bits(one) == bits(other)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(kind: Kind, dtype: str, name: str) -> None:
    """bias, sinks and slopes keep theirs, float32."""
    case = Case(OPTIONS[name], dtype, dlse=True)
    check(kind, case, case.backward(kind, **case.asked))


def test_options_have_their_own_dtypes() -> None:
    names = {"bias": "bfloat16", "sinks": "float64", "alibi_slopes": "float16"}
    options = {name: OPTIONS["all"][name].astype(DTYPES[x]) for name, x in names.items()}
    case = Case(options)
    grads = case.backward(**case.asked)
    for name, dtype in names.items():
        actual, right = (getattr(x, f"d{name}") for x in (grads, case.expected()))
        assert actual.dtype == DTYPES[dtype]
        near(name, actual, right, dtype)


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_grad_dtype(kind: Kind, dtype: str) -> None:
    """The default's bits are those of float32, rounded; of float64 it is the other way round."""
    options = {name: OPTIONS["all"][name].astype(DTYPES[dtype]) for name in ("bias", "sinks")}
    case = Case(options, dtype)
    taken = [
        AttentionGrads(*(x if x is None else kind.take(x) for x in grads))
        for grads in (
            case.backward(kind, **case.asked, grad_dtype="float32"),
            case.backward(kind, **case.asked, grad_dtype=dtype),
            case.backward(kind, **case.asked),
        )
    ]
    expected = case.expected()
    for name, single, named, default in zip(FIELDS, *taken, strict=True):
        if single is None:
            continue
        assert single.dtype == np.float32
        near(name, single, getattr(expected, name), "float16" if dtype != "float64" else "float32")
        assert bits(named) == bits(default)
        if dtype == "float64":
            assert bits(default.astype(np.float32)) == bits(single)
        else:
            assert bits(single.astype(default.dtype)) == bits(default)


def test_unrounded_outputs_and_their_gradients() -> None:
    """The forward's out and dout may be float32 where q is not."""
    case = Case(dtype="float16")
    arguments = case.forward(out_dtype="float32")
    arguments["dout"] = arguments["dout"].astype(np.float32)
    grads = anyflash.attention_backward(**arguments, grad_dtype=np.float32)
    for name, actual, right in zip(FIELDS[:3], grads, case.expected(), strict=False):
        near(name, actual, right)


# What is given ------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", views(np.zeros((1, 1, 1, 1))))
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
def test_views(name: str, view: str) -> None:
    arguments = Case(dlse=True).forward()
    expected = anyflash.attention_backward(**arguments)
    arguments[name] = views(arguments[name])[view]
    before = {key: x.copy() for key, x in arguments.items() if isinstance(x, np.ndarray)}
    grads = anyflash.attention_backward(**arguments)
    assert [*map(bits, grads[:3])] == [*map(bits, expected[:3])]
    assert all(bits(x) == bits(arguments[key]) for key, x in before.items())


def test_strides_of_lse_and_its_gradient() -> None:
    arguments = Case(dlse=True).forward()
    arguments["dlse"] = np.broadcast_to(np.float32(0.5), (2, 4, 30))
    expected = anyflash.attention_backward(**arguments)
    arguments["dlse"] = np.full((30, 4, 2, 3), 0.5, np.float32)[..., 1].T
    arguments["lse"] = np.asfortranarray(arguments["lse"])
    grads = anyflash.attention_backward(**arguments)
    assert [*map(bits, grads[:3])] == [*map(bits, expected[:3])]


def test_gradient_of_a_sum_of_torch(torch: ModuleType) -> None:
    """Autograd gives an expanded number: all strides are 0."""
    case = Case()
    case.dout = np.ones_like(case.dout)
    arguments = case.forward(TORCH)
    arguments["dout"] = torch.ones(()).expand(2, 30, 4, 12)
    check(TORCH, case, anyflash.attention_backward(**arguments))


@EVERY_KIND
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_infinite_lse_says_that_no_key_is_seen(kind: Kind, sinks: Array | None) -> None:
    """flash-attn has +inf there, anyflash -inf (or the sink); what lies there is not looked at."""
    options = {"seqused_k": np.array([37, 0], np.int32), "causal": True}
    case = Case(options | ({} if sinks is None else {"sinks": sinks}), dlse=sinks is None)
    arguments = case.forward(kind)
    expected = anyflash.attention_backward(**arguments)
    lse = kind.take(arguments["lse"]).copy()
    assert np.isneginf(lse[1]).all() == (sinks is None)
    lse[1] = np.inf
    grads = anyflash.attention_backward(**arguments | {"lse": kind.give(lse)})
    for one, other in zip(grads[:3], expected[:3], strict=True):
        assert bits(kind.take(one)) == bits(kind.take(other))
        assert not kind.take(one)[1].any()


def test_nothing_comes_out_of_masked_infinities() -> None:
    case = Case({"seqused_k": np.array([37, 20], np.int32)})
    right = case.backward()
    for name in "kv":
        case.arrays[name][0, 37:] = np.nan
        case.arrays[name][1, 20:] = np.inf
    grads = case.backward()
    assert [*map(bits, grads[:3])] == [*map(bits, right[:3])]
    for x in grads[1:3]:
        assert not x[0, 37:].any()
        assert not x[1, 20:].any()


@EVERY_KIND
@pytest.mark.parametrize("how", ["seed", "pair", "int64", "uint64"])
def test_random_state(kind: Kind, how: str) -> None:
    """Each way to name the same random numbers."""
    case = Case({"dropout_p": 0.25, "rng_state": (7, 3 if how != "seed" else 0)})
    arguments = case.forward(kind)
    expected = anyflash.attention_backward(**arguments)
    state = arguments.pop("rng_state")
    assert state == case.options["rng_state"]
    given: dict[str, Any] = {
        "seed": {"seed": 7},
        "pair": {"rng_state": [7, 3]},
        "int64": {"rng_state": kind.give(np.array([7, 3]))},
        "uint64": {"rng_state": kind.give(np.array([7, 3], np.uint64))},
    }[how]
    grads = anyflash.attention_backward(**arguments, **given)
    for one, other in zip(grads[:3], expected[:3], strict=True):
        assert bits(kind.take(one)) == bits(kind.take(other))
    other = anyflash.attention_backward(**arguments, rng_state=(8, 0))
    assert bits(kind.take(other.dq)) != bits(kind.take(grads.dq))


def test_drawn_seeds_are_in_the_result() -> None:
    case = Case({"dropout_p": 0.5})
    check(NUMPY, case, case.backward())


@pytest.mark.parametrize("state", [{}, {"seed": 3}, {"rng_state": (3, 0)}])
def test_no_dropout(state: dict[str, Any]) -> None:
    arguments = Case().forward()
    assert arguments.pop("rng_state") is None
    before = bits(np.random.get_state()[1])
    grads = anyflash.attention_backward(**arguments, dropout_p=0, **state)
    assert bits(grads.dq) == bits(Case().backward().dq)
    assert bits(np.random.get_state()[1]) == before


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_empty(rows: int, keys: int) -> None:
    q, k = np.ones((2, rows, 2, 8), np.float32), np.ones((2, keys, 2, 8), np.float32)
    bias, sinks = np.zeros((rows, keys), np.float32), np.zeros(2, np.float32)
    out, lse = anyflash.attention(q, k, k, bias=bias, sinks=sinks, return_lse=True)
    flags = {"return_dbias": True, "return_dsinks": True}
    grads = anyflash.attention_backward(out, q, k, k, out, lse, bias=bias, sinks=sinks, **flags)
    shapes = [q.shape, k.shape, k.shape, bias.shape, sinks.shape]
    assert [x.shape for x in grads[:5]] == shapes
    assert not any(x.any() for x in grads[:5])


# dq=, dk=, dv= ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("dq",), ("dk", "dv"), ("dq", "dk", "dv")], ids="-".join)
@pytest.mark.parametrize(
    ("dtype", "own"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_given_gradients(names: tuple[str, ...], dtype: str, own: str) -> None:
    """All of them have the dtype of those that are given."""
    arguments = Case(dtype=dtype).forward()
    grad_dtype = np.dtype(DTYPES[own])
    expected = anyflash.attention_backward(**arguments, grad_dtype=grad_dtype)
    given = {name: np.full_like(getattr(expected, name), np.nan) for name in names}
    grads = anyflash.attention_backward(**arguments, **given)
    for name, one, other in zip(FIELDS, grads[:3], expected[:3], strict=False):
        assert (one.dtype, bits(one)) == (grad_dtype, bits(other))
        assert name not in given or given[name] is one


def test_given_gradients_are_views() -> None:
    arguments = Case().forward()
    expected = anyflash.attention_backward(**arguments)
    frames, given = [], {}
    for name, x in zip(FIELDS, expected[:3], strict=False):
        batch, rows, heads, dim = x.shape
        frames.append(np.full((batch, heads, rows + 2, dim + 2), 7, np.float32))
        given[name] = frames[-1].swapaxes(1, 2)[:, 1:-1, :, 1:-1]
    grads = anyflash.attention_backward(**arguments, **given)
    assert [*map(bits, grads[:3])] == [*map(bits, expected[:3])]
    for frame, x in zip(frames, given.values(), strict=True):
        x[...] = 7
        assert (frame == 7).all(), "written outside"


def test_given_gradients_of_other_frameworks(torch: ModuleType, jax: ModuleType) -> None:
    for kind in (TORCH, PRODUCER):
        arguments = Case().forward(kind)
        memory = {f"d{name}": np.full_like(x, np.nan) for name, x in Case().arrays.items()}
        given = kind.give(memory)
        grads = anyflash.attention_backward(**arguments, **given)
        assert all(x is given[name] for name, x in zip(FIELDS, grads[:3], strict=False))
        expected = Case().backward()
        assert [*map(bits, memory.values())] == [*map(bits, expected[:3])]
    arguments = Case().forward(JAX)
    with pytest.raises(TypeError, match=r"anyflash\.attention_backward: dk is a JAX.*immutable"):
        anyflash.attention_backward(**arguments, dk=arguments["k"])
