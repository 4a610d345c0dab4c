"""The kernels under Address, Undefined Behaviour and Thread Sanitizer.

Thread Sanitizer sees each CUDA thread as a thread of its own, with barriers as the only order
between them: a race detector that needs no luck with the schedule.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import decode_cases
import pytest
from emulated_driver import (
    BACKWARD_CASES,
    BACKWARD_FEATURE_CASES,
    BACKWARD_PLAIN_CASES,
    BACKWARD_RACES,
    CASES,
    CHUNK_CASES,
    FORWARD_RACES,
    PINGPONG_CASES,
    Case,
    run,
    wide,
)
from hopper_cases import (
    HOPPER_512_CASES,
    HOPPER_BACKWARD_CASES,
    HOPPER_BACKWARD_FEATURES,
    HOPPER_BACKWARD_RACES,
    HOPPER_BACKWARD_RANGES,
    HOPPER_BLOCK_CASES,
    HOPPER_CASES,
    HOPPER_DECODE_CASES,
    HOPPER_DECODE_RACES,
    HOPPER_LATENT_CASES,
    HOPPER_PAIR_CASES,
    HOPPER_PREFILL_CASES,
    HOPPER_QUANTIZED_CASES,
    HOPPER_RACES,
    HOPPER_RANGE_CASES,
    HOPPER_SCORED,
    HOPPER_WIDE_CASES,
)

# Thread Sanitizer takes minutes for the lists of the others.
FULL = os.environ.get("ANYFLASH_TEST_FULL") == "1"
FORWARD = CASES if FULL else FORWARD_RACES
PLAIN = BACKWARD_PLAIN_CASES if FULL else BACKWARD_RACES[:6]
FEATURES = BACKWARD_FEATURE_CASES if FULL else BACKWARD_RACES[6:]
# Twelve consecutive seeds meet every policy of the scheduler: either group of warps may be ahead.
ORDERS = range(12) if FULL else range(1)
PINGPONG = [case._replace(seed=seed) for seed in ORDERS for case in PINGPONG_CASES]
PREFILL = decode_cases.PREFILL if FULL else decode_cases.PREFILL[::2]  # not the longest

# Longest first. The backward's generic kernel of head dim 128 has one buffer.
RUNS = {
    "tsan-prefill": ("tsan", list(PREFILL)),
    "tsan-backward-features": ("tsan", list(FEATURES)),
    "tsan-backward-wide": ("tsan", wide(FEATURES)),
    "tsan-backward-pingpong": ("tsan", PINGPONG),
    "tsan-backward-chunks": ("tsan", list(CHUNK_CASES if FULL else CHUNK_CASES[3:4])),
    "tsan-hopper-backward": ("tsan", list(HOPPER_BACKWARD_RACES)),
    "tsan-hopper-backward-wide": ("tsan", wide(HOPPER_BACKWARD_RACES, 256)),
    "tsan-hopper-backward-pair": ("tsan", list(HOPPER_PAIR_CASES[: 4 if FULL else 1])),
    "tsan-forward": ("tsan", list(FORWARD)),
    "tsan-hopper-ranges": ("tsan", wide(HOPPER_RANGE_CASES)),
    "tsan-hopper-backward-ranges": ("tsan", wide(HOPPER_BACKWARD_RANGES[::2])),
    "tsan-hopper-decode": ("tsan", list(HOPPER_DECODE_RACES + HOPPER_QUANTIZED_CASES[:3])),
    "tsan-hopper-latent": ("tsan", list(HOPPER_LATENT_CASES)),
    "tsan-hopper-prefill": ("tsan", list(HOPPER_PREFILL_CASES[:2])),
    "tsan-hopper": ("tsan", list(HOPPER_RACES + HOPPER_CASES if FULL else HOPPER_RACES)),
    "tsan-hopper-512": ("tsan", list(HOPPER_512_CASES if FULL else HOPPER_512_CASES[:1])),
    "asan-backward": ("asan", list(BACKWARD_CASES)),
    "tsan-backward": ("tsan", list(PLAIN)),
    "tsan-decode": ("tsan", list(decode_cases.RACES)),
    "tsan-decode-wide": ("tsan", decode_cases.wide(decode_cases.RACES)),
    "tsan-prefill-one-buffer": ("tsan", decode_cases.longer(decode_cases.PREFILL[:1])),
    "tsan-decode-latent": ("tsan", decode_cases.latent(decode_cases.RACES[:3])),
    "asan-backward-chunks": ("asan", list(CHUNK_CASES if FULL else CHUNK_CASES[1::3])),
    "asan-backward-wide": ("asan", wide(BACKWARD_CASES if FULL else BACKWARD_RACES)),
    "asan-backward-pingpong": ("asan", list(PINGPONG_CASES)),
    "asan-hopper-backward": ("asan", list(HOPPER_BACKWARD_CASES)),
    "asan-hopper-backward-wide": ("asan", HOPPER_WIDE_CASES),
    "asan-hopper-backward-pair": (
        "asan",
        list(HOPPER_PAIR_CASES if FULL else HOPPER_PAIR_CASES[:8]),
    ),
    "asan-forward": ("asan", list(CASES)),
    "asan-forward-wide": ("asan", wide(CASES)),
    "asan-hopper-ranges": ("asan", wide(HOPPER_RANGE_CASES)),
    "asan-hopper-features": ("asan", list(HOPPER_RANGE_CASES + HOPPER_BLOCK_CASES + HOPPER_SCORED)),
    "asan-hopper-backward-features": ("asan", list(HOPPER_BACKWARD_FEATURES)),
    "asan-hopper-decode": ("asan", list(HOPPER_DECODE_CASES)),
    "asan-hopper-latent": ("asan", list(HOPPER_LATENT_CASES)),
    "asan-hopper-prefill": ("asan", list(HOPPER_PREFILL_CASES)),
    "asan-hopper": ("asan", list(HOPPER_RACES + HOPPER_CASES)),
    "asan-hopper-512": ("asan", list(HOPPER_512_CASES if FULL else HOPPER_512_CASES[:6])),
    "asan-decode": ("asan", [*decode_cases.RACES, *decode_cases.CASES]),
    "asan-prefill": ("asan", list(decode_cases.PREFILL)),
    "asan-prefill-one-buffer": ("asan", decode_cases.longer(decode_cases.PREFILL[:3])),
    "asan-decode-latent": ("asan", decode_cases.latent(decode_cases.RACES)),
    "asan-decode-wide": ("asan", decode_cases.wide(decode_cases.RACES + decode_cases.CASES)),
}


@pytest.fixture(scope="session")
def runs(build: Path, pool: ThreadPoolExecutor) -> dict[str, Future[tuple[int, str]]]:
    return {
        name: pool.submit(
            run,
            build / f"emulated_driver_{sanitizer}",
            cases,
            ASAN_OPTIONS="detect_leaks=0",
            TSAN_OPTIONS="halt_on_error=1",
        )
        for name, (sanitizer, cases) in RUNS.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_reported(name: str, runs: dict[str, Future[tuple[int, str]]]) -> None:
    status, output = runs[name].result()
    assert status == 0, output


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(heads=3, heads_k=2), 1),  # an impossible problem
        (Case(dtype="fp8"), 2),
        (Case(more="softcup=5"), 2),
        (Case(more="nan=seen bias=int4"), 1),
        (Case(more="op=sideways"), 2),
        (Case(more="op=backward grad=bf16"), 1),
        (Case(more="op=decode cache=int4"), 1),
        (Case(more="op=decode page=64"), 1),  # half a page
        (Case(more="op=decode bias=fp32"), 1),
        (Case(more="op=decode pages=64"), 2),
    ],
)
def test_driver_fails_on_what_it_cannot_do(build: Path, case: Case, expected: int) -> None:
    """Such lines are not passed over."""
    assert run(build / "emulated_driver", [case])[0] == expected
