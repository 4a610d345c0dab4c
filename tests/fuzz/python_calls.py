"""Calls of the public Python functions, right ones and wrong ones, for hypothesis.

What must hold: a call returns, or raises one of `ALLOWED` with a message that names an argument;
if one argument was changed, that one. Nothing that was given is written to by a call that fails.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import torch
from devices import HAS_JAX, described, end_if_lost, host
from hypothesis import strategies as st
from right_calls import Call

ALLOWED: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError)
if HAS_JAX:  # raised when the work runs; by a mesh axis that there is not
    jax = importlib.import_module("jax")
    ALLOWED = (*ALLOWED, jax.errors.JaxRuntimeError, NameError)


class Broken:
    """An array whose producer fails, or gives what is no capsule."""

    def __init__(self, what: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.what = what
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what

    def __repr__(self) -> str:
        return f"Broken({self.what!r})"


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 64, 128, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400),
    *(0.0, -0.0, 0.5, 0.25, 1.0, 30.0, -1.5, 1e-300, 1e300, 1e-45, float("inf"), float("-inf")),
    *(float("nan"), np.float32(0.5), np.int64(3), np.uint64(2**64 - 1), np.float16("inf")),
    *(True, False, np.bool_(True), 1j),
)
OBJECTS: tuple[Any, ...] = (
    *(
        None,
        "x",
        b"x",
        "",
        "float16",
        "cpu",
        [],
        [1, 2],
        (),
        {},
        {"a": 1},
        ...,
        object,
        len,
        slice(1),
    ),
    *(
        (0, 0),
        (None, None),
        (1, None),
        (-1, -1),
        (-2, 5),
        (1, 2, 3),
        ("a", "b"),
        (64, 64),
        (2.0, 1),
    ),
    *((10**400, 0), (np.int64(1), np.int32(2)), (True, False), ([], [])),
    *(torch.float16, np.float16, np.dtype("f8"), torch.device("cpu"), np.random.default_rng(0)),
)
DTYPES: tuple[Any, ...] = (
    *(
        np.float32,
        np.float64,
        np.float16,
        ml_dtypes.bfloat16,
        np.int32,
        np.int64,
        np.int8,
        np.uint8,
    ),
    *(np.bool_, np.uint64, np.int16, np.complex64, ">f4", "U1", object, "M8[s]", "i4,f4"),
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


@st.composite
def arrays(draw: st.DrawFn, call: Call) -> Any:
    """Of any rank, dtype and layout; of one framework or another, or where the call's lie."""
    sizes = st.sampled_from((1, 4, 2, 8, 0, 3, 5))
    shape = tuple(draw(st.lists(sizes, max_size=5)))
    x = np.zeros(shape, draw(st.sampled_from(DTYPES)))
    layout = draw(st.integers(0, 6 if call.device == "cpu" else 9))
    if layout == 1 and x.ndim:
        x = x[..., ::-1]
    elif layout == 2:
        x = x.T
    elif layout == 3 and x.ndim:
        x = np.broadcast_to(x[:1], x.shape) if x.shape[0] else x
    elif layout == 4:
        x.flags.writeable = False
    elif layout == 5:
        return np.ma.masked_array(x)
    elif layout >= 6:
        try:
            return torch.from_numpy(np.array(x)) if layout == 6 else call.array(x)
        except (TypeError, ValueError):
            return x
    return x


@st.composite
def near(draw: st.DrawFn, call: Call, x: np.ndarray) -> Any:
    """An array close to a right one, which holds x: another dtype, shape or layout."""
    how = draw(st.integers(0, 7))
    if how == 0:
        wide = x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
        y = wide.astype(draw(st.sampled_from(DTYPES[:14])))
    elif how == 1 and x.ndim:
        y = np.concatenate((x, x), draw(st.integers(0, x.ndim - 1)))
    elif how == 2 and x.ndim:
        y = x[(slice(None),) * draw(st.integers(0, x.ndim - 1)) + (slice(0, 1),)]
    elif how == 3 and x.ndim:
        y = x[(slice(None),) * draw(st.integers(0, x.ndim - 1)) + (slice(0, 0),)]
    elif how == 4:
        y = x[None]
    elif how == 5 and x.ndim:
        y = x[..., 0]
    elif how == 6:
        y = np.broadcast_to(np.zeros_like(x[:1]) if x.ndim else x, x.shape)
    else:
        y = np.full_like(x, draw(st.sampled_from((0, 1, 2, 100, -5))))
    if call.array is np.array or draw(st.integers(0, 9)) == 0:
        return y
    try:
        return call.array(y)
    except (TypeError, ValueError):
        return y


def wrong(call: Call, name: str) -> st.SearchStrategy[Any]:
    choices = [
        st.sampled_from(NUMBERS),
        st.sampled_from(OBJECTS),
        arrays(call),
        st.sampled_from((RuntimeError("no"), KeyError("k"), 5, None)).map(
            functools.partial(Broken, device=(1 if call.device == "cpu" else 2, 0))
        ),
    ]
    held = host(call.arguments.get(name))
    if held is not None:
        choices += [near(call, held)] * 6
    return st.one_of(choices)


@st.composite
def changed_calls(draw: st.DrawFn, found: list[Call]) -> tuple[Call, dict[str, Any]]:
    call = draw(st.sampled_from(found))
    changes = {}
    for name in draw(st.lists(st.sampled_from(call.parameters), max_size=3, unique=True)):
        changes[name] = draw(wrong(call, name).filter(lambda x, n=name: is_cheap(n, x)))
        if name == "stream" and call.device == "cuda":
            changes[name] = harmless_stream(changes[name])
    return call, changes


def is_cheap(name: str, value: Any) -> bool:
    """Whoever asks for a map of 2^31 sequences gets one, as far as memory goes."""
    sizes = ("batch", "heads", "seqlen_q", "seqlen_k", "length", "devices", "seqlen")
    sizes += ("first_axis_dim",)
    return name not in sizes or not isinstance(value, int | np.integer) or value <= 4096


def harmless_stream(value: Any) -> Any:
    """Any other number is the address of a stream: CUDA reads what is there."""
    is_address = isinstance(value, int) and 2 < value < 2**64
    return value % 3 if is_address else value


def bits(held: np.ndarray | None) -> bytes:
    return b"" if held is None else held.tobytes()


# How messages call what a function's own name for it is.
ALIASES = {
    **{"query": "q", "key": "k", "value": "v", "k": "k_cache", "v": "v_cache"},
    **{"qkv": "q", "kv": "k", "cu_seqlens": "cu_seqlens_q"},
    **{"max_seqlen": "max_seqlen_q", "page_table": "block_table"},
    "prior": r"prior_\w+",  # its parts
}


def names(call: Call, message: str, argument: str) -> bool:
    other = ALIASES.get(argument, argument)
    return any(re.search(rf"(?<!\w){name}(?!\w)", message) for name in (argument, other))


def check(call: Call, changes: dict[str, Any]) -> bool:
    """Whether the call succeeded. Raises AssertionError for what must not be."""
    right = {name: copy.copy(x) if host(x) is None else x for name, x in call.arguments.items()}
    given = right | changes
    before = {name: host(x) for name, x in given.items()}

    def shown() -> str:
        values = ", ".join(described(name, x, before[name]) for name, x in given.items())
        return f"{call.name}({values})"

    settled = functools.partial(end_if_lost, call.device, shown)
    try:
        call.function(**given)
        settled()
        return True
    except Exception as error:
        settled()
        if any(isinstance(x, Broken) and error is x.what for x in changes.values()):
            return False  # a producer's own exception goes through
        if callable(changes.get("predicate")):
            return False  # as a predicate's does
        if isinstance(error, torch.OutOfMemoryError):
            return False  # a GPU's memory is PyTorch's
        # PyTorch's function raises what PyTorch raises.
        assert isinstance(error, ALLOWED) or (
            type(error) is RuntimeError and call.name.endswith("scaled_dot_product_attention")
        ), f"{call.name} raises {error!r}"
        message = str(error)
        after = {name: host(x) for name, x in given.items()}
        same = all(bits(before[name]) == bits(x) for name, x in after.items())
        assert same, f"{call.name} has written, and failed: {message}"
        assert changes, f"{call.name} refuses what is right: {message}"
        named = any(names(call, message, name) for name in changes)
        only = len(changes) == 1
        assert named or (not only and any(names(call, message, n) for n in call.parameters)), (
            f"{call.name} does not name {list(changes)}: {message}"
        )
        return False
