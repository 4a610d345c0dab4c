"""The demo's attention on a GPU: by the fake driver of conftest.py; and without one."""

from __future__ import annotations

import re
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from anyflash import __main__ as command_line
from anyflash import demo
from anyflash._cli import gpu

CALLS = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")


def random(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors() -> list[Any]:
    return [random(i, 2, 5, 12, 64)[..., ::2] for i in range(3)]  # not contiguous


def verify(attention: demo.Attention) -> None:
    given = tensors()
    out = attention(*given)
    assert (out.dtype, out.shape) == (np.float32, given[0].shape)
    expected = demo.naive_attention(*map(gpu.rounded, given))
    assert 0 < np.abs(out - expected).max() < demo.GPU_LAYER_BOUND


def test_rounding_is_that_of_bfloat16() -> None:
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 0, -0.0, np.inf, 3e38])
    for x in (random(0, 1000), ties.astype(np.float32)):
        expected = x.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(gpu.to_bfloat16(x), expected.view(np.uint16))
        np.testing.assert_array_equal(gpu.rounded(x), expected.astype(np.float32))


def test_arrays_are_copied_there_and_back(driver: Any) -> None:
    verify(gpu.Gpu(1).attention)
    assert driver.called == [*CALLS, *["cuMemcpyHtoD_v2"] * 3, "cuMemcpyDtoH_v2"]


def test_demo_runs_on_the_gpu(driver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert f"anyflash {anyflash.__version__} on GPU 1 (Some GPU), in bfloat16\n" in shown
    assert "forgotten password" in shown
    assert shown.count("(bound 2e-02: ok)") == shown.count("(bound 2e-03: ok)") == 1
    said = re.search(r"(\d+) attention calls", shown)
    assert said
    assert driver.called.count("cuMemcpyDtoH_v2") == int(said[1]) + 1  # which tried it


def test_cpu_can_be_asked_for(driver: Any) -> None:
    assert demo.choose_place("cpu").name.startswith("the CPU")
    assert driver.called == []


@pytest.mark.parametrize("function", [*CALLS, "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"])
def test_cpu_stands_in(driver: Any, capsys: pytest.CaptureFixture[str], function: str) -> None:
    driver.fails = function
    assert demo.choose_place(None).name.startswith("the CPU")
    assert capsys.readouterr() == (
        "",
        f"The GPU is not used: {function} returned CUDA error 999.\n\n",
    )


def test_gpu_without_kernels(
    driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = anyflash.build_info()
    info["devices"][0] = {**info["devices"][0], "supported": False}
    monkeypatch.setattr(anyflash, "build_info", lambda: info)
    assert demo.choose_place(None).name.startswith("the CPU")
    expected = "The GPU is not used: this build has no kernels for Some GPU.\n\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_gpu: bool
) -> None:
    """It is told only where there seems to be a GPU."""
    info = {**anyflash.build_info(), "devices": [], "device_error": "the driver is too old"}
    monkeypatch.setattr(anyflash, "build_info", lambda: info)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if has_gpu else None)
    assert demo.choose_place(None).name.startswith("the CPU")
    told = "The GPU is not used: the driver is too old.\n\n" if has_gpu else ""
    assert capsys.readouterr() == ("", told)
    assert command_line.main(["demo", "--backend", "cuda"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "anyflash demo:\nthe driver is too old\n")


@pytest.mark.cuda
def test_real_gpu() -> None:
    """By one of its kernels, once."""

    def launches() -> int:
        kernels = anyflash.build_info()["kernels"]
        return sum(k["launches"] for k in kernels if not k["arch"].startswith("cpu-"))

    before = launches()
    place = demo.choose_place("cuda")
    verify(place.attention)
    assert launches() == before + 2  # one tried it
