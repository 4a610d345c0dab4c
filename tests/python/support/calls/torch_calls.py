"""Calls of anyflash.torch, and what they must give: forward and gradients at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anyflash import AttentionGrads
from calls.backward import FIELDS, SINKS, SLOPES
from calls.frameworks import DTYPES, Kind, inputs, random
from calls.varlen import packed
from oracle.attention import Array, check, reference_of
from oracle.gradients import Given, check_gradients, gradient_bounds
from oracle.problem import Problem

TORCH = Kind("torch")
RANGES_OF_PACKED = np.random.default_rng(1).integers(-2, 10, (2, 30, 4), np.int32)
LEAVES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")  # in the order of AttentionGrads
VARLEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "all": {
        **{"window_size": (8, 4), "softcap": 0.7, "alibi_slopes": random(5, 4), "sinks": SINKS},
        **{"bias": random(5, 4, 9, 20), "dropout_p": 0.3, "seed": 5, "softmax_scale": 0.4},
    },
    "bias-1": {"bias": random(9, 20), "alibi_slopes": SLOPES},
    "seqused": {"seqused_k": np.array([3, 4, 0, 0, 11], np.int32), "causal": True},
    "ranges": {"key_ranges": RANGES_OF_PACKED},
    "ranges-heads": {"key_ranges": RANGES_OF_PACKED[:1, :, :2], "causal": True},
    "validate": {"window_size": (None, 2)},
}


# Each sequence sees some of the blocks, of 64 queries and 128 keys.
BLOCKS = {"block_mask": np.array([[[True, False], [False, True]]])[None], "block_size": (64, 128)}
PARTS: dict[str, dict[str, Any]] = {
    "dense": {"q": random(1, 90, 2, 8), "k": random(1, 150, 1, 8), "v": random(1, 150, 1, 5)},
    "packed": {
        **{"q": random(95, 2, 8), "k": random(160, 1, 8), "v": random(160, 1, 5)},
        **{"cu_seqlens_q": np.array([0, 5, 95], np.int32), "max_seqlen_q": 90},
        **{"cu_seqlens_k": np.array([0, 10, 160], np.int32), "max_seqlen_k": 150},
    },
}
_CU = ("cu_seqlens_q", "cu_seqlens_k")


def _four(mask: Array) -> Array:
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def problem_of(arrays: dict[str, Any], rng_state: Any = None) -> Problem:
    """``arrays``: what anyflash.attention or attention_varlen is given, by name."""
    given = dict(arrays)
    left, right = (-1 if x is None else x for x in given.pop("window_size", (-1, -1)))
    given |= {name: _four(given[name]) for name in ("bias", "block_mask") if name in given}
    given.pop("seed", None)
    if rng_state is not None:
        given |= dict(zip(("seed", "offset"), (int(x) % 2**64 for x in rng_state), strict=True))
    if "out_dtype" in given:
        given["out_dtype"] = np.dtype(DTYPES[given["out_dtype"]])
    return Problem(**given, window_left=left, window_right=right)


@dataclass
class Call:
    """Dense: 2 x 30 queries, 50 keys, 4 heads on 2; packed: sequences of varlen.py."""

    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    varlen: bool = False

    def __post_init__(self) -> None:
        if self.varlen:
            names = ("q", "k", "v", *_CU, "max_seqlen_q", "max_seqlen_k")
            self.arrays = dict(zip(names, packed(DTYPES[self.dtype]), strict=True))
        else:
            self.arrays = dict(zip("qkv", inputs(self.dtype), strict=True))
        self.arrays |= self.options
        rows = self.arrays["q"].shape
        out = (*rows[:-1], self.arrays["v"].shape[-1])
        lse = (*rows[:-3], rows[-2], rows[-3])
        generator = np.random.default_rng(9)
        dtype = DTYPES[self.options.get("out_dtype", self.dtype)]
        self.dout = generator.standard_normal(out).astype(dtype)
        self.dlse = generator.standard_normal(lse).astype(np.float32)

    def tensors(self, *leaves: str) -> dict[str, Any]:
        """The arguments; those named, all where none is, require grad."""
        given: dict[str, Any] = TORCH.give(self.arrays)
        for name in leaves or LEAVES:
            if name in given and given[name].is_floating_point():
                given[name] = given[name].clone().requires_grad_()
        return given

    def attend(self, given: dict[str, Any], **more: Any) -> Any:
        import anyflash.torch

        call = anyflash.torch.attention_varlen if self.varlen else anyflash.torch.attention
        return call(**given, **more)

    def backward(self, result: Any, given: dict[str, Any]) -> AttentionGrads:
        """By autograd, from out and lse."""
        torch = TORCH.module
        loss = (result[0] * TORCH.give(self.dout)).sum() + (result[1] * TORCH.give(self.dlse)).sum()
        leaves = [given[x] for x in LEAVES if x in given and given[x].requires_grad]
        found = iter(torch.autograd.grad(loss, leaves))
        wanted = (x in given and given[x].requires_grad for x in LEAVES)
        return AttentionGrads(*(next(found) if x else None for x in wanted))

    def verify(self, result: Any, grads: AttentionGrads) -> None:
        """All are as exact as a naive program's."""
        problem = problem_of(self.arrays, result.rng_state)
        out, lse = (TORCH.take(x.detach()) for x in result[:2])
        check(out, lse, reference_of(problem))
        given = Given(problem, self.dout, self.dlse, out, lse)
        taken = {
            name: TORCH.take(x) for name, x in zip(FIELDS, grads, strict=True) if x is not None
        }
        if "dbias" in taken:
            taken["dbias"] = _four(taken["dbias"])
        check_gradients(taken, gradient_bounds(given))
