"""PyTorch for ROCm calls its devices "cuda", but exports tensors of them as kDLROCM: they are
refused in a sentence, and calls on the CPU work beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyflash
from anyflash import _core
from anyflash._arrays.base import Device
from anyflash._arrays.torch import Torch
from anyflash.torch import _fast_path
from backends.capsules import tensor_of

KDL_ROCM = 10
Make = Callable[..., torch.Tensor]


@pytest.fixture
def on_rocm(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Gives tensors that lie on the CPU, and of which anyflash hears what it would on ROCm."""
    kept: dict[int, torch.Tensor] = {}
    own_device, own_stream, export = Torch.device, Torch.stream, torch.utils.dlpack.to_dlpack

    def device(self: Torch, x: torch.Tensor) -> Device:
        return Device("cuda", 0) if x.data_ptr() in kept else own_device(self, x)

    def stream(self: Torch, x: torch.Tensor, device: Device) -> int:
        return 0 if x.data_ptr() in kept else own_stream(self, x, device)

    def to_dlpack(x: torch.Tensor) -> Any:
        capsule = export(x)
        if x.data_ptr() in kept:
            tensor_of(capsule).device.type = KDL_ROCM
        return capsule

    monkeypatch.setattr(Torch, "device", device)
    monkeypatch.setattr(Torch, "stream", stream)
    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", to_dlpack)
    direct = _fast_path._FUNCTIONS | {"exchange_api": None, "export_tensor": to_dlpack}
    monkeypatch.setattr(_fast_path, "PYTORCH", _core.PyTorch(**direct))

    def make(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, dtype=torch.float16)
        kept[x.data_ptr()] = x
        return x

    return make


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("attention", False),
        ("torch.attention", False),
        ("torch.attention", True),
        ("attention_with_kvcache", False),
    ],
)
def test_refused(on_rocm: Make, name: str, recorded: bool) -> None:
    function: Any = operator.attrgetter(name)(anyflash)
    q, k, v = (on_rocm(2, 5, 4, 16).requires_grad_(recorded) for _ in range(3))
    x = torch.ones(2, 5, 4, 16).requires_grad_(recorded)
    for _ in range(2):
        with pytest.raises(TypeError) as raised:
            function(q, k, v)
        reason = "q is on a device of type rocm; CPU and CUDA devices are allowed"
        assert str(raised.value) == f"anyflash.{name}: {reason}"
        out = function(x, x, x)
        torch.testing.assert_close(out, x)
        if recorded:
            out.sum().backward()
