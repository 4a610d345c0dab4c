"""The test build: where CMake put the emulated library and the drivers (`make build-test`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated_driver import ROOT


@pytest.fixture(scope="session")
def build() -> Path:
    folder = Path(os.environ.get("ANYFLASH_TEST_BUILD", ROOT / "build" / "test"))
    if not (folder / "compile_commands.json").exists():
        pytest.fail(f"no test build in {folder}; run `make build-test`", pytrace=False)
    return folder.resolve()


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Tests ask for all that they wait for at once: for their compilers and drivers."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)
