"""A forward that nothing but the kernel has a part in: the many options of :func:`attention` take
longer to read than a small attention to compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyflash import _core
from anyflash._frameworks import framework_of
from anyflash._options import UNBOUNDED
from anyflash.torch._watched import PLAIN, is_recorded, is_traced

_HALF = (torch.float16, torch.bfloat16)
_CPU = (torch.float64, torch.float32, *_HALF)
DTYPES = {"cpu": _CPU, "cuda": _HALF}
# This export synchronizes nothing: kernels run on PyTorch's current stream.
_export = torch._C._to_dlpack


def is_direct(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> bool:
    """Whether q, k and v, which nobody traces, are what the kernels take: four axes each, and no
    cast or error that is not the kernel's."""
    on_cpu = q.is_cpu
    if not (on_cpu or q.is_cuda) or q.dtype not in (_CPU if on_cpu else _HALF):
        return False
    for x in (q, k, v):
        if type(x) not in PLAIN or x.is_neg() or x.ndim != 4 or x.layout is not torch.strided:
            return False
        if not (x.is_cpu if on_cpu else x.is_cuda):
            return False
    return scale is None or (type(scale) is float and math.isfinite(scale))


def is_free(q: Any, k: Any, v: Any, scale: Any) -> bool:
    """Whether q, k and v are direct tensors, and neither traced, recorded nor cast by anyone."""
    return (
        isinstance(q, Tensor)
        and not is_traced(q)
        and is_direct(q, k, v, scale)
        and not is_recorded(q, k, v)
        and not torch._C._is_any_autocast_enabled()
    )


def forward(  # noqa: PLR0917 (its callers count time)
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    return_lse: bool = False,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of direct tensors, which are (batch, seqlen, heads, head_dim), or with heads and
    seqlen exchanged; in memory, out's heads lie side by side either way."""
    batch, rows, heads, _ = q.shape
    columns = v.shape[3]
    if heads_first:
        rows, heads = heads, rows
        row = heads * columns
        out = q.new_empty_strided((batch, heads, rows, columns), (rows * row, columns, row, 1))
    else:
        out = q.new_empty((batch, rows, heads, columns))
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32) if return_lse else None
    options: dict[str, Any] | None = None
    if window != UNBOUNDED:
        options = {"window": window}
    if bias is not None:  # older exports do not know bool
        shown = bias.view(torch.uint8) if bias.dtype is torch.bool else bias
        options = {**(options or {}), "bias": (_export(shown), False)}
    on_cpu = q.is_cpu
    _core.forward(
        operation,
        _export(q),
        _export(k),
        _export(v),
        _export(out),
        None if lse is None else _export(lse),
        scale,
        causal,
        0 if on_cpu else torch._C._cuda_getCurrentRawStream(q.get_device()),
        False,
        options,
        None if on_cpu else lambda size: _workspace(size, out),
        heads_first,
    )
    return out, lse


def _workspace(size: int, like: Tensor) -> tuple[Any, int]:
    framework = framework_of(like)
    return framework.workspace(size, like, framework.device(like), None)
