"""What a case of the backward is: a case of the forward, and what the backward is given besides.

What it costs the emulator is counted in the forward's tiles (case.py), about 10 ms each.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from backends.tensors import LAYOUTS, Tensor, empty, place
from cases.case import FULL, Case, Features
from oracle.attention import truth
from oracle.gradients import Bound, Given, gradient_bounds
from oracle.problem import DTYPES, Array, unseeing_queries

EMULATED_TILES = 400 if FULL else 24
SMALL = {"dbias": "bias", "dsinks": "sinks", "dalibi_slopes": "alibi_slopes"}


class GradientLayouts(NamedTuple):
    dout: str = "contiguous"
    dq: str = "contiguous"
    dk: str = "contiguous"
    dv: str = "contiguous"
    dlse: str = "contiguous"
    dbias: str = "contiguous"


class Call(NamedTuple):
    """The arguments of Backend.backward(), by name; outputs are full of NaN canaries."""

    tensors: dict[str, Tensor]
    gradient: dict[str, Any]
    options: dict[str, Any]

    def outputs(self) -> dict[str, Tensor]:
        """By name, the gradients."""
        small = {name: self.gradient[name] for name in SMALL if name in self.gradient}
        return {name: self.tensors[name] for name in ("dq", "dk", "dv")} | small


@dataclass(frozen=True)
class GradientCase:
    forward: Case
    layouts: GradientLayouts = field(default_factory=GradientLayouts)
    dout: str = "normal"
    dlse: bool = True
    small: bool = True  # whether the gradients of bias, sinks and slopes are wanted
    dout_dtype: str = ""  # q's
    grad_dtype: str = ""  # of dq, dk and dv; q's
    small_gradients: str = ""  # dtype of the others; that of their tensors
    deterministic: bool = False
    keyless_lse: float = -np.inf  # flash-attention's is +inf
    everywhere: bool = True  # on all backends; else on `cpu` and `cuda`

    @property
    def id(self) -> str:
        return self.forward.id

    def _random(self, what: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.id} {what}".encode()))

    @property
    def smoke(self) -> bool:
        return self.forward.smoke

    def _axes(self, of_batch: str) -> str:
        return of_batch[1:] if self.forward.features.packed else of_batch

    @property
    def _poison(self) -> bool:
        return self.forward.features.poison

    def inputs(self) -> dict[str, Any]:
        """q, k, v, dout, dlse and, under "options", the forward's: fresh ones."""
        case = self.forward
        q, k, v, out, lse = case.tensors()
        options = case.options()
        unseeing = unseeing_queries(case.problem()).reshape(q.shape[:-1])
        if self._poison and not LAYOUTS[case.layouts.q].expand:
            q.view[unseeing] = np.nan
        dout = self._random("dout").standard_normal(out.shape)
        DOUT[self.dout](dout)
        dlse = self._random("dlse").standard_normal(lse.shape)
        if self._poison:
            dout[unseeing] = np.nan
            if "sinks" not in options:  # of a sink the LSE tells something
                dlse[unseeing.swapaxes(-1, -2)] = np.nan
        dout = dout.astype(DTYPES[self.dout_dtype or case.dtype])
        inputs = {"q": q, "k": k, "v": v, "options": options}
        inputs["dout"] = place(dout, self.layouts.dout, self._axes("bshd"))
        if self.dlse:
            dlse = dlse.astype(np.float32)
            inputs["dlse"] = place(dlse, self.layouts.dlse, self._axes("bhs"))
        return inputs

    def given(self, inputs: dict[str, Any]) -> Given:
        """`out` and `lse` are the truth, rounded as the forward would."""
        case = self.forward
        problem = case.problem_of(*(inputs[name].view for name in "qkv"))
        forward = truth(problem)
        lse = np.where(np.isneginf(forward.lse), self.keyless_lse, forward.lse)
        dlse = inputs.get("dlse")
        given = Given(
            problem,
            inputs["dout"].view,
            None if dlse is None else dlse.view,
            forward.out.astype(case.dtype_of_out),
            lse.astype(np.float32),
        )
        for name in given.inputs():
            of_this = self.small_gradients if name in SMALL else self.grad_dtype
            if of_this:
                given.dtypes[name] = DTYPES[of_this]
        return given

    def call(self) -> Call:
        expected, case = self.expected(), self.forward
        inputs = self.inputs()
        tensors = {name: inputs[name] for name in ("dout", "q", "k", "v")}
        tensors["out"] = place(expected.out, case.layouts.out, self._axes("bshd"))
        tensors["lse"] = place(expected.lse, case.layouts.lse, self._axes("bhs"))
        gradient: dict[str, Any] = {"deterministic": self.deterministic}
        if self.dlse:
            gradient["dlse"] = inputs["dlse"]
        for name, bound in expected.bounds.items():
            shape, dtype = bound.truth.shape, bound.dtype
            if name not in SMALL:
                layout = getattr(self.layouts, name)
                tensors[name] = empty(shape, dtype, layout, self._axes("bshd"))
            elif self.small:
                layout = self.layouts.dbias if name == "dbias" else "step_h"
                axes = {4: "bshd", 2: "bh", 1: "h"}[len(shape)]
                gradient[name] = empty(shape, dtype, layout, axes)
        return Call(tensors, gradient, inputs["options"])

    def expected(self) -> Expected:
        return _expected(self)


class Expected(NamedTuple):
    out: Array  # what the backward is given
    lse: Array
    bounds: dict[str, Bound]


@functools.lru_cache(maxsize=16)
def _expected(case: GradientCase) -> Expected:
    given = case.given(case.inputs())
    assert given.out is not None
    assert given.lse is not None
    return Expected(given.out, given.lse, gradient_bounds(given))


# Changes to standard normal values, in place; rows are ([batch,] row, head, head_dim_v).
DOUT: dict[str, Callable[[Array], object]] = {
    "normal": lambda x: None,
    "large": lambda x: np.multiply(x, 100, out=x),
    "zeros": lambda x: x.fill(0),
    "nan": lambda x: x[..., 5, :, :].fill(np.nan),
    "nan_element": lambda x: x[..., 5, :1, 3].fill(np.nan),
}


FIELDS = frozenset(GradientCase.__dataclass_fields__) - {"forward", "layouts"}
FIELDS_OF_CASE = frozenset(Case.__dataclass_fields__)
BASE: dict[str, Any] = {"sq": 70, "sk": 90, "heads": 2, "heads_k": 1, "dtype": "fp16"}


def make(name: str, **changes: Any) -> GradientCase:
    """`changes` are fields of GradientCase (gradient_layouts its layouts), Case, and Features."""
    # dq is made in one pass or in a second one of its own: half of the cases each.
    changes = {"deterministic": zlib.crc32(name.encode()) % 2 == 1} | BASE | changes
    if changes["dtype"] == "fp64":  # whose oracle is slow
        changes = {"d": 8} | changes
    own = {field: x for field, x in changes.items() if field in FIELDS}
    if "gradient_layouts" in changes:
        own["layouts"] = changes.pop("gradient_layouts")
    of_case = {field: x for field, x in changes.items() if field in FIELDS_OF_CASE}
    features = {n: x for n, x in changes.items() if n not in own and n not in of_case}
    return GradientCase(Case(name, **of_case, features=Features(**features)), **own)
