"""anyflash.attention with each framework's arrays: what goes in comes out."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from calls.frameworks import (
    EVERY_DTYPE,
    Producer,
    bits,
    from_torch,
    inputs,
    to_torch,
    views,
)
from oracle.attention import check, reference

# NumPy --------------------------------------------------------------------------------------------


@EVERY_DTYPE
@pytest.mark.parametrize("causal", [False, True])
def test_numpy(dtype: str, causal: bool) -> None:
    q, k, v = inputs(dtype)
    out, lse = anyflash.attention(q, k, v, causal=causal, softmax_scale=0.3, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert (out.dtype, out.shape) == (q.dtype, (2, 30, 4, 12))
    assert (lse.dtype, lse.shape) == (np.float32, (2, 4, 30))
    check(out, lse, reference(q, k, v, 0.3, causal))
    assert bits(out) == bits(anyflash.attention(q, k, v, causal=causal, softmax_scale=0.3))


@EVERY_DTYPE
@pytest.mark.parametrize("view", views(np.zeros((1, 1, 1, 1))))
def test_numpy_views(dtype: str, view: str) -> None:
    q, k, v = inputs(dtype)
    expected = anyflash.attention(q, k, v, causal=True)
    given = [views(x)[view] for x in (q, k, v)]
    before = [x.copy() for x in given]
    assert bits(anyflash.attention(*given, causal=True)) == bits(expected)
    assert [*map(bits, given)] == [*map(bits, before)]


def test_numpy_slices_of_one_projection() -> None:
    projection = np.random.default_rng(1).standard_normal((2, 30, 8, 16)).astype(np.float32)
    q, k, v = projection[:, :, :4], projection[:, :, 4:6], projection[:, :, 6:]
    expected = anyflash.attention(*map(np.ascontiguousarray, (q, k, v)))
    assert bits(anyflash.attention(q, k, v)) == bits(expected)


def test_one_array_for_all() -> None:
    x, *_ = inputs()
    check(anyflash.attention(x, x, x), None, reference(x, x, x))


def test_numpy_broadcast_heads() -> None:
    q, k, v = inputs()
    wide = [np.broadcast_to(x[:, :, :1], (*x.shape[:2], 4, x.shape[3])) for x in (k, v)]
    narrow = anyflash.attention(q, k[:, :, :1], v[:, :, :1])
    assert bits(anyflash.attention(q, *wide)) == bits(narrow)


def test_numpy_subclass() -> None:
    q, k, v = (x.view(np.memmap) for x in inputs())
    np.testing.assert_array_equal(anyflash.attention(q, k, v), anyflash.attention(*inputs()))


def test_foreign_byte_order() -> None:
    q, k, v = inputs()
    swapped = q.astype(q.dtype.newbyteorder())
    with pytest.raises(TypeError, match=r"anyflash\.attention: q .*byte order"):
        anyflash.attention(swapped, k, v)


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [((0, 3, 2, 8), (0, 5, 2, 8)), ((2, 0, 2, 8), (2, 5, 2, 8)), ((2, 3, 2, 8), (2, 0, 2, 8))],
)
def test_empty(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k = np.ones(q_shape, np.float32), np.ones(k_shape, np.float32)
    out, lse = anyflash.attention(q, k, k, return_lse=True)
    assert out.shape == q_shape
    assert not out.any()
    assert (lse == -np.inf).all()


# out= ---------------------------------------------------------------------------------------------


@EVERY_DTYPE
def test_out(dtype: str) -> None:
    q, k, v = inputs(dtype)
    expected = anyflash.attention(q, k, v)
    out = np.empty_like(expected)
    assert anyflash.attention(q, k, v, out=out) is out
    assert bits(out) == bits(expected)
    result, lse = anyflash.attention(q, k, v, out=out, return_lse=True)
    assert result is out
    assert lse.shape == (2, 4, 30)


def test_out_is_a_view() -> None:
    q, k, v = inputs()
    frame = np.full((2, 4, 32, 14), 7, np.float32)
    out = frame.swapaxes(1, 2)[:, 1:-1, :, 1:-1]
    assert anyflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, anyflash.attention(q, k, v))
    out[...] = 7
    assert (frame == 7).all(), "written outside of out"


def test_out_of_torch(torch: ModuleType) -> None:
    q, k, v = map(torch.from_numpy, inputs())
    out = torch.empty(2, 4, 30, 12).transpose(1, 2)
    assert anyflash.attention(q, k, v, out=out) is out
    assert torch.equal(out, anyflash.attention(q, k, v))


# PyTorch ------------------------------------------------------------------------------------------


@EVERY_DTYPE
def test_torch(torch: ModuleType, dtype: str) -> None:
    arrays = inputs(dtype)
    q, k, v = (to_torch(torch, x) for x in arrays)
    out, lse = anyflash.attention(q, k, v, causal=True, return_lse=True)
    assert (out.dtype, out.device, lse.dtype) == (q.dtype, q.device, torch.float32)
    expected, expected_lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    assert bits(from_torch(torch, out)) == bits(expected)
    assert bits(lse.numpy()) == bits(expected_lse)


def test_torch_views(torch: ModuleType) -> None:
    arrays = inputs()
    expected = torch.from_numpy(anyflash.attention(*arrays))
    q, k, v = map(torch.from_numpy, arrays)
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(anyflash.attention(*other), expected)
    other = [torch.stack([x, x], -1)[..., 1] for x in (q, k, v)]
    assert torch.equal(anyflash.attention(*other), expected)
    one = [x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v)]
    narrow = anyflash.attention(q, k[:, :, :1], v[:, :, :1])
    assert torch.equal(anyflash.attention(q, *one), narrow)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_torch_gradients_are_not_dropped(torch: ModuleType, name: str) -> None:
    """They are recorded, by anyflash.torch; not where torch records none."""
    arrays = dict(zip("qkv", map(torch.from_numpy, inputs()), strict=True))
    arrays[name].requires_grad_()
    expected = torch.from_numpy(anyflash.attention(*inputs()))
    out = anyflash.attention(**arrays)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert arrays[name].grad.any()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = anyflash.attention(**arrays)
        assert torch.equal(out, expected)
        assert not out.requires_grad


def test_torch_parameter(torch: ModuleType) -> None:
    q, k, v = map(torch.from_numpy, inputs())
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(anyflash.attention(parameter, k, v), anyflash.attention(q, k, v))


def test_torch_sparse(torch: ModuleType) -> None:
    q, k, v = map(torch.from_numpy, inputs())
    with pytest.raises(TypeError, match=r"anyflash\.attention: k .*sparse"):
        anyflash.attention(q, k.to_sparse(), v)


def test_torch_meta(torch: ModuleType) -> None:
    q, k, v = (torch.from_numpy(x).to("meta") for x in inputs())
    with pytest.raises(TypeError, match=r"anyflash\.attention: q .*meta"):
        anyflash.attention(q, k, v)


# JAX ----------------------------------------------------------------------------------------------


@EVERY_DTYPE
def test_jax(jax: ModuleType, dtype: str) -> None:
    arrays = inputs(dtype)
    given = [jax.numpy.asarray(x) for x in arrays]
    out, lse = anyflash.attention(*given, causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (out.dtype, out.devices()) == (given[0].dtype, given[0].devices())
    expected, expected_lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    assert bits(np.asarray(out)) == bits(expected)
    assert bits(np.asarray(lse)) == bits(expected_lse)
    assert [bits(np.asarray(x)) for x in given] == [*map(bits, arrays)], "an input was written to"


def test_jax_results_outlive_each_other(jax: ModuleType) -> None:
    q, k, v = map(jax.numpy.asarray, inputs())
    results = [anyflash.attention(q * i, k, v) for i in range(8)]
    for i, result in enumerate(results):
        assert bits(np.asarray(result)) == bits(np.asarray(anyflash.attention(q * i, k, v)))


def test_jax_result_is_computed_with(jax: ModuleType) -> None:
    """It is an array like any other: it can be traced, donated and sharded."""
    q, k, v = map(jax.numpy.asarray, inputs())
    out = anyflash.attention(q, k, v)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(out + 0)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * np.asarray(out))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_jax_tracer(jax: ModuleType, transform: str) -> None:
    arrays = list(map(jax.numpy.asarray, inputs()))
    if transform == "vmap":
        arrays = [x[None] for x in arrays]

    def function(q: Any, k: Any, v: Any) -> Any:
        return anyflash.attention(q, k, v).sum()

    traced = getattr(jax, transform)(function)(*arrays)
    if transform == "grad":
        assert traced.shape == arrays[0].shape and np.asarray(traced).any()
    else:
        assert traced.ravel()[0] == function(*[x.reshape(x.shape[-4:]) for x in arrays])


def test_jax_out(jax: ModuleType) -> None:
    q, k, v = map(jax.numpy.asarray, inputs())
    out = jax.numpy.full((2, 30, 4, 12), 7.0, "float32")
    with pytest.raises(TypeError, match=r"anyflash\.attention: out is a JAX array.*immutable"):
        anyflash.attention(q, k, v, out=out)
    assert (np.asarray(out) == 7).all()


# Frameworks together ------------------------------------------------------------------------------


def test_torch_jax_and_others_do_not_mix(torch: ModuleType, jax: ModuleType) -> None:
    q, k, v = inputs()
    name = r"anyflash\.attention: "
    with pytest.raises(TypeError, match=name + "k is .*PyTorch.*q is .*NumPy"):
        anyflash.attention(q, torch.from_numpy(k), v)
    with pytest.raises(TypeError, match=name + "v is .*JAX.*q is .*PyTorch"):
        anyflash.attention(torch.from_numpy(q), torch.from_numpy(k), jax.numpy.asarray(v))
    with pytest.raises(TypeError, match=name + "k is .*DLPack.*q is .*NumPy"):
        anyflash.attention(q, Producer(k), v)
    with pytest.raises(TypeError, match=name + "out is .*NumPy.*q is .*PyTorch"):
        out = np.empty((2, 30, 4, 12), np.float32)
        anyflash.attention(*map(torch.from_numpy, (q, k, v)), out=out)


def test_no_framework_is_imported() -> None:
    """`import anyflash` and a call with NumPy arrays import neither PyTorch nor JAX."""
    program = (
        "import sys, anyflash, numpy as np\n"
        "x = np.ones((1, 2, 1, 4), np.float32)\n"
        "anyflash.attention(x, x, x)\n"
        "print([name for name in ('torch', 'jax', 'cupy') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_gil_is_released() -> None:
    """While one thread computes, another one runs Python."""
    x = np.ones((1, 4096, 1, 64), np.float32)
    counts = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counts[0] += 1
            time.sleep(1e-4)

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    # Nobody is asked to let go of the GIL: the counter runs only where it is released.
    sys.setswitchinterval(1000)
    try:
        counter.start()
        before = counts[0]
        for _ in range(50):  # a call may be over before the counter's thread is awake
            anyflash.attention(x, x, x)
            if counts[0] > before:
                break
        after = counts[0]
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counter.join()
    assert after > before


def test_threads_share_nothing() -> None:
    arrays = [inputs(seed=seed) for seed in range(8)]
    expected = [anyflash.attention(*given, causal=True) for given in arrays]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if bits(anyflash.attention(*arrays[index], causal=True)) != bits(expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), 0, 1])
def test_softmax_scale_may_be_any_real_number(scale: Any) -> None:
    q, k, v = inputs()
    result = anyflash.attention(q, k, v, softmax_scale=scale)
    np.testing.assert_array_equal(result, anyflash.attention(q, k, v, softmax_scale=float(scale)))
