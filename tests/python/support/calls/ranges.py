"""Key ranges for calls with torch."""

from __future__ import annotations

import torch


def key_ranges(heads_k: int, keys: int, rows: int) -> torch.Tensor:
    """(heads_k, keys, 4): two intervals, elsewhere for each key head."""
    begin = torch.arange(keys).remainder(rows) // 2 + torch.arange(heads_k)[:, None]
    return torch.stack([begin, begin + 50, begin + 70, begin + 90], -1).int()
