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
    bf16_bits: bool,
    options: dict[str, Any] | None,
    allocate: Callable[[int], tuple[Any, int]],
) -> None: ...
def backward(
    operation: str,
    tensors: tuple[Any, ...],
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    bf16_bits: bool,
    options: dict[str, Any] | None,
    backward_options: dict[str, Any],
    allocate: Callable[[int], tuple[Any, int]],
) -> None: ...
def merge_states(
    operation: str,
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    out: Any,
    lse: Any,
    bf16_bits_in: bool,
    bf16_bits_out: bool,
    stream: int,
) -> None: ...
def describe(array: Any) -> tuple[tuple[int, ...], str]: ...
def new_array(shape: tuple[int, ...], dtype: int, device_type: int, device_index: int) -> Any: ...
def build_info() -> dict[str, Any]: ...
