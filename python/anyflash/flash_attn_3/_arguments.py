"""What FlashAttention-3's functions share: arguments that change nothing, and those that anyflash
has nothing for.

``pack_gqa``, ``sm_margin``, ``scheduler_metadata`` and, without a cache, ``num_splits`` say how the
work is divided, which anyflash does by itself. ``q_descale``, ``k_descale`` and ``v_descale`` are
of float8 inputs, which are refused; FlashAttention-3 does not read them for others either.
"""

from __future__ import annotations

import numbers
from typing import Any

_NOTHING_NEW = "with cu_seqlens_q nothing is appended and rotated"
_REASONS = {
    **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"), _NOTHING_NEW),
    "qv": "anyflash has no second product; concatenate q with qv, and k with v",
    "attention_chunk": "anyflash has no chunks; a window or a boolean bias hides keys",
    "seqused_q": "anyflash uses all rows of q; pack those that are used",
    "cu_seqlens_k_new": "anyflash appends as many rows to each sequence: k is (batch, seqlen_new, "
    "heads_k, head_dim)",
}


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
