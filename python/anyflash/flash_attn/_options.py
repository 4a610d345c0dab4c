"""flash-attn's arguments in anyflash's terms, and anyflash's LSE in flash-attn's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anyflash._call.parsing import flags


def as_int(x: Any) -> int:
    """Tensors of one element are allowed where flash-attn wants an int."""
    return x if isinstance(x, int) else int(x)


def read_flags(deterministic: Any, return_attn_probs: Any) -> tuple[bool, ...]:
    return flags(
        "anyflash.flash_attn", deterministic=deterministic, return_attn_probs=return_attn_probs
    )


def score_options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[Any],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> dict[str, Any]:
    """Keyword arguments of anyflash's functions. Negative bounds and caps mean none."""
    left, right = window_size
    return {
        "softmax_scale": softmax_scale,
        "causal": flags("anyflash.flash_attn", causal=causal)[0],
        "window_size": (max(as_int(left), -1), max(as_int(right), -1)),
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
    }


def with_positive_infinity(lse: torch.Tensor) -> torch.Tensor:
    """flash-attn's LSE of a row that sees no key is +inf. NaN stays."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)
