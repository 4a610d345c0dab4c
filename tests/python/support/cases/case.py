"""What a case is. The tables that every backend runs: forward.py, features.py, varlen.py.

A case is cheap to name and to repeat; its values follow from its id. What it costs the emulator is
counted in tiles of 128 queries x 64 keys x 64 columns, about 3 ms each.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from backends.tensors import Tensor, empty, place
from cases.auxiliary import OUTPUTS, UINT64, options_of
from oracle.attention import DTYPES, Array, Problem, Reference, reference_of, unseen_keys

FULL = os.environ.get("ANYFLASH_TEST_FULL") == "1"
EMULATED_TILES = 4000 if FULL else 200


def is_sampled(case: Any, every: int) -> bool:
    """Whether a backend that runs one of `every` cases runs this one: the same ones each time."""
    return FULL or case.smoke or zlib.crc32(case.id.encode()) % every == 0


class Layouts(NamedTuple):
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    out: str = "contiguous"
    lse: str = "contiguous"


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Bias(NamedTuple):
    dtype: str = ""  # q's; "bool", "uint8", or another floating type
    axes: str = "bhqk"  # the others have extent 1
    values: str = "normal"
    layout: str = "contiguous"


class Blocks(NamedTuple):
    """A block map; each block is kept with this probability."""

    size: tuple[int, int] = (64, 64)
    axes: str = "bh"  # the others have extent 1
    keep: float = 0.5
    layout: str = "contiguous"


class Ranges(NamedTuple):
    """The rows that see each key, in one interval or two."""

    values: str = "normal"
    intervals: int = 1
    axes: str = "bh"  # batch and heads of k; the others have extent 1
    layout: str = "contiguous"


class Packed(NamedTuple):
    """Lengths of packed sequences."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    spare: int = 0  # by which max_seqlen_q and max_seqlen_k are larger than need be


class Part(NamedTuple):
    """Which part of a larger attention a case is; tuples are for each sequence, in an array."""

    query: int | tuple[int, ...] | None = None
    key: int | tuple[int, ...] | None = None
    diagonal: int | tuple[int, ...] | None = None
    batch: int = 0
    head: int = 0
    other_heads: int = 0  # of the whole


GPU_HEAD_DIM = 512  # the largest that GPU kernels take
LARGE_BLOCK = 128  # below it, Hopper's kernel would visit more than other kernels
LARGE_SOFTCAP = 256.0  # above it, the backward's own kernel for softcaps would be too imprecise


@dataclass(frozen=True)
class Features:
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi: str = ""  # axes: "h", "bh", or "1h" for (1, heads)
    bias: Bias | None = None
    blocks: Blocks | None = None
    ranges: Ranges | None = None
    sinks: str = ""  # "normal", or "none" for the first head and the others normal
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    rng_state: bool = False  # seed and offset in a tensor
    small_dtype: str = ""  # of slopes and sinks; q's
    max_logits: bool = True
    outputs: str = "contiguous"  # layout of max_logits and dropout_mask
    packed: Packed | None = None
    seqused_k: tuple[int, ...] = ()
    part: Part | None = None
    poison: bool = True  # keys and values that no query sees are NaN and infinity

    @property
    def variants(self) -> set[str]:
        """The variants of GPU kernels that can do it. There is a "scored" one of the forward."""
        asked = {
            "alibi": self.alibi,
            "softcap": self.softcap,
            "dropout": self.dropout_p,
            "ranges": self.ranges,
            "blocks": self.blocks,
        }
        features = {name for name, value in asked.items() if value}
        able = {"generic"}
        if self.bias or (self.blocks and min(self.blocks.size) < LARGE_BLOCK):
            return able
        if features and features <= {"alibi", "softcap"}:
            able.add("scored")
        if len(features) < 2 and self.softcap <= LARGE_SOFTCAP:
            able |= features or {"plain"}
        return able


NO_FEATURES = Features(max_logits=False, poison=False)


@dataclass(frozen=True)
class Case:
    id: str
    dtype: str = "fp16"
    batch: int = 1  # batch, sq and sk follow from packed lengths
    sq: int = 64
    sk: int = 64
    heads: int = 2
    heads_k: int = 2
    d: int = 64
    dv: int = 0  # 0: d
    causal: bool = False
    scale: float | None = None
    layouts: Layouts = field(default_factory=Layouts)
    values: str = "normal"
    out_dtype: str = ""  # q's
    features: Features = NO_FEATURES
    smoke: bool = False  # run under compute-sanitizer
    gpu_only: bool = False  # about a limit that only GPUs have

    def __post_init__(self) -> None:
        if packed := self.features.packed:
            object.__setattr__(self, "batch", len(packed.q))
            object.__setattr__(self, "sq", max(packed.q, default=0) + packed.spare)
            object.__setattr__(self, "sk", max(packed.k, default=0) + packed.spare)

    @property
    def head_dim_v(self) -> int:
        return self.dv or self.d

    @property
    def lengths(self) -> list[tuple[int, int]]:
        if packed := self.features.packed:
            return list(zip(packed.q, packed.k, strict=True))
        return [(self.sq, self.sk)] * self.batch

    @property
    def empty(self) -> bool:
        return self.heads == 0 or not any(sq for sq, _ in self.lengths)

    @property
    def cpu_only(self) -> bool:
        bias = self.features.bias
        float64 = "fp64" in (self.dtype, self.features.small_dtype, bias and bias.dtype)
        return float64 or max(self.d, self.head_dim_v) > GPU_HEAD_DIM

    @property
    def tiles(self) -> float:
        blocks = sum(-(-sq // 128) * -(-sk // 64) for sq, sk in self.lengths)
        return self.heads * blocks * max(self.d, self.head_dim_v, 64) / 64

    @property
    def scores(self) -> int:
        return self.heads * sum(sq * max(sk, 1) for sq, sk in self.lengths)

    def values_of_inputs(self) -> tuple[Array, Array, Array]:
        random = np.random.default_rng(zlib.crc32(self.id.encode()))
        batch, sq, sk = self.batch, self.sq, self.sk
        if packed := self.features.packed:
            batch, sq, sk = 1, sum(packed.q), sum(packed.k)
        shapes = (
            (batch, sq, self.heads, self.d),
            (batch, sk, self.heads_k, self.d),
            (batch, sk, self.heads_k, self.head_dim_v),
        )
        q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
        VALUES[self.values](q, k, v)
        dtype = DTYPES[self.dtype]
        q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
        return (q[0], k[0], v[0]) if packed else (q, k, v)

    def tensors(self) -> Tensors:
        """Fresh ones; out and lse are full of NaN canaries."""
        q, k, v = self.values_of_inputs()
        if self.features.poison:
            unseen = unseen_keys(self.problem_of(q, k, v)).reshape(k.shape[:-1])
            k[unseen], v[unseen] = np.nan, np.inf
        axes, lse_axes, rows = "bshd", "bhs", q.shape[:-2]
        if self.features.packed:
            axes, lse_axes = axes[1:], lse_axes[1:]
        lse_shape = (*rows[:-1], self.heads, rows[-1])
        return Tensors(
            *(place(x, layout, axes) for x, layout in zip((q, k, v), self.layouts, strict=False)),
            empty((*rows, self.heads, self.head_dim_v), self.dtype_of_out, self.layouts.out, axes),
            empty(lse_shape, DTYPES["fp32"], self.layouts.lse, lse_axes),
        )

    @property
    def dtype_of_out(self) -> np.dtype[Any]:
        return DTYPES[self.out_dtype or self.dtype]

    def options(self) -> dict[str, Any]:
        """What Backend.forward() takes besides the tensors."""
        return options_of(self)

    def problem_of(self, q: Array, k: Array, v: Array) -> Problem:
        options = {n: x.view if isinstance(x, Tensor) else x for n, x in self.options().items()}
        state = options.pop("rng_state", None)
        if state is not None:
            options["seed"], options["offset"] = (int(x) & UINT64 for x in state)
        unset = {name for name, x in options.items() if x is None}
        options = {n: x for n, x in options.items() if n not in {*unset, *OUTPUTS}}
        return Problem(q, k, v, **options, out_dtype=self.dtype_of_out)

    def problem(self) -> Problem:
        return self.problem_of(*(tensor.view for tensor in self.tensors()[:3]))

    def expected(self) -> Reference:
        return _expected(self)

    def without_poison(self) -> Case:
        return replace(self, features=replace(self.features, poison=False))


@functools.lru_cache(maxsize=64)
def _expected(case: Case) -> Reference:
    return reference_of(case.problem())


# Changes to standard normal float32 values, in place. Rows are (batch, seqlen, heads, head_dim).
VALUES: dict[str, Callable[[Array, Array, Array], object]] = {
    "normal": lambda q, k, v: None,
    # Scores of some hundreds: the softmax is a choice, and exp() of most is 0.
    "large": lambda q, k, v: np.multiply(q, 30, out=q),
    # Every score is near -2000, then +2000: sums must not begin at 0.
    "negative": lambda q, k, v: (np.subtract(q, 16, out=q), np.add(k, 16, out=k)),
    "positive": lambda q, k, v: (np.add(q, 16, out=q), np.add(k, 16, out=k)),
    "rising": lambda q, k, v: _ramp(q, k, np.linspace(-8, 8, k.shape[1])),
    "falling": lambda q, k, v: _ramp(q, k, np.linspace(8, -8, k.shape[1])),
    "same_keys": lambda q, k, v: k.fill(0.5),
    "zeros": lambda q, k, v: (q.fill(0), k.fill(0)),
    # The last keys: seen by few rows if causal.
    "nan_k": lambda q, k, v: k[:, -10:, -1].fill(np.nan),
    "nan_v": lambda q, k, v: v[:, -10:, -1].fill(np.nan),
    "nan_v_element": lambda q, k, v: v[0, 3, 0, 1:2].fill(np.nan),
    "nan_q": lambda q, k, v: q[:, 5].fill(np.nan),
    # +-inf scores, as the sign of q says: rows of NaN, and keys that weigh nothing.
    "inf_k": lambda q, k, v: k[:, 7, 0, :1].fill(np.inf),
    "inf_v": lambda q, k, v: (v[:, 7, 0, 0].fill(np.inf), v[:, 9, 0, 1].fill(-np.inf)),
}


def _ramp(q: Array, k: Array, ramp: Array) -> None:
    """The row maximum moves with every tile."""
    q[..., 0] = 8
    k[..., 0] = ramp[:, None]
