"""Passes that nothing but the kernel has a part in: the many options of :func:`attention` take
longer to read than a small attention to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash import _core
from anyflash._arrays.registry import framework_of
from anyflash._call.options import UNBOUNDED

_HALF = (torch.float16, torch.bfloat16)
DTYPES = {"cpu": (torch.float64, torch.float32, *_HALF), "cuda": _HALF}
_export = torch._C._to_dlpack


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
) -> Any:
    """out, with ``return_lse`` (out, lse), of plain tensors that nobody looks at. These are (batch,
    seqlen, heads, head_dim), or have heads and seqlen exchanged. In memory, out's heads lie side by
    side either way. ``options`` is what `options_of` gives.

    None where they are not what the kernels take: on the CPU or a GPU, four axes each, and no cast
    or error that is not the kernel's. None, too, for a scale that is not None or a finite float, or
    for flags that are no bool."""
    return _core.forward_direct(
        operation, q, k, v, scale, causal, options, return_lse, heads_first, PYTORCH
    )


def backward(  # noqa: PLR0917
    operation: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: Any,
    causal: bool,
    deterministic: bool,
) -> Any:
    """(dq, dk, dv) of plain tensors that nobody looks at, or None, as `forward`."""
    return _core.backward_direct(
        operation, dout, q, k, v, out, lse, dlse, scale, causal, deterministic, PYTORCH
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
PYTORCH = _core.PyTorch(**_FUNCTIONS)
