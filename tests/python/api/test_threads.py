"""How many threads a call on the CPU uses, and calls in children of fork()."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# A process of its own: thread pools are never taken down.
PREPARE = """
import os, sys
import numpy as np
import anyflash
rng = np.random.default_rng(0)

def threads():
    return len(os.listdir("/proc/self/task"))

def calls(length):
    q, k, v = (rng.standard_normal((2, length, 4, 64), np.float32) for _ in range(3))
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    yield out
    yield from anyflash.attention_backward(out, q, k, v, out, lse)[:3]
    yield anyflash.attention_with_kvcache(
        q[:, :1], np.repeat(k, 4, 1), np.repeat(v, 4, 1), cache_seqlens=length
    )
    yield from anyflash.merge_states(out, lse, out, lse)
"""


def printed(code: str, threads: int = 4) -> str:
    """What the program prints; it must end within a minute."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_little_work_is_done_by_the_caller() -> None:
    """Forward, backward, decoding (whose cache is four times as long as what is in it), merging."""
    found = printed(
        """
        before = threads()
        list(calls(17))
        assert threads() == before, "a thread was started for little work"
        list(calls(400))
        print(threads() - before)
        """
    )
    assert found == "3\n"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_child_of_fork(threads: int) -> None:
    """The threads of its parent's pool are not there; it gets the same bits with its own."""
    found = printed(
        """
        rng = np.random.default_rng(0)
        expected = [x.tobytes() for x in calls(400)]
        child = os.fork()
        rng = np.random.default_rng(0)
        same = [x.tobytes() for x in calls(400)] == expected
        if child == 0:
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        print(status, same)
        """,
        threads,
    )
    assert found == "0 True\n"


def test_a_child_of_fork_while_others_call() -> None:
    """Its parent's tasks are half done, and a mutex may be locked: none of that is the child's."""
    found = printed(
        """
        import threading

        x = rng.standard_normal((2, 400, 4, 64), np.float32)
        expected = anyflash.attention(x, x, x).tobytes()
        ended = threading.Event()

        def work():
            while not ended.is_set():
                anyflash.attention(x, x, x)

        others = [threading.Thread(target=work) for _ in range(3)]
        [thread.start() for thread in others]
        good = 0
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if anyflash.attention(x, x, x).tobytes() == expected else 1)
            good += os.waitpid(child, 0)[1] == 0
        ended.set()
        [thread.join() for thread in others]
        print(good)
        """
    )
    assert found == "10\n"
