"""A forward that nothing but the kernel has a part in: the many options of :func:`attention` take
longer to read than a small attention to compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyflash import _core
from anyflash._arrays.registry import framework_of
from anyflash._call.options import UNBOUNDED
from anyflash.torch._dispatch_state import is_plain_eager

_HALF = (torch.float16, torch.bfloat16)
DTYPES = {"cpu": (torch.float64, torch.float32, *_HALF), "cuda": _HALF}
_export = torch._C._to_dlpack


def attend(  # noqa: PLR0917 (its callers count time)
    operation: str, q: Any, k: Any, v: Any, scale: Any, causal: Any, return_lse: Any
) -> Any:
    """What :func:`attention` returns without other options; None where q, k and v are traced,
    recorded, cast or not direct tensors."""
    if is_plain_eager(q, k, v):
        return forward(operation, q, k, v, scale, causal, return_lse)
    return None


def forward(  # noqa: PLR0917
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Any,
    causal: Any,
    return_lse: Any,
    options: dict[str, Any] | None = None,
    heads_first: bool = False,
    pytorch: Any = None,
) -> Any:
    """out, with ``return_lse`` (out, lse), of plain tensors that nobody looks at. These are (batch,
    seqlen, heads, head_dim), or have heads and seqlen exchanged. In memory, out's heads lie side by
    side either way, unless ``pytorch`` is `OUT_LIKE_Q`. ``options`` is what `options_of` gives.

    None where they are not what the kernels take: on the CPU or a GPU, four axes each, and no cast
    or error that is not the kernel's."""
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if not (causal is False or causal is True) or not (return_lse is False or return_lse is True):
        return None
    if not (scale is None or (type(scale) is float and math.isfinite(scale))):
        return None
    return _core.forward_direct(
        operation, q, k, v, scale, causal, options, return_lse, heads_first, pytorch or _PYTORCH
    )


def options_of(bias: Tensor | None, window: tuple[int, int]) -> dict[str, Any] | None:
    """What the binding is told of these."""
    options: dict[str, Any] = {}
    if window != UNBOUNDED:
        options["window"] = window
    if bias is not None:  # older exports do not know bool
        shown = bias.view(torch.uint8) if bias.dtype is torch.bool else bias
        options["bias"] = (_export(shown), False)
    return options or None


def _new_out(  # noqa: PLR0917
    q: Tensor, batch: int, rows: int, heads: int, columns: int, heads_first: bool
) -> Tensor:
    if not heads_first:
        return q.new_empty(batch, rows, heads, columns)  # less to read than a tuple
    row = heads * columns
    return q.new_empty_strided((batch, heads, rows, columns), (rows * row, columns, row, 1))


def _new_lse(q: Tensor, batch: int, heads: int, rows: int) -> Tensor:
    return q.new_empty(batch, heads, rows, dtype=torch.float32)


def _workspace(size: int, like: Tensor) -> tuple[Any, int]:
    framework = framework_of(like)
    return framework.workspace(size, like, framework.device(like), None)


# Its own exchange API is there from 2.10 on; those that other packages give older versions
# (Tensor.__dlpack_c_exchange_api__) may know no streams.
_FUNCTIONS: dict[str, Any] = {
    "exchange_api": getattr(torch._C, "_dlpack_exchange_api", lambda: None)(),
    "export_tensor": _export,
    "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
    "empty_like": torch.empty_like,
    "new_out": _new_out,
    "new_lse": _new_lse,
    "workspace": _workspace,
}
_PYTORCH = _core.PyTorch(**_FUNCTIONS)
OUT_LIKE_Q = _core.PyTorch(**_FUNCTIONS | {"new_out": lambda q, *_: torch.empty_like(q)})
