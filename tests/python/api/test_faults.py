"""What goes wrong around a call: memory runs out, a producer fails, the interpreter ends, a signal
comes, the library is there twice, the driver is too old. The guide names each outcome."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyflash

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and resource limits")


def run(
    program: str, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    start = "import os, sys\nimport numpy as np\nimport anyflash\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(program), *map(str, arguments)],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def printed(program: str, *arguments: object) -> str:
    done = run(program, *arguments)
    assert done.returncode == 0, done
    assert done.stderr == ""
    return done.stdout


def test_no_memory_for_the_workspace() -> None:
    """MemoryError, nothing written, and the next call works."""
    found = printed(
        """
        import resource

        small = np.ones((1, 4, 2, 8), np.float32)
        expected = anyflash.attention(small, small, small)
        q = np.ones((1, 64, 8, 128), np.float32)
        cache = np.broadcast_to(np.float32(1), (1, 1 << 20, 8, 128))
        out = np.full(q.shape, np.nan, np.float32)
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * os.sysconf("SC_PAGESIZE") + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            anyflash.attention_with_kvcache(q, cache, cache, num_splits=8192, out=out)
        except MemoryError:
            print("MemoryError")
        print(np.isnan(out).all(), (anyflash.attention(small, small, small) == expected).all())
        """
    )
    assert found == "MemoryError\nTrue True\n"


NO_MEMORY = """
    import resource

    class Producer:  # its results are anyflash's own arrays
        def __init__(self, x): self.x = x
        def __dlpack__(self, **k): return self.x.__dlpack__(**k)
        def __dlpack_device__(self): return self.x.__dlpack_device__()

    kind = {"numpy": lambda x: x, "dlpack": Producer}[sys.argv[1]]
    small = kind(np.ones((1, 4, 2, 8), np.float32))
    expected = np.array(np.from_dlpack(anyflash.attention(small, small, small)))
    # One number, of which the result would have 1 GiB.
    large = kind(np.broadcast_to(np.float32(1), (1, 1 << 20, 16, 16)))
    key = kind(np.ones((1, 1, 16, 16), np.float32))
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        anyflash.attention(large, key, key)
    except MemoryError:
        print("MemoryError")
    again = np.from_dlpack(anyflash.attention(small, small, small))
    print((again == expected).all())
    """


@pytest.mark.parametrize("kind", ["numpy", "dlpack"])
def test_no_memory_for_the_result(kind: str) -> None:
    """MemoryError, whoever makes the array; and the next call works."""
    assert printed(NO_MEMORY, kind) == "MemoryError\nTrue\n"


@pytest.mark.parametrize("argument", ["q", "k", "v", "bias"])
def test_a_producer_that_raises(argument: str) -> None:
    """Its exception goes through, and nothing has been written."""

    class Producer:
        def __init__(self, x: np.ndarray, fails: bool = False) -> None:
            self.x, self.fails = x, fails

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **keywords: Any) -> object:
            if self.fails:
                raise LookupError("gone")
            return self.x.__dlpack__(**keywords)

    x = np.ones((1, 4, 2, 8), np.float32)
    out = np.full_like(x, np.nan)
    arrays = {"q": x, "k": x, "v": x, "bias": np.zeros((1, 1, 1, 4), np.float32), "out": out}
    given = {name: Producer(array, name == argument) for name, array in arrays.items()}
    with pytest.raises(LookupError, match=r"^gone$"):
        anyflash.attention(**given)
    assert np.isnan(out).all()


def test_a_deleter_that_runs_late() -> None:
    """Results and borrowed arrays that are freed when the interpreter ends, in any order, and on
    another thread than the call's."""
    found = printed(
        """
        import atexit, threading

        class Producer:  # its results are anyflash's own arrays
            def __init__(self, x): self.x = x
            def __dlpack__(self, **k): return self.x.__dlpack__(**k)
            def __dlpack_device__(self): return self.x.__dlpack_device__()

        x = Producer(np.ones((1, 4, 2, 8), np.float32))
        kept = [anyflash.attention(x, x, x)]
        kept.append(kept[0].__dlpack__())         # a capsule that nobody takes
        kept.append(np.from_dlpack(kept[0]))      # a view that outlives its owner
        kept.append(kept)                         # freed by the last collection
        late = anyflash.attention(x, x, x)
        atexit.register(lambda late=late: print(float(np.from_dlpack(late)[0, 0, 0, 0])))
        capsule = [late.__dlpack__()]
        thread = threading.Thread(target=capsule.clear)
        thread.start()
        thread.join()
        sys.modules["kept"] = kept
        del late
        """
    )
    assert found == "1.0\n"


def test_the_interpreter_ends_while_calls_run() -> None:
    """Daemon threads in the midst of calls: no crash, no hang, the program's own status."""
    done = run(
        """
        import threading

        q = np.ones((1, 1024, 4, 64), np.float32)
        begun = threading.Barrier(4)

        def work():
            begun.wait()
            while True:
                anyflash.attention(q, q, q)

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        begun.wait()
        anyflash.attention(q, q, q)
        sys.exit(7)
        """
    )
    assert done.returncode == 7, done
    assert done.stderr == ""


def test_an_interrupted_call() -> None:
    """A signal waits for the call's end: Python's handler runs then, and `out` is whole."""
    found = printed(
        """
        import signal

        q = np.linspace(-1, 1, 256 * 4 * 64, dtype=np.float32).reshape(1, 256, 4, 64)
        expected = anyflash.attention(q, q, q)
        out = np.empty_like(expected)

        def stop(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        partly = 0
        for _ in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                while True:
                    out[...] = np.nan
                    anyflash.attention(q, q, q, out=out)
            except KeyboardInterrupt:
                partly += not (np.isnan(out).all() or np.array_equal(out, expected))
        print(partly)
        """
    )
    assert found == "0\n"


def test_two_copies_of_the_library(tmp_path: Path) -> None:
    """Each has its own threads, counts and last error; both give the same bits, at once."""
    library = Path(anyflash.__file__).parent / "lib/libanyflash.so"
    copy = tmp_path / "libanother.so"
    copy.write_bytes(library.read_bytes())
    found = printed(
        """
        import ctypes, threading

        libraries = [ctypes.CDLL(name) for name in sys.argv[1:]]
        for library in libraries:
            library.anyflash_last_error.restype = ctypes.c_char_p
            library.anyflash_kernel_launches.restype = ctypes.c_uint64
            library.anyflash_kernel_count.restype = ctypes.c_size_t
        def counts():
            return [
                sum(x.anyflash_kernel_launches(ctypes.c_size_t(i))
                    for i in range(x.anyflash_kernel_count()))
                for x in libraries
            ]

        class Tensor(ctypes.Structure):
            _fields_ = [
                ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
            ]

        def tensor(x):
            shape = (ctypes.c_int64 * x.ndim)(*x.shape)
            return Tensor(x.ctypes.data, (1, 0), x.ndim, 2, 32, 1, shape, None, 0)

        x = np.linspace(-1, 1, 300 * 4 * 16, dtype=np.float32).reshape(1, 300, 4, 16)
        outs = [np.full_like(x, np.nan) for _ in libraries]

        def call(library, out):
            tensors = [ctypes.byref(tensor(t)) for t in (x, x, x, out)]
            memory = ctypes.create_string_buffer(1 << 20)
            bytes = ctypes.c_size_t(len(memory))
            return library.anyflash_forward(*tensors, None, None, memory, bytes)

        def work(i):
            for _ in range(20):
                status = call(libraries[i], outs[i])
                if status: print(libraries[i].anyflash_last_error())

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(np.array_equal(*outs), np.array_equal(outs[0], anyflash.attention(x, x, x)))
        before = counts()
        print(call(libraries[1], outs[1][0]), libraries[0].anyflash_last_error())
        print(b"out has 3 dimensions" in libraries[1].anyflash_last_error())
        call(libraries[1], outs[1])
        print([after - b for after, b in zip(counts(), before)])
        """,
        library,
        copy,
    )
    assert found == "True True\n1 b''\nTrue\n[0, 1]\n"


OLD_DRIVER = """
extern "C" int cuDriverGetVersion(int* version) {
  *version = 11040;
  return 0;
}
"""


@pytest.mark.skipif(not anyflash.build_info()["cuda"], reason="this build has no CUDA kernels")
def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    """The import works, and so does the CPU; arrays of a GPU get a sentence with both versions."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no compiler for a driver that says it is old")
    (tmp_path / "driver.cpp").write_text(OLD_DRIVER)
    library = ["-shared", "-fPIC", "-o", "libcuda.so.1", "driver.cpp"]
    subprocess.run([compiler, *library], cwd=tmp_path, check=True)
    program = """
        class OnCuda:
            def __dlpack__(self, **_):
                return x.__dlpack__()

            def __dlpack_device__(self):
                return (2, 0)

        x = np.ones((1, 4, 2, 64), np.float16)
        print(anyflash.attention(x, x, x).shape)
        try:
            anyflash.attention(OnCuda(), OnCuda(), OnCuda())
        except RuntimeError as error:
            print(error)
        """
    done = run(program, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    needed = anyflash.build_info()["cuda"]["runtime_version"]
    assert done.stdout == (
        "(1, 4, 2, 64)\n"
        "anyflash.attention: a CUDA array cannot be used here: the NVIDIA driver supports CUDA "
        f"up to 11.4, but this build of anyflash needs CUDA {needed}; update the driver, or build "
        "anyflash with the older toolkit\n"
    ), done.stderr
