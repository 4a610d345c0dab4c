"""The tensors of a case's features."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from backends.tensors import Tensor, empty, place
from oracle.attention import DTYPES, Array

if TYPE_CHECKING:
    from cases.case import Case, Features, Part

OUTPUTS = ("dropout_mask", "max_logits")
UINT64 = (1 << 64) - 1


def int32_tensor(values: Any) -> Tensor:
    return place(np.asarray(values, np.int32), axes="b")


def options_of(case: Case) -> dict[str, Any]:
    """Fields of the C ABI's options, only those that are set; outputs are full of canaries."""
    features = case.features
    random = np.random.default_rng(zlib.crc32(f"{case.id} options".encode()))
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal}
    options["window_left"], options["window_right"] = features.window
    options["softcap"] = features.softcap
    small = DTYPES[features.small_dtype or case.dtype]
    if features.alibi:
        slopes = np.abs(0.3 * random.standard_normal((max(case.batch, 1), case.heads)))
        slopes[:, 1::2] *= -0.1  # what is far may also gain
        slopes = {"h": slopes[0], "1h": slopes[:1], "bh": slopes[: case.batch]}[features.alibi]
        options["alibi_slopes"] = place(slopes.astype(small), axes="bh"[-slopes.ndim :])
    if features.sinks:
        sinks = SINKS[features.sinks] + random.standard_normal(case.heads)
        if features.sinks == "none":
            sinks[0] = -np.inf
        options["sinks"] = place(sinks.astype(small), "step_h", "h")
    if features.bias:
        options["bias"] = place(_bias(case, random), features.bias.layout)
    if features.blocks:
        options["block_mask"] = place(_block_mask(case, random), features.blocks.layout)
        options["block_size"] = features.blocks.size
    if features.ranges:
        axes = "hsd" if features.packed else "bhsd"
        options["key_ranges"] = place(key_ranges(case, random), features.ranges.layout, axes)
    if features.packed:
        for name, lengths in (("q", features.packed.q), ("k", features.packed.k)):
            options[f"cu_seqlens_{name}"] = int32_tensor(np.cumsum([0, *lengths]))
        options["max_seqlen_q"], options["max_seqlen_k"] = case.sq, case.sk
    if features.seqused_k:
        options["seqused_k"] = int32_tensor(features.seqused_k)
    options |= _randomness(case, features)
    if features.part:
        options |= _part(case, features.part)
    if features.max_logits:
        shape = (case.batch, case.heads)
        options["max_logits"] = empty(shape, DTYPES["fp32"], features.outputs, "bh")
    return options


def _randomness(case: Case, features: Features) -> dict[str, Any]:
    if not features.dropout_p:
        return {}
    seed, offset = features.seed, features.offset
    shape = (case.batch, case.heads, case.sq, case.sk)
    options: dict[str, Any] = {"dropout_p": features.dropout_p, "seed": seed, "offset": offset}
    options["dropout_mask"] = empty(shape, np.dtype(bool), features.outputs)
    if features.rng_state:
        options["rng_state"] = place(np.array([seed, offset], np.uint64).view(np.int64), axes="b")
        options["seed"], options["offset"] = 99, 99  # the tensor counts
    return options


def _part(case: Case, part: Part) -> dict[str, Any]:
    names = ("query_start", "key_start", "diagonal")
    numbers: dict[str, Any] = dict(zip(names, part[:3], strict=True))
    arrays = {f"{n}s": int32_tensor(x) for n, x in numbers.items() if isinstance(x, tuple)}
    options = {n: x for n, x in numbers.items() if isinstance(x, int)} | arrays
    options["batch_start"], options["head_start"] = part.batch, part.head
    if part.head or part.other_heads:
        options["total_heads"] = part.head + case.heads + part.other_heads
    return options


def _used_lengths(case: Case) -> list[tuple[int, int]]:
    used = case.features.seqused_k or [case.sk] * case.batch
    return [(sq, min(sk, n)) for (sq, sk), n in zip(case.lengths, used, strict=True)]


def _bias(case: Case, random: np.random.Generator) -> Array:
    bias = case.features.bias
    assert bias is not None
    full = (case.batch, case.heads, case.sq, case.sk)
    shape = tuple(n if axis in bias.axes else 1 for n, axis in zip(full, "bhqk", strict=True))
    if bias.dtype in ("bool", "uint8"):
        keep = BOOLEANS[bias.values](random, shape)
        if bias.dtype == "bool":
            return keep
        return np.where(keep, random.integers(1, 256, shape), 0).astype(np.uint8)
    dtype = DTYPES[bias.dtype or case.dtype]
    values = random.standard_normal(shape).astype(np.float32).astype(dtype)
    CHANGES[bias.values](random, values)
    if bias.values == "nan_hidden":
        i, j = np.arange(case.sq)[:, None], np.arange(case.sk)
        values[:, :, j > i + case.sk - case.sq] = np.nan  # what causal hides
    _poison_beyond(values, _used_lengths(case))
    return values


def _poison_beyond(bias: Array, lengths: list[tuple[int, int]]) -> None:
    """NaN where no sequence has such a row or column."""
    for index in range(bias.shape[0] if lengths else 0):
        sharing = lengths if bias.shape[0] == 1 else [lengths[index]]
        if bias.shape[2] > 1:
            bias[index, :, max(sq for sq, _ in sharing) :] = np.nan
        if bias.shape[3] > 1:
            bias[index, :, :, max(sk for _, sk in sharing) :] = np.nan


def _block_mask(case: Case, random: np.random.Generator) -> Array:
    blocks = case.features.blocks
    assert blocks is not None
    counts = [-(-n // size) for n, size in zip((case.sq, case.sk), blocks.size, strict=True)]
    full = (case.batch, case.heads, *counts)
    axes = f"{blocks.axes}qk"
    shape = tuple(n if axis in axes else 1 for n, axis in zip(full, "bhqk", strict=True))
    keep = random.random(shape) < blocks.keep
    if 0 < blocks.keep < 1 and counts[1] > 2:
        keep[..., 1] = False  # keys that nobody sees
    return keep


def key_ranges(case: Case, random: np.random.Generator) -> Array:
    """(batch or 1, heads_k or 1, seqlen_k, 2 or 4), packed (heads_k or 1, total_k, 2 or 4)."""
    features = case.features
    assert features.ranges is not None
    values, intervals, axes, _ = features.ranges
    starts = features.part.query if features.part and features.part.query else 0
    starts = np.broadcast_to(np.asarray(starts), (case.batch,))
    heads = case.heads_k if "h" in axes else 1
    lengths = case.lengths if features.packed or "b" in axes else case.lengths[:1]
    parts = [np.empty((heads, 0, 2 * intervals), np.int32)] if features.packed else []
    for start, (rows, keys) in zip(starts, lengths, strict=False):
        of_heads = [RANGES[values](random, rows, keys, intervals) for _ in range(heads)]
        # Rows count from the whole's first one.
        moved = np.array(of_heads, np.int64).reshape(heads, keys, 2 * intervals) + start
        parts.append(np.clip(moved, -INT32_MAX - 1, INT32_MAX).astype(np.int32))
    if features.packed:
        return np.concatenate(parts, 1)
    shape = (len(parts), heads, case.sk, 2 * intervals)
    return np.array(parts, np.int32).reshape(shape)


INT32_MAX = (1 << 31) - 1
Random = np.random.Generator


def _some_rows(random: Random, rows: int, keys: int, intervals: int) -> Array:
    """Row 2 sees nothing, nor do rows near a border of tiles; some keys are seen by none, or by
    all other rows, and some intervals end before they begin."""
    begin = random.integers(-rows // 4 - 1, rows + 2, (keys, intervals))
    end = begin + random.integers(-rows // 4 - 1, rows // intervals + 2, (keys, intervals))
    end[begin <= 2] = np.minimum(end[begin <= 2], 2)
    begin[::9], end[::9] = 3, INT32_MAX
    begin[5::11], end[5::11] = INT32_MAX, -INT32_MAX - 1
    return np.stack([begin, end], -1)


def _spread(*pairs: Array) -> Array:
    return np.stack([np.broadcast_to(x, pairs[0].shape) for x in pairs], -1)


def _full(random: Random, rows: int, keys: int, intervals: int) -> Array:
    return np.tile([-INT32_MAX - 1, INT32_MAX], (keys, intervals))


def _nothing(random: Random, rows: int, keys: int, intervals: int) -> Array:
    return np.tile([5, 5, 9, 3][: 2 * intervals], (keys, 1))


def _documents(random: Random, rows: int, keys: int, intervals: int) -> Array:
    """Of 40 tokens; in two halves, where there are two intervals."""
    begin = np.arange(keys) // 40 * 40
    pairs = (begin, begin + 40) if intervals == 1 else (begin, begin + 9, begin + 9, begin + 40)
    return _spread(*pairs)


def _prefix(random: Random, rows: int, keys: int, intervals: int) -> Array:
    """A third of the keys, and causal behind it; or the rows before, and those from 20 on."""
    key = np.arange(keys)
    begin = np.where(key < keys // 3, 0, np.maximum(key - (keys - rows), 0))
    return _spread(begin, rows) if intervals == 1 else _spread(begin, begin + 10, begin + 20, rows)


def _tree(random: Random, rows: int, keys: int, intervals: int) -> Array:
    """A prompt, and eight answers that do not see one another."""
    prompt = keys // 4
    each = max(-(-(keys - prompt) // 8), 1)
    key = np.arange(keys)
    begin = np.where(key < prompt, 0, prompt + (key - prompt) // each * each)
    end = np.where(key < prompt, keys, begin + each)
    return _spread(begin, end) if intervals == 1 else _spread(begin, begin, begin, end)


def _far(random: Random, rows: int, keys: int, intervals: int) -> Array:
    """Rows of which a tile without any lies between the intervals."""
    pairs = (
        (np.zeros(keys, int), 10) if intervals == 1 else (np.zeros(keys, int), 10, rows - 9, rows)
    )
    return _spread(*pairs)


RANGES: dict[str, Callable[[Random, int, int, int], Array]] = {
    "normal": _some_rows,
    "full": _full,
    "nothing": _nothing,
    "documents": _documents,
    "prefix": _prefix,
    "tree": _tree,
    "far": _far,
}


def _some(random: np.random.Generator, x: Array, value: float, part: float = 0.3) -> None:
    """`value` in a part of the elements, in all of the last columns and of a row."""
    x[random.random(x.shape) < part] = value
    if x.shape[3] > 7:
        x[..., -7:] = value
    if x.shape[2] > 3:
        x[:, :, 3] = value


def _drop_some(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    keep = np.ones(shape, np.float32)
    _some(random, keep, 0.0)
    return keep != 0


def _lowest(random: np.random.Generator, bias: Array) -> None:
    """What transformers' masks hold where they mean -inf; a row of it alone is a uniform one."""
    _some(random, bias, float(ml_dtypes.finfo(bias.dtype).min))


SINKS = {"normal": 0.0, "none": 0.0, "large": 30.0, "small": -30.0}

BOOLEANS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": _drop_some,
    "all": lambda random, shape: np.ones(shape, bool),
    "nothing": lambda random, shape: np.zeros(shape, bool),
}

# Changes to a bias in place.
CHANGES: dict[str, Callable[[np.random.Generator, Array], object]] = {
    "normal": lambda random, x: None,
    "nan_hidden": lambda random, x: None,
    "some_inf": lambda random, x: _some(random, x, -np.inf),
    "lowest": _lowest,
    "large": lambda random, x: np.multiply(x, x.dtype.type(100), out=x),
    "nothing": lambda random, x: x.fill(-np.inf),
}
