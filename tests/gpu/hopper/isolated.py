"""Calls a function in a process of its own: what crashes or hangs there ends nothing else."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable
from typing import Any

# A fork has PyTorch already. CUDA may not have been used before: a context does not survive it.
_CONTEXT = multiprocessing.get_context("fork")


def _answer(
    end: multiprocessing.connection.Connection, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    status = 0
    try:
        end.send(call(*arguments))
    except BaseException:
        traceback.print_exc(limit=2)
        status = 1
    os._exit(status)  # without PyTorch's clean-up, which would wait for a broken GPU context


def isolated(limit_s: float, call: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Returns (result, ""), or (None, what happened)."""
    mine, other = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_answer, args=(other, call, arguments))
    process.start()
    other.close()
    result, problem = None, ""
    try:
        if mine.poll(limit_s):
            result = mine.recv()
        else:
            problem = f"no end after {limit_s:.0f} s"
    except EOFError:
        problem = "crashed"
    if problem.startswith("no end"):
        process.kill()
    process.join()
    return result, problem
