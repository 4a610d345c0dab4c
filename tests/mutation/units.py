"""Units of the emulated GPU that together hold every statement that synchronises, and their cases.

Beside the units of tests/emulator's mutations these are Hopper's forward of other schedules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "emulator"))
import decode_cases as decode
from decode_mutations import COMBINE, DECODE, LATENT, PREFILL, PREFILL_2
from emulated_driver import (
    BACKWARD_RACES,
    CHUNK_CASES,
    FORWARD_RACES,
    MERGE_CASES,
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
    HOPPER_512_CASES,
    HOPPER_BACKWARD_128_CASES,
    HOPPER_BACKWARD_RACES,
    HOPPER_BACKWARD_RANGES,
    HOPPER_DECODE_RACES,
    HOPPER_LATENT_CASES,
    HOPPER_PAIR_CASES,
    HOPPER_PREFILL_CASES,
    HOPPER_RACES,
    HOPPER_RANGE_CASES,
)
from hopper_decode_mutations import HOPPER_DECODE, HOPPER_LATENT
from hopper_mutations import HOPPER, HOPPER_512, HOPPER_PREFILL, HOPPER_RANGES
from mutations import (
    BACKWARD,
    CHUNKS,
    FORWARD,
    LAZY,
    ONE_BUFFER,
    RELOADED_V,
    ROWS,
    SPLIT_KEYS,
)
from unit_cases import cases_of


class Unit(NamedTuple):
    keep: str  # the kernels that are compiled: their template arguments match
    cases: Sequence[Case]
    races: Sequence[Case] | None = None  # for Thread Sanitizer, if its library has the unit


def races_of(word: str) -> list[Case]:
    return [case for case in decode.RACES if word in case.more]


UNITS = {
    FORWARD: Unit("Plain|Generic", cases_of(FORWARD, ""), FORWARD_RACES),
    LAZY: Unit("Plain", cases_of(LAZY, "")),
    SPLIT_KEYS: Unit("kWide", cases_of(SPLIT_KEYS, "")),
    BACKWARD: Unit("Plain|Generic", cases_of(BACKWARD, ""), BACKWARD_RACES),
    ONE_BUFFER: Unit(
        "Plain|Generic", cases_of(ONE_BUFFER, ""), [*PINGPONG_CASES, *wide(BACKWARD_RACES[6:])]
    ),
    RELOADED_V: Unit("kCompact", cases_of(RELOADED_V, "")),
    CHUNKS: Unit("Plain", cases_of(CHUNKS, ""), CHUNK_CASES[3:4]),
    ROWS: Unit("", BACKWARD_RACES, BACKWARD_RACES),
    DECODE: Unit("", cases_of(DECODE, ""), decode.RACES),
    "sm80_decode_f16_d256": Unit("16, ", decode.wide(decode.RACES), decode.wide(decode.RACES)),
    LATENT: Unit("false", cases_of(LATENT, ""), decode.latent(decode.RACES[:1])),
    COMBINE: Unit("", cases_of(COMBINE, ""), races_of("split")),
    "merge_states": Unit("", MERGE_CASES, MERGE_CASES),
    PREFILL: Unit("Plain", cases_of(PREFILL, ""), decode.longer(decode.PREFILL[:1])),
    PREFILL_2: Unit("Plain", cases_of(PREFILL_2, ""), decode.PREFILL),
    HOPPER: Unit("", cases_of(HOPPER, ""), HOPPER_RACES),
    HOPPER_RANGES: Unit(
        "", [*wide(HOPPER_RACES), *cases_of(HOPPER_RANGES, "")], wide(HOPPER_RANGE_CASES)
    ),
    "sm90_forward_f16_d256": Unit("", wide(HOPPER_RACES, 256)),
    HOPPER_512: Unit("", cases_of(HOPPER_512, ""), HOPPER_512_CASES[:1]),
    HOPPER_BACKWARD: Unit("", cases_of(HOPPER_BACKWARD, ""), HOPPER_BACKWARD_RACES),
    HOPPER_FEATURES: Unit(
        "",
        [*HOPPER_BACKWARD_128_CASES, *cases_of(HOPPER_FEATURES, "")],
        wide(HOPPER_BACKWARD_RANGES[::2]),
    ),
    HOPPER_192: Unit("", cases_of(HOPPER_192, "")),
    HOPPER_WIDE: Unit("", cases_of(HOPPER_WIDE, ""), wide(HOPPER_BACKWARD_RACES, 256)),
    HOPPER_PAIR: Unit("", cases_of(HOPPER_PAIR, ""), HOPPER_PAIR_CASES[:1]),
    HOPPER_PREFILL: Unit("", cases_of(HOPPER_PREFILL, ""), HOPPER_PREFILL_CASES[:2]),
    HOPPER_DECODE: Unit("", cases_of(HOPPER_DECODE, ""), HOPPER_DECODE_RACES),
    HOPPER_LATENT: Unit("", cases_of(HOPPER_LATENT, ""), HOPPER_LATENT_CASES),
}
