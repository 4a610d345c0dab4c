"""The cases that a unit with mutations is run for."""

from __future__ import annotations

from decode_cases import CASES as DECODE_CASES
from decode_cases import PREFILL as PREFILL_CASES
from decode_cases import RACES as DECODE_RACES
from decode_cases import latent, longer
from decode_mutations import APPEND, COMBINE, DECODE, LATENT, PREFILL, PREFILL_2
from emulated_driver import (
    BACKWARD_CASES,
    BACKWARD_RACES,
    CASES,
    CHUNK_CASES,
    FORWARD_RACES,
    GROWING_CASES,
    PINGPONG_CASES,
    Case,
    wide,
)
from hopper_backward_mutations import (
    HOPPER_192,
    HOPPER_BACKWARD,
    HOPPER_FEATURES,
    HOPPER_PAIR,
    HOPPER_WIDE,
)
from hopper_cases import (
    HOPPER_192_CASES,
    HOPPER_512_CASES,
    HOPPER_BACKWARD_CASES,
    HOPPER_BACKWARD_FEATURES,
    HOPPER_BLOCK_CASES,
    HOPPER_CASES,
    HOPPER_DECODE_CASES,
    HOPPER_LATENT_CASES,
    HOPPER_PAIR_CASES,
    HOPPER_PREFILL_CASES,
    HOPPER_RACES,
    HOPPER_RANGE_CASES,
    HOPPER_SCORED,
    HOPPER_WIDE_CASES,
)
from hopper_decode_mutations import HOPPER_DECODE, HOPPER_LATENT
from hopper_mutations import HOPPER, HOPPER_512, HOPPER_PREFILL, HOPPER_RANGES
from mutations import CHUNKS, FORWARD, LAZY, ONE_BUFFER, RELOADED_V, SPLIT_KEYS
from range_mutations import RANGE_BOUNDS_UNIT

# Words of the cases that a unit is run for, where that is not all.
DECODE_WORDS = {COMBINE: "split", APPEND: "new="}


def _decode_cases(unit: str, sanitizer: str) -> list[Case]:
    word = DECODE_WORDS.get(unit, "")
    cases = [case for case in (*DECODE_RACES, *DECODE_CASES) if word in case.more]
    if sanitizer:  # see _fewer_kernels()
        return [case for case in cases if "cache=" not in case.more]
    return [case._replace(seed=seed) for seed in (0, 1, 2, 3) for case in cases]


def cases_of(unit: str, sanitizer: str) -> list[Case]:
    """With what most mutations change first: a run ends with the first case that is wrong."""
    if unit in (DECODE, COMBINE, APPEND):
        return _decode_cases(unit, sanitizer)
    if unit == LATENT:
        cases = [case for case in latent(DECODE_RACES) if "cache=" not in case.more]
        if sanitizer:
            return cases[:2]
        return [case._replace(seed=seed) for seed in (0, 1) for case in cases]
    if unit in (PREFILL, PREFILL_2):
        cases = longer(PREFILL_CASES[:3]) if unit == PREFILL else list(PREFILL_CASES)
        seeds = (0,) if sanitizer else (0, 1, 2, 3)
        return [case._replace(seed=seed) for seed in seeds for case in cases]
    if unit == CHUNKS:
        return [case._replace(seed=seed) for seed in (0, 1) for case in CHUNK_CASES]
    if unit == HOPPER:
        seeds = (0,) if sanitizer else (0, 1, 2)
        capped = tuple(case for case in HOPPER_SCORED if "softcap" in case.more)
        cases = HOPPER_RACES if sanitizer else HOPPER_RACES + HOPPER_CASES + capped
        return [case._replace(seed=seed) for seed in seeds for case in cases]
    if unit == HOPPER_512:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_512_CASES]
    if unit == HOPPER_PREFILL:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_PREFILL_CASES]
    if unit == HOPPER_DECODE:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_DECODE_CASES]
    if unit == HOPPER_LATENT:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_LATENT_CASES]
    if unit == HOPPER_RANGES:
        cases = wide(HOPPER_RANGE_CASES + HOPPER_BLOCK_CASES + HOPPER_SCORED)
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in cases]
    if unit == HOPPER_FEATURES:
        features = wide(HOPPER_BACKWARD_FEATURES)
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in features]
    if unit == HOPPER_BACKWARD:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_BACKWARD_CASES]
    if unit == HOPPER_192:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_192_CASES]
    if unit == HOPPER_WIDE:
        return [case._replace(seed=seed) for seed in (0, 1, 2) for case in HOPPER_WIDE_CASES]
    if unit == HOPPER_PAIR:
        return [case._replace(seed=seed) for seed in (0, 3) for case in HOPPER_PAIR_CASES]
    if unit == RANGE_BOUNDS_UNIT:
        return [case for case in (*CASES, *BACKWARD_CASES) if "ranges" in case.more]
    if unit == ONE_BUFFER:
        turns = [case._replace(seed=seed) for seed in (0, 1, 2, 3) for case in PINGPONG_CASES]
        return list(PINGPONG_CASES) if sanitizer else turns + wide(BACKWARD_RACES)
    if sanitizer == "tsan":  # slow; its mutations are of what the plain kernels do, too
        return list(FORWARD_RACES[:4] if unit == FORWARD else BACKWARD_RACES[:4])
    if unit == FORWARD:
        # Only in plain runs the schedule decides.
        seeds = (0,) if sanitizer else (0, 1, 2, 3)
        return [case._replace(seed=seed) for seed in seeds for case in CASES]
    if unit == LAZY:
        return list(GROWING_CASES)
    if unit == SPLIT_KEYS:
        return [
            case._replace(seed=seed) for seed in (0, 1, 2, 3) for case in wide(GROWING_CASES, 192)
        ]
    if unit == RELOADED_V:
        return wide(BACKWARD_RACES[:2], 256)
    return [*BACKWARD_RACES, *BACKWARD_CASES]
