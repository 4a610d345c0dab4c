"""The emulated GPU, and its altered forms."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from backends import capi
from backends.capi import Backend

A100_SMEM = 166912
SMALL_SMEM = 101376  # compute capability 8.6 and 8.9
LARGE_SMEM = 232448  # 9.0 and 10.0


@pytest.fixture
def emulated() -> Iterator[ctypes.CDLL]:
    """The emulated library; its device is the A100's again after the test."""
    library = ctypes.CDLL(str(capi.backend("emulated-sm80").library.path))
    library.emu_set_options.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t]
    library.emulated_capture.argtypes = [ctypes.c_void_p]
    yield library
    library.emulated_set_compute_capability(80)
    library.emulated_set_full_grid(1)
    library.emulated_prefer_kernel(None)
    library.emu_set_options(0, -1, A100_SMEM)
    library.emu_flush_subnormals(0)
    library.emulated_capture(None)


@pytest.fixture
def small_gpu(emulated: ctypes.CDLL) -> Backend:
    emulated.emu_set_options(0, -1, SMALL_SMEM)
    return capi.backend("emulated-sm80")
