"""A machine with one more GPU, by a driver whose memory is the host's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import anyflash
from anyflash._arrays.base import CPU
from anyflash._cli import gpu

DEVICE = {"index": 1, "name": "Some GPU", "compute_capability": "8.6", "supported": True}


class FakeDriver:
    """Copies within the host's memory; ``fails`` is the function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == self.fails:
                return 999
            if name in {"cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"}:
                target, source, size = (x.value for x in arguments)
                ctypes.memmove(target, source, size)
            return 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine with one more GPU, whose kernels are the CPU's."""
    fake, info = FakeDriver(), anyflash.build_info()
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(gpu, "Device", lambda kind, index: CPU)
    monkeypatch.setattr(anyflash, "build_info", lambda: {**info, "devices": [DEVICE]})
    return fake
