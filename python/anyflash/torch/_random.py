"""Dropout's random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._call import parsing


class RandomState(NamedTuple):
    """As the result returns it; and as the operator takes it: a tensor, or seed and offset."""

    returned: Any = None
    tensor: Tensor | None = None
    words: tuple[int, int] = (0, 0)


def random_state(
    parse: Callable[[str, Callable[[Any], Any], Any], Any],
    drops: bool,
    seed: Any,
    rng_state: Any,
    device: torch.device,
) -> RandomState:
    """What was given; where nothing was and something is dropped, what torch's generator draws.
    parse(argument, function, value) is function(value), its errors named."""
    if isinstance(rng_state, Tensor):
        return RandomState(rng_state, tensor=rng_state)
    if rng_state is not None:
        words = parse("rng_state", parsing.rng_pair, rng_state)
        return RandomState(words, words=words)
    if seed is not None:
        words = parse("seed", parsing.seed, seed), 0
        return RandomState(words, words=words)
    if not drops:
        return RandomState()
    drawn = draw(device)
    return RandomState(drawn, tensor=drawn)


def draw(device: torch.device) -> Tensor:
    """(2,) int64 from the device's default generator."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
