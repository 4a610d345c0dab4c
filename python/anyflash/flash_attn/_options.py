"""flash-attn's arguments in anyflash's terms, and anyflash's LSE in flash-attn's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from anyflash._call import parsing
from anyflash._call.parsing import flags

_NAME = "anyflash.flash_attn"


def check_tensors(function: str, **given: Any) -> None:
    """Of what the functions read themselves, before anyflash's own checks."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{function}: {name} is {type(x).__name__}; a torch.Tensor is allowed")


def optional(**given: Any) -> dict[str, Any]:
    return {name: x for name, x in given.items() if x is not None}


def as_int(x: Any, argument: str) -> int:
    """Tensors of one element are allowed where flash-attn wants an int."""
    if isinstance(x, int):
        return x
    one = isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_complex()
    if not (one or isinstance(x, numbers.Integral | torch.SymInt)):
        raise TypeError(
            f"{_NAME}: {argument} is {type(x).__name__}; an int, or a tensor of one, is allowed"
        )
    return int(x)


def packing_of(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, name: str = ""
) -> tuple[Any, Any, int, int]:
    """With one length for both, `name` is its argument's."""
    longest_q = as_int(max_seqlen_q, name or "max_seqlen_q")
    return cu_seqlens_q, cu_seqlens_k, longest_q, as_int(max_seqlen_k, name or "max_seqlen_k")


def window_of(window_size: Any) -> tuple[int, int]:
    """Negative bounds mean none."""
    is_tensor = isinstance(window_size, torch.Tensor) and window_size.dim() == 1
    if not (is_tensor or isinstance(window_size, tuple | list)) or len(window_size) != 2:
        raise TypeError(
            f"{_NAME}: window_size is {window_size!r:.40}; a pair (left, right) of int is allowed"
        )
    left, right = (as_int(bound, "window_size") for bound in window_size)
    return max(left, -1), max(right, -1)


_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def check_pages(arguments: tuple[Any, ...], dropout_p: Any) -> float:
    """dropout_p, if it and the others are what they are without pages: q, k, v, the packing and
    block_table."""
    for name, x in zip(("q", "k", "v", *_PACKING, "block_table"), arguments, strict=True):
        if name.startswith("max"):
            parsing.named(_NAME, name, parsing.length, x)
        elif not isinstance(x, torch.Tensor):
            raise TypeError(f"{_NAME}: {name} is {type(x).__name__}; a torch.Tensor is allowed")
    return probability(dropout_p)


def probability(dropout_p: Any) -> float:
    return float(parsing.named(_NAME, "dropout_p", parsing.probability, dropout_p))


def softcap_of(softcap: Any) -> float:
    """Negative caps mean none."""
    if not isinstance(softcap, numbers.Real) and not isinstance(softcap, torch.SymFloat):
        raise TypeError(f"{_NAME}: softcap is {type(softcap).__name__}; a finite number is allowed")
    given: Any = softcap
    result: float = max(given, 0.0)
    return result


def read_flags(deterministic: Any, return_attn_probs: Any) -> tuple[bool, ...]:
    return flags(_NAME, deterministic=deterministic, return_attn_probs=return_attn_probs)


def score_options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[Any],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> dict[str, Any]:
    """Keyword arguments of anyflash's functions."""
    return {
        "softmax_scale": softmax_scale,
        "causal": flags(_NAME, causal=causal)[0],
        "window_size": window_of(window_size),
        "softcap": softcap_of(softcap),
        "alibi_slopes": alibi_slopes,
    }


def with_positive_infinity(lse: torch.Tensor) -> torch.Tensor:
    """flash-attn's LSE of a row that sees no key is +inf. NaN stays."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)
