from collections.abc import Callable
from typing import Any

version: str

def forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any | None,
    softmax_scale: float | None,
    causal: bool,
    stream: int,
    bf16_bits: bool,
    allocate: Callable[[int], tuple[Any, int]],
) -> None: ...
def describe(array: Any) -> tuple[tuple[int, ...], str]: ...
def new_array(shape: tuple[int, ...], dtype: int, device_type: int, device_index: int) -> Any: ...
def build_info() -> dict[str, Any]: ...
