"""Random calls with arrays on a GPU (tests/fuzz/devices.py): on the emulated ones, and what is
noticed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash

torch: Any = pytest.importorskip("torch")
devices = importlib.import_module("devices")
python_api = importlib.import_module("python_api")
python_calls = importlib.import_module("python_calls")
right_calls = importlib.import_module("right_calls")
FUZZ = Path(devices.__file__).parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=FUZZ
    )


@pytest.mark.emulated
@pytest.mark.parametrize("device", ["emulated-sm80", "emulated-sm90"])
def test_random_calls_on_an_emulated_gpu(device: str) -> None:
    done = python("python_api.py", "--device", device, "--calls", "150", "--seed", "1")
    assert done.returncode == 0, done
    assert f"150 calls on {device}" in done.stdout
    assert "left out" not in done.stdout
    arch = device.removeprefix("emulated-")
    own = {f"{arch}_forward_bf16_d64", f"{arch}_decode_bf16_d64_m16"}
    kernels = next(line for line in done.stdout.splitlines() if line.startswith("kernels: "))
    assert own <= set(kernels.split())


LOST = """
import devices, python_api
devices.cuda_tensor = devices.tensor
waited = 0
def wait(device):
    global waited
    waited += 1
    if waited > len(devices.modules(device)) + 30:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
devices.wait = wait
python_api.run(2000, 1, ("torch",), "cuda")
"""


def test_a_lost_gpu_ends_the_run() -> None:
    """With the call that did it, and nothing after that."""
    done = python("-c", LOST)
    assert done.returncode == devices.LOST, done
    error, call = done.stderr.splitlines()[-2:]
    assert error == "cuda is lost: CUDA error: an illegal memory access was encountered"
    assert call.startswith("by torch.")
    assert "Tensor(bfloat16, (1, 4, 2, 8), cpu)" in call


def call_of(function: Any, **arguments: Any) -> Any:
    names = tuple(arguments)
    return right_calls.Call("module.function", function, arguments, names, devices.OnEmulatedGpu)


def test_a_write_before_an_error_is_noticed() -> None:
    def writes(x: Any, y: Any) -> None:
        x.x[0] = 1
        raise ValueError("y is wrong")

    call = call_of(writes, x=devices.OnEmulatedGpu(np.zeros(3)), y=1)
    with pytest.raises(AssertionError, match="has written, and failed: y is wrong"):
        python_calls.check(call, {"y": 2})


def test_findings_are_kept_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Any, y: Any) -> None:
        if not isinstance(y, str):
            raise KeyError(y)

    monkeypatch.setattr(python_api, "calls", lambda *_: [call_of(fails, x=1, y="right")])
    findings: dict[str, str] = {}
    counts = python_api.run(40, 1, ("any",), "cpu", findings)
    assert counts["findings"] > 1
    assert sum(counts.values()) >= 40
    assert any(text.startswith("module.function raises KeyError") for text in findings.values())
    with pytest.raises(AssertionError, match=r"module\.function raises KeyError"):
        python_api.run(40, 1, ("any",), "cpu")


def test_a_producer_on_a_gpu_gives_no_capsule() -> None:
    """Found on the emulated GPU: AttributeError, without the argument's name."""
    broken = python_calls.Broken(5, device=(2, 0))
    message = "attention: q cannot be read through DLPack: its __dlpack__ gives int, no capsule"
    with pytest.raises(TypeError, match=message):
        anyflash.attention(broken, broken, broken)


def test_a_map_on_a_gpu() -> None:
    """Found there, too: NumPy's own words, or none, for the map that is to be looked at."""
    mask = devices.OnEmulatedGpu(np.ones((1, 1), bool))
    with pytest.raises(TypeError, match="block_mask is a OnEmulatedGpu on a GPU; an array on the"):
        anyflash.expand_block_mask(mask, 4, 4)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bool", "int64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
@pytest.mark.parametrize("kind", [devices.OnEmulatedGpu, devices.tensor, np.array])
def test_what_an_array_holds(kind: Any, dtype: Any) -> None:
    x = np.arange(-3, 3).reshape(2, 3).astype(dtype)
    held = devices.host(kind(x))
    assert held.dtype == x.dtype
    np.testing.assert_array_equal(held, x)
    if kind is devices.OnEmulatedGpu:
        capsules = importlib.import_module("backends.capsules")
        tensor = capsules.tensor_of(kind(x).__dlpack__())
        assert (tensor.device.type, tensor.device.id) == (2, 0)


def test_modules_of_a_gpu() -> None:
    """Every module of the CPU's but NumPy's arrays, which are on no GPU, and the one whose wrong
    calls stop a GPU; JAX where it has one."""
    cpu, cuda = (set(devices.modules(name)) for name in ("cpu", "cuda"))
    assert cpu - cuda - {"jax"} == {"numpy", "bert_padding"}
    assert set(devices.modules("emulated-sm80")) == {"neutral"}


UINT64 = torch.ones(1, 4, dtype=torch.uint64)
# What 96,000 calls on the CPU have found: the call, what is changed, and the message.
FOUND: dict[str, tuple[str, dict[str, Any], str]] = {
    "mask": ("bert_padding.unpad_input", {"attention_mask": UINT64}, "attention_mask is"),
    "lengths": (
        "bert_padding.unpad_input_for_concatenated_sequences",
        {"attention_mask_in_length": UINT64},
        "attention_mask_in_length is torch.uint64; bool, uint8 or a signed integer is allowed",
    ),
    "put": (
        "bert_padding.index_put_first_axis",
        {"values": torch.ones(4, 2, dtype=torch.uint64)},
        "values is torch.uint64",
    ),
    "pad": (
        "bert_padding.pad_input",
        {"hidden_states": torch.ones(4, 2, dtype=torch.uint64)},
        "hidden_states is torch.uint64",
    ),
    "lse": (
        "numpy.merge_states",
        {"lse_a": np.zeros((1, 2, 4))},
        "lse_b is float32; float64 is allowed, as lse_a",
    ),
    "kv": (
        "rotary.apply_rotary_emb_kv_",
        {"kv": torch.ones(1, 8, 2, 2, 8)},
        "expected 8 positions at least, for the rows of kv",
    ),
    "qkv": (
        "rotary.apply_rotary_emb_qkv_",
        {"qkv": torch.ones(1, 8, 3, 2, 8)},
        "expected 8 positions at least, for the rows of qkv",
    ),
    "packed": (
        "flash_attn_3.flash_attn_with_kvcache",
        {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
        "expected 3: (total_q, heads, head_dim) with cu_seqlens_q",
    ),
    "map": (
        "neutral.expand_block_mask",
        {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)},
        "expand_block_mask: block_mask ",
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_found(what: str) -> None:
    name, changes, message = FOUND[what]
    call = next(call for call in right_calls.calls() if call.name == name)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call.function(**call.arguments | changes)
