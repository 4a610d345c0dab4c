"""One set of tests per sm_80 kernel of the installed library."""

from __future__ import annotations

import functools
import os

import pytest
from figures import Library

the_library = functools.cache(Library)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        library = the_library()
        absent = [pytest.param("", id="none", marks=pytest.mark.skip(reason=library.absent))]
        metafunc.parametrize("kernel", list(library.rows) if not library.absent else absent)


@pytest.fixture
def library() -> Library:
    library = the_library()
    if library.absent and os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        pytest.fail(f"ANYFLASH_EXPECT_CUDA=1, but found {library.absent}", pytrace=False)
    if library.absent:
        pytest.skip(library.absent)
    return library
