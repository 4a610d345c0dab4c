from collections.abc import Callable
from typing import Any

version: str

def forward(
    operation: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any | None,
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    as_bits: bool,
    options: dict[str, Any] | None,
    allocate: Callable[[int], tuple[Any, int]] | None,
) -> None: ...
def forward_direct(
    operation: str,
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None,
    causal: bool,
    options: dict[str, Any] | None,
    return_lse: bool,
    heads_first: bool,
    pytorch: tuple[Any, ...],
) -> Any: ...
def backward(
    operation: str,
    tensors: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    as_bits: bool,
    options: dict[str, Any] | None,
    backward_options: dict[str, Any],
    allocate: Callable[[int], tuple[Any, int]] | None,
) -> None: ...
def forward_with_kvcache(
    operation: str,
    tensors: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    options: dict[str, Any] | None,
    cache_options: dict[str, Any],
    writes: bool,
    workspace: Any | None,
    allocate: Callable[[int], tuple[Any, int]] | None,
) -> None: ...
def kvcache_workspace_size(
    operation: str,
    tensors: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    options: dict[str, Any] | None,
    cache_options: dict[str, Any],
    writes: bool,
) -> int: ...
def merge_states(
    operation: str,
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    out: Any,
    lse: Any,
    as_bits_in: bool,
    as_bits_out: bool,
    stream: int,
) -> None: ...
def check_call(
    operation: str,
    function: str,
    tensors: dict[str, tuple[tuple[int, ...], str]],
    numbers: dict[str, int | float | bool],
) -> None: ...
def xla_handlers() -> list[tuple[str, str, Any]]: ...
def describe(array: Any) -> tuple[tuple[int, ...], str]: ...
def new_array(shape: tuple[int, ...], dtype: int, device_type: int, device_index: int) -> Any: ...
def build_info() -> dict[str, Any]: ...
def prefer_kernel(name: str | None) -> None: ...
def set_work_per_thread(work: float) -> None: ...
