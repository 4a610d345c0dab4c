"""What FlashAttention-3's functions share: arguments that change nothing, and those that anyflash
has nothing for.

``pack_gqa``, ``sm_margin``, ``scheduler_metadata`` and, without a cache, ``num_splits`` say how the
work is divided, which anyflash does by itself. ``q_descale``, ``k_descale`` and ``v_descale`` are
of float8 inputs, which are refused; FlashAttention-3 does not read them for others either.
"""

from __future__ import annotations

import numbers
from typing import Any

from anyflash._call import parsing

_REASONS = {
    "qv": "anyflash has no second product; concatenate qv with q, and v with k. MLA decoding is "
    "anyflash.torch.attention_with_kvcache(..., v_cache=None, head_dim_v=...) with such a cache",
    "attention_chunk": "anyflash has no chunks; a window or a boolean bias hides keys",
    "seqused_q": "anyflash uses all rows of q; pack those that are used",
    "cu_seqlens_k": "of a cache seqused_k says how many keys are used, and packed keys need "
    "cu_seqlens_q",
}


def check_pack_gqa(function: str, pack_gqa: bool | None) -> None:
    """It changes nothing, but is a flag or None."""
    if pack_gqa is not None:
        parsing.flags(f"anyflash.flash_attn_3.{function}", pack_gqa=pack_gqa)


def refuse(function: str, **given: Any) -> None:
    """Those that anyflash has nothing for; None and 0 are allowed."""
    for name, value in given.items():
        no_chunk = name == "attention_chunk" and isinstance(value, numbers.Integral) and value == 0
        if value is not None and not no_chunk:
            shown = value if isinstance(value, int) else "given"
            allowed = 0 if name == "attention_chunk" else None
            raise NotImplementedError(
                f"anyflash.flash_attn_3.{function}: {name} is {shown}; only {allowed} is allowed: "
                f"{_REASONS[name]}"
            )
