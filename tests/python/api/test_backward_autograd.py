"""anyflash.attention_backward within torch.autograd; its memory, threads and references."""

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
from calls.backward import BIAS, OPTIONS, TORCH, Case
from calls.frameworks import inputs

# Autograd -----------------------------------------------------------------------------------------


def differentiable(torch: Any) -> Any:
    """attention as a function of q, k, v, bias, alibi_slopes and sinks (or None) for autograd."""
    names = ("bias", "alibi_slopes", "sinks")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> Any:
            ctx.options = options
            others = dict(zip(names, tensors[3:], strict=True))
            result = anyflash.attention(*tensors[:3], **options, **others, return_result=True)
            ctx.save_for_backward(*tensors, result.out, result.lse)
            ctx.rng_state = result.rng_state
            # float64, for gradcheck's arithmetic
            return result.out, result.lse.to(result.out.dtype)

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, *others, out, lse = ctx.saved_tensors
            options = {key: x for key, x in ctx.options.items() if key != "seed"}
            options |= dict(zip(names, others, strict=True))
            options |= {f"return_d{name}": options[name] is not None for name in names}
            grads = anyflash.attention_backward(
                *(dout, q, k, v, out, lse),
                **options,
                rng_state=ctx.rng_state,
                dlse=dlse.float(),
            )
            return None, *grads[:4], grads.dalibi_slopes, grads.dsinks

    return Attention


GRADCHECK: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "softcap": {"softcap": 0.8},
    "bias": {"bias": (1, 2, 3, 1)},
    "bias-causal": {"bias": (3, 4), "causal": True},
    "alibi": {"alibi_slopes": (2,)},
    "sinks": {"sinks": (2,)},
    "dropout": {"dropout_p": 0.3, "seed": 4},
}


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("heads_k", [2, 1], ids=["", "gqa"])
@pytest.mark.parametrize("name", GRADCHECK)
def test_gradcheck(torch: ModuleType, name: str, heads_k: int, lse: bool) -> None:
    """float64 throughout, but for the LSE, which is float32, off by 2e-7 at values of 2 to 4.

    Through exp(s - lse), that is a relative error of 2e-7 of the gradients: atol is 1e-5 for out,
    whose difference quotients are exact to eps**2 and 1e-15 / eps. The quotients of the LSE itself
    are off by 2e-7 / eps: eps and atol are as large as 3e-3.
    """
    torch.manual_seed(0)
    options = dict(GRADCHECK[name])
    shapes = [(1, 3, 2, 4), (1, 4, heads_k, 4), (1, 4, heads_k, 3)]
    shapes += [options.pop(key, None) for key in ("bias", "alibi_slopes", "sinks")]
    tensors = [
        shape and torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    function = differentiable(torch)

    def attend(*given: Any) -> Any:
        return function.apply(options, *given)[1 if lse else 0]

    eps, atol = (3e-3, 1e-3) if lse else (1e-4, 1e-5)
    assert torch.autograd.gradcheck(attend, tensors, eps=eps, atol=atol, rtol=0)


def test_second_derivatives_are_refused(torch: ModuleType) -> None:
    """Instead of being zero."""
    q, k, v = (x.double().requires_grad_() for x in map(torch.from_numpy, inputs()))
    out, _ = differentiable(torch).apply({}, q, k, v, None, None, None)
    with pytest.raises(NotImplementedError, match=r"attention_backward: \w+ requires grad"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("name", ["dout", "q", "v", "out", "lse", "bias"])
def test_torch_gradients_are_not_dropped(torch: ModuleType, name: str) -> None:
    arguments = Case({"bias": BIAS}).forward(TORCH)
    arguments[name] = arguments[name].clone().requires_grad_()
    message = rf"anyflash\.attention_backward: {name} requires grad.*anyflash\.torch\.attention"
    with pytest.raises(NotImplementedError, match=message):
        anyflash.attention_backward(**arguments)
    with torch.no_grad():
        anyflash.attention_backward(**arguments)


def test_the_forward_records_the_backward(torch: ModuleType) -> None:
    """attention gives torch the gradients that attention_backward computes."""
    case = Case(OPTIONS["causal"])
    arguments = case.forward(TORCH)
    right = anyflash.attention_backward(**arguments)
    leaves = [arguments[name].requires_grad_() for name in "qkv"]
    out = anyflash.attention(*leaves, causal=True)
    found = torch.autograd.grad(out, leaves, arguments["dout"])
    for one, other in zip(found, right, strict=False):
        assert torch.equal(one, other)


# Resources ----------------------------------------------------------------------------------------


def test_reference_counts() -> None:
    arguments = Case(OPTIONS["all"], dlse=True).forward()
    flags = Case(OPTIONS["all"]).asked
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
    before = [sys.getrefcount(x) for x in arrays]
    for _ in range(10):
        anyflash.attention_backward(**arguments, **flags)
        with pytest.raises(ValueError, match="seqused_k"):
            anyflash.attention_backward(**arguments, seqused_k=np.zeros(9, np.int32))
    assert [sys.getrefcount(x) for x in arrays] == before


def test_the_gil_is_released() -> None:
    """While one thread computes, another one runs Python."""
    x = np.ones((1, 2048, 1, 64), np.float32)
    out, lse = anyflash.attention(x, x, x, return_lse=True)
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
            anyflash.attention_backward(x, x, x, x, out, lse)
            if counts[0] > before:
                break
        after = counts[0]
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counter.join()
    assert after > before


def test_memory_is_linear() -> None:
    """Of the whole process: 8192 x 8192 scores would be 256 MB in float32, all arrays are 4 MB."""
    program = (
        "import resource, anyflash, numpy as np\n"
        "def call(n):\n"
        "    x = np.ones((1, n, 1, 16), np.float32)\n"
        "    out, lse = anyflash.attention(x, x, x, return_lse=True)\n"
        "    anyflash.attention_backward(out, x, x, x, out, lse)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "call(64)\n"
        "before = peak()\n"
        "call(8192)\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(output) < 40 * 1024, f"{output.strip()} KB more than before"
