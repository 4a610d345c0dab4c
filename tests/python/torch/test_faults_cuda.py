"""What goes wrong around a call on a GPU: no memory, errors that stay, streams and graphs that end
early, signals, and the interpreter's end. The guide's page on faults names each outcome."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

SETUP = """
    import os, signal, sys, time
    import torch
    import anyflash.torch

    LONG = 400_000_000  # GPU clock cycles: about a fifth of a second
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attend(**options):
        return anyflash.torch.attention(q, k, v, causal=True, **options)

    def break_the_context():
        # A kernel that fails: from then on the process's context is lost.
        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]

    def leave(bytes):
        # So much memory may still be taken.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = torch.cuda.memory_reserved() + bytes
        torch.cuda.set_per_process_memory_fraction(allowed / total)

    def kind_of(function):
        try:
            function()
        except Exception as error:
            return type(error).__name__
        return "no error"
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: some of these end its context."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SETUP) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def printed(program: str) -> str:
    done = run(program)
    assert done.returncode == 0, done
    return done.stdout


def test_no_memory() -> None:
    """The framework's own error, nothing written, and the next call works."""
    found = printed(
        """
        expected = attend()
        leave(8 << 20)
        large = torch.empty(1, 1, 1, 1, device="cuda", dtype=torch.bfloat16).expand(64, 4096, 8, 64)
        print(kind_of(lambda: anyflash.torch.attention(large, large, large)))
        print(torch.equal(attend(), expected))
        """
    )
    assert found == "OutOfMemoryError\nTrue\n"


def test_no_memory_for_the_workspace() -> None:
    """The result has its memory; its splits do not."""
    found = printed(
        """
        one = torch.zeros(1, 1, 1, 1, device="cuda", dtype=torch.bfloat16)
        cache = one.expand(1, 1 << 20, 8, 64)
        x = torch.ones(1, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
        leave(8 << 20)
        decode = lambda **options: anyflash.torch.attention_with_kvcache(x, cache, cache, **options)
        print(kind_of(lambda: decode(num_splits=4096)))
        print(bool((decode(num_splits=1) == 0).all()))
        """
    )
    assert found == "OutOfMemoryError\nTrue\n"


def test_an_error_before_the_call() -> None:
    found = printed(
        """
        attend()
        torch.cuda.synchronize()
        break_the_context()
        kind_of(torch.cuda.synchronize)
        print(kind_of(attend))
        sys.stdout.flush()
        os._exit(0)  # nothing can be freed any more
        """
    )
    assert found in {"RuntimeError\n", "AcceleratorError\n"}


def test_an_error_after_the_call() -> None:
    """The call is not to blame; who waits next meets the error, and calls after that."""
    found = printed(
        """
        attend()
        out = attend()
        break_the_context()
        print(kind_of(torch.cuda.synchronize) != "no error", kind_of(attend) != "no error")
        sys.stdout.flush()
        os._exit(0)
        """
    )
    assert found == "True True\n"


def test_fork() -> None:
    """A child may use the CPU; CUDA lets it use no GPU that its parent has used."""
    found = printed(
        """
        import numpy as np

        out = attend()
        x = np.ones((1, 200, 4, 64), np.float32)
        expected = anyflash.attention(x, x, x)
        child = os.fork()
        if child == 0:
            print(kind_of(lambda: anyflash.attention(q, k, v, out=out)))
            print((anyflash.attention(x, x, x) == expected).all())
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(torch.equal(attend(), out))
        """
    )
    assert found == "RuntimeError\nTrue\nTrue\n"


def test_validate_in_a_capture() -> None:
    """A sentence instead of a capture that is invalid."""
    found = printed(
        """
        starts = torch.tensor([0, 300, 600], device="cuda", dtype=torch.int32)
        packed = [x.flatten(0, 1) for x in (q, k, v)]

        def attend_packed(**options):
            return anyflash.torch.attention_varlen(*packed, starts, starts, 300, 300, **options)

        expected = attend_packed()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            try:
                attend_packed(validate=True)
            except ValueError as error:
                print("stream is being captured" in str(error))
            captured = attend_packed()
        graph.replay()
        print(torch.equal(captured, expected))
        """
    )
    assert found == "True\nTrue\n"


def test_an_error_names_the_function() -> None:
    """Where the library meets it, not PyTorch: the memory is there already."""
    done = run(
        """
        import anyflash

        out = torch.empty_like(q)
        call = lambda: anyflash.attention(q, k, v, out=out)
        call()
        torch.cuda.synchronize()
        break_the_context()
        kind_of(torch.cuda.synchronize)
        try:
            call()
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        sys.stdout.flush()
        os._exit(0)
        """
    )
    assert "anyflash.attention" in done.stdout or "CUDA error" in done.stdout, done


def stream_of(driver: Any) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream


def test_a_stream_that_ends_early() -> None:
    """CUDA frees it when its work is done."""
    import anyflash

    driver = ctypes.CDLL("libcuda.so.1")
    q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = anyflash.attention(q, q, q)
    out = torch.zeros_like(q)
    for _ in range(20):
        out.zero_()
        torch.cuda.synchronize()
        stream = stream_of(driver)
        external = torch.cuda.ExternalStream(stream.value)
        with torch.cuda.stream(external):
            torch.cuda._sleep(20_000_000)
        anyflash.attention(q, q, q, out=out, stream=stream.value)
        assert driver.cuStreamDestroy_v2(stream) == 0
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_a_graph_that_ends_early() -> None:
    import anyflash.torch

    q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = anyflash.torch.attention(q, q, q)
    kept = torch.zeros_like(expected)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(20_000_000)
            kept.copy_(anyflash.torch.attention(q, q, q))
        kept.zero_()
        graph.replay()
        del graph  # while it runs
        torch.cuda.synchronize()
        assert torch.equal(kept, expected)


def test_an_interrupted_wait() -> None:
    """`validate` waits for the lengths; a signal's handler runs after that, and `out` is whole."""
    found = printed(
        """
        import anyflash

        out = torch.empty_like(q)
        ends = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
        x = [t.reshape(600, 4, 64) for t in (q, k, v, out)]
        packing = (ends, ends, 300, 300)
        call = lambda: anyflash.attention_varlen(*x[:3], *packing, validate=True, out=x[3])
        call()
        expected = out.clone()

        def stop(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        out.zero_()
        torch.cuda._sleep(LONG)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        begin = time.monotonic()
        try:
            call()
            while time.monotonic() < begin + 10:
                pass
        except KeyboardInterrupt:
            torch.cuda.synchronize()
            print("interrupted", torch.equal(out, expected))
        """
    )
    assert found == "interrupted True\n"


def test_the_interpreter_ends_while_the_gpu_works() -> None:
    done = run(
        """
        import threading

        def work():
            while True:
                attend()

        threading.Thread(target=work, daemon=True).start()
        torch.cuda._sleep(LONG)
        for _ in range(50):
            kept = attend()
        sys.exit(7)
        """
    )
    assert done.returncode == 7, done
