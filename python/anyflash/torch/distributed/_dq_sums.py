"""Sums of dq over several calls, which stay in the kernel's own order until the last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflash._call.backward import dq_sums_size
from anyflash._call.options import DqSums
from anyflash.torch.distributed._layout import Run
from anyflash.torch.distributed._problem import Whole

_TILE = 128  # rows: on a GPU a call's begin and end at multiples of it, or at the end


class KeptSums:
    """Those of a rank's rows, where kernels keep such sums."""

    def __init__(self, q: Tensor, size: int) -> None:
        self._rows = q.shape[1]
        self._memory = q.new_empty(size // 4, dtype=torch.float32)

    @classmethod
    def of(
        cls, name: str, whole: Whole, q: Tensor, columns: int, rows: Sequence[Run]
    ) -> KeptSums | None:
        """``columns``: of the values. None: there are none for such rows."""
        if whole.deterministic or not (q.device.type == "cpu" or _in_tiles(rows, q.shape[1])):
            return None
        size = dq_sums_size(name, q, columns, whole.softmax_scale, whole.softcap)
        return cls(q, size) if size > 0 else None

    def unwritten(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """In place of dq, which is not written: it takes no memory."""
        return self._memory.view(dtype)[: q.numel()].view(q.shape)

    def of_rows(self, rows: slice, *, begin: bool = False, end: bool = False) -> DqSums:
        """What a call over these rows is given."""
        return DqSums(self._memory, rows.start, self._rows, begin, end)


def _in_tiles(runs: Sequence[Run], rows: int) -> bool:
    ends = {run.own.stop for run in runs} - {rows}
    return all(end % _TILE == 0 for end in ends)
