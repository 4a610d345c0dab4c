"""All cases of attention over ranks, on each of them.

python -m calls.context_parallel_program FOLDER RANK SIZE DEVICE
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator

import torch

from calls import (
    context_parallel_bits,
    context_parallel_compiled,
    context_parallel_dtensors,
    context_parallel_pytorch,
)
from calls.context_parallel import DEVICE, cases, check
from calls.context_parallel_packed import check_packed, packed_cases
from run import ranks


def all_cases(size: int) -> Iterator[tuple[str, Callable[[], None]]]:
    on_gpus = {} if DEVICE == "cpu" else {"dtype": torch.bfloat16}
    for case in cases():
        yield case.id, functools.partial(check, case._replace(**on_gpus))
    for packed in packed_cases():
        yield packed.id, functools.partial(check_packed, packed._replace(**on_gpus))
    if DEVICE == "cpu" and size > 1:
        yield from context_parallel_bits.CASES.items()
    if DEVICE == "cpu" and size == 2:
        yield from context_parallel_compiled.CASES.items()
        yield from context_parallel_pytorch.CASES.items()
    if DEVICE == "cpu" and size == 4:
        yield from context_parallel_dtensors.CASES.items()


def failures(size: int) -> dict[str, str]:
    """What went wrong, by case."""
    found = {}
    for name, case in all_cases(size):
        error = ""
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        found[name] = error
        if "ContextParallel: rank" in error:
            break  # messages no longer match
    return found


if __name__ == "__main__":
    _, world_size = ranks.begin()
    ranks.finish(failures(world_size))
