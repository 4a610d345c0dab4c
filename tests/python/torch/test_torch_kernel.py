"""The operator that scaled_dot_product_attention calls, registered in PyTorch without Python."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from calls.launches import launches
from calls.torch_math import randn

flash_impl = importlib.import_module("anyflash.torch._flash_impl")


@pytest.fixture
def calls_of_python(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """anyflash is active on the CPU; the arguments of calls that come by Python."""
    calls: list[Any] = []
    by_python = flash_impl._by_python

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return by_python(*arguments)

    monkeypatch.setattr(flash_impl, "_by_python", count)
    handle = flash_impl.activate("CPU")
    if handle._kernel is None:
        handle.remove()
        pytest.skip("this PyTorch has no C interface for kernels")
    yield calls
    handle.remove()


def operator(torch: ModuleType) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention


def described(results: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) if hasattr(x, "stride") else x for x in results]


Change = Callable[[Any, Any], Any]
SAME: Change = lambda torch, x: x  # noqa: E731
INPUTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "contiguous": (SAME, {}),
    "causal": (SAME, {"is_causal": True}),
    "scale": (SAME, {"scale": 0.3}),
    "float64": (lambda torch, x: x.double(), {}),
    "float16": (lambda torch, x: x.half(), {"is_causal": True}),
    "bfloat16": (lambda torch, x: x.bfloat16(), {}),
    "transposed": (lambda torch, x: x.transpose(1, 2).contiguous().transpose(1, 2), {}),
    "one row": (lambda torch, x: x[:, :, :1].contiguous(), {}),
    "columns first": (lambda torch, x: x.mT.contiguous().mT, {}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_without_python(torch: ModuleType, calls_of_python: list[Any], name: str) -> None:
    """What Python computes, bit for bit and in the same layout."""
    change, options = INPUTS[name]
    q, k, v = (change(torch, randn(torch, 2, n, 7, 8, seed=n)) for n in (4, 2, 2))
    count, results = launches(lambda: operator(torch)(q, k, v, **options))
    assert (count, calls_of_python) == (1, [])
    wanted = flash_impl.OVERRIDES[flash_impl.SDPA](q, k, v, **options)
    assert described(results) == described(wanted)
    assert torch.equal(results[0], wanted[0])
    assert torch.equal(results[1], wanted[1])


OTHERS: dict[str, tuple[Change, dict[str, Any]]] = {
    "dropout": (SAME, {"dropout_p": 0.5}),
    "gaps": (lambda torch, x: torch.cat([x, x], -1)[..., :8], {}),
    "expanded": (lambda torch, x: x[:, :1].expand(x.shape), {}),
    "no rows": (lambda torch, x: x[:, :, :0], {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_by_python(torch: ModuleType, calls_of_python: list[Any], name: str) -> None:
    change, options = OTHERS[name]
    q, k, v = (change(torch, randn(torch, 2, n, 7, 8, seed=n)) for n in (4, 2, 2))
    torch.manual_seed(1)
    results = operator(torch)(q, k, v, **options)
    assert len(calls_of_python) == 1
    torch.manual_seed(1)
    wanted = flash_impl.OVERRIDES[flash_impl.SDPA](q, k, v, **options)
    assert described(results) == described(wanted)
    assert torch.equal(results[0], wanted[0])


def test_other_columns_of_v(torch: ModuleType, calls_of_python: list[Any]) -> None:
    q, v = randn(torch, 1, 2, 5, 8), randn(torch, 1, 2, 5, 4)
    out = operator(torch)(q, q, v)[0]
    assert len(calls_of_python) == 1
    assert torch.equal(out, flash_impl.OVERRIDES[flash_impl.SDPA](q, q, v)[0])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda x: x[:, :3], {}, "3 heads"),
        (lambda x: x[..., :4], {}, "head_dim"),
        (lambda x: x, {"scale": float("nan")}, "softmax_scale"),
        (lambda x: x, {"return_debug_mask": True}, "return_debug_mask is True"),
    ],
)
def test_errors(
    torch: ModuleType, calls_of_python: list[Any], change: Any, options: Any, message: str
) -> None:
    """The text is Python's; PyTorch makes a RuntimeError of what a kernel throws."""
    q = randn(torch, 2, 4, 7, 8)
    k = change(q)
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        flash_impl.OVERRIDES[flash_impl.SDPA](q, k, k, **options)
    with pytest.raises(RuntimeError) as found:
        operator(torch)(q, k, k, **options)
    assert str(found.value).startswith(str(error.value))
    assert len(calls_of_python) == 1


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"dropout_p": 0.5}])
def test_no_tensor_is_held(torch: ModuleType, calls_of_python: list[Any], options: Any) -> None:
    """Nor an argument after an error."""
    q, k = randn(torch, 1, 2, 3, 8), randn(torch, 1, 3, 3, 8)
    for _ in range(2):
        results = operator(torch)(q, q, q, **options)
        assert all(x._use_count() == 1 for x in results if isinstance(x, torch.Tensor))
        with pytest.raises(RuntimeError):
            operator(torch)(q, k, k, **options)
    assert (q._use_count(), k._use_count()) == (1, 1)


def test_without_the_interface(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older PyTorch calls the Python function."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(flash_impl._core, "register_torch_kernel", refuse)
    handle = flash_impl.activate("CPU")
    x = randn(torch, 1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        operator(torch)(x, x, x, return_debug_mask=True)
    count, _ = launches(lambda: operator(torch)(x, x, x))
    assert count == 1
    handle.remove()
    with pytest.raises(NotImplementedError):
        operator(torch)(x, x, x)


def test_end_of_the_process(torch: ModuleType) -> None:
    """Python's end finds the kernel registered, and says nothing."""
    program = """
import torch
from anyflash.torch import _flash_impl
handle = _flash_impl.activate("CPU")
x = torch.ones(1, 1, 2, 8)
torch.ops.aten._scaled_dot_product_flash_attention(x, x, x, 0.5)
library = torch.library.Library("of_a_user", "DEF")
library.define("f(Tensor x) -> Tensor")
library.impl("f", lambda x: x, "CPU")  # PyTorch holds it, and so this program's names, to the end
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
