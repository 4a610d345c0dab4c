"""Calls of anyflash.attention_backward on each framework's arrays, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import anyflash
from anyflash import AttentionGrads
from calls.frameworks import DTYPES, KINDS, Kind, inputs, random
from oracle.attention import Array
from oracle.torch_reference import gradients

FIELDS = AttentionGrads._fields
# Of the largest gradient. The LSE is float32 always, and 10 or more with ALiBi: off by 1e-6.
TOLERANCE = {"float64": 4e-6, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
NUMPY, TORCH, JAX, PRODUCER = KINDS


@dataclass
class Case:
    """A forward and the gradients of its outputs: 2 x 30 queries, 50 keys, 4 heads on 2."""

    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    dlse: bool = False

    def __post_init__(self) -> None:
        self.arrays = dict(zip("qkv", inputs(self.dtype), strict=True))
        shapes = (2, 30, 4, 12), (2, 4, 30)
        generator = np.random.default_rng(9)
        dout, dlse = (generator.standard_normal(shape) for shape in shapes)
        self.dout = dout.astype(DTYPES[self.dtype])
        self.given = {"dlse": dlse.astype(np.float32)} if self.dlse else {}

    @property
    def asked(self) -> dict[str, bool]:
        """For all gradients that there are."""
        names = ("bias", "sinks", "alibi_slopes")
        given = {name: self.options[name] for name in names if name in self.options}
        return {f"return_d{name}": True for name, x in given.items() if x.dtype != bool}

    def forward(self, kind: Kind = NUMPY, **more: Any) -> dict[str, Any]:
        """The arguments of attention_backward."""
        given, options = kind.give(self.arrays), kind.give(self.options)
        result = anyflash.attention(**given, **options, return_dropout_mask=True, **more)
        self.mask = kind.take(result.dropout_mask)
        options = {key: x for key, x in options.items() if key not in ("seed", "rng_state")}
        options |= {"out": result.out, "lse": result.lse, "rng_state": result.rng_state}
        return {"dout": kind.give(self.dout), **given, **options, **kind.give(self.given)}

    def backward(self, kind: Kind = NUMPY, **more: Any) -> AttentionGrads:
        return anyflash.attention_backward(**self.forward(kind), **more)

    def expected(self) -> AttentionGrads:
        """After the forward, whose dropout is taken."""
        p = self.options.get("dropout_p", 0.0)
        options = {key: x for key, x in self.options.items() if key not in ("seed", "dropout_p")}
        kept = self.mask / (1 - p) if p else None
        return gradients(self.arrays, self.dout, self.given.get("dlse"), kept, **options)


def near(name: str, actual: Array, right: Array, dtype: str = "float32") -> None:
    # A bias that all keys share has a gradient of 0, as the sum of numbers of order 1.
    tolerance = TOLERANCE[dtype] * np.abs(right).max(initial=1)
    error = np.abs(actual.astype(np.float64) - right).max(initial=0)
    assert error <= tolerance, f"{name}: error {error:.3g}, allowed {tolerance:.3g}"


def check(kind: Kind, case: Case, grads: AttentionGrads) -> None:
    """Values, shapes, dtypes and types, and None for what was not asked for."""
    expected = case.expected()
    for name, actual, right in zip(FIELDS, grads, expected, strict=True):
        like = (case.arrays | case.options).get(name[1:])
        if right is None:
            assert actual is None, name
            continue
        assert isinstance(actual, anyflash.Array if kind is PRODUCER else type(kind.give(like)))
        taken = kind.take(actual)
        assert (taken.shape, taken.dtype) == (like.shape, like.dtype), name
        near(name, taken, right, case.dtype)


SLOPES, SINKS, BIAS = random(4), random(4), random(2, 4, 30, 50)
KEEP = BIAS > 0
RANGES = np.random.default_rng(1).integers(-5, 40, (2, 2, 50, 4), np.int32)
RANGES[:, :, :20, 0], RANGES[:, :, :20, 1] = 3, 30  # the first rows see few keys
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": -0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "window-causal": {"window_size": (9, None), "causal": True},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi-batch": {"alibi_slopes": random(2, 4)},
    "bias": {"bias": BIAS},
    "bias-heads": {"bias": BIAS[:1]},
    "bias-batch": {"bias": BIAS[:, :1]},
    "bias-3": {"bias": BIAS[0]},
    "bias-2": {"bias": BIAS[0, 0]},
    "bias-1": {"bias": BIAS[0, 0, 0]},
    "bias-0": {"bias": np.full((), 3, np.float32)},
    "bias-rows": {"bias": BIAS[:, :, :, :1]},
    "bias-strided": {"bias": random(50, 4, 30, 4)[..., ::2].transpose(3, 1, 2, 0)},
    "bias-stride-0": {"bias": np.broadcast_to(BIAS[0, 0, 0], (2, 4, 30, 50))},
    "bias-inf": {"bias": np.where(KEEP, np.float32(0.5), np.float32(-np.inf))},
    "keep": {"bias": KEEP},
    "blocks": {"block_mask": np.array([[True], [False]])[:, :, None, None]},
    "ranges": {"key_ranges": RANGES, "causal": True},
    "ranges-heads": {"key_ranges": RANGES[:1, :, :, 2:]},
    "ranges-batch": {"key_ranges": RANGES[:, :1], "alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "sinks-strided": {"sinks": random(4, 2)[:, 1]},
    "seqused": {"seqused_k": np.array([37, 0], np.int32), "causal": True, "sinks": SINKS},
    "dropout": {"dropout_p": 0.25, "seed": 7},
    "all": {
        **{"window_size": (20, 4), "softcap": 0.7, "alibi_slopes": SLOPES, "bias": BIAS[0]},
        **{"sinks": SINKS, "dropout_p": 0.25, "seed": 7, "softmax_scale": 0.4},
        "key_ranges": RANGES,
    },
}
