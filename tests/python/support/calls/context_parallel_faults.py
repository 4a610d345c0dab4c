"""Ranks that are late, silent or dead, and chunks that nobody sees, on three ranks.

python -m calls.context_parallel_faults FOLDER RANK SIZE DEVICE
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anyflash.torch.distributed import ContextParallel
from calls.context_parallel import METHODS, randn
from calls.launches import launches
from run import ranks

ROWS = 3 * 64
HOPS = (1, 2)
RUNS = {"ring": 20, "gather": 24, "ulysses": 5}  # of 6, 3 and 15 steps


def tensors(cp: ContextParallel, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    wholes = [randn(1, ROWS, 3, 8) + i for i in range(3)]
    return [cp.shard(x).to(dtype).requires_grad_() for x in wholes]


def run(cp: ContextParallel, **options: Any) -> list[torch.Tensor]:
    """out, and the gradients of q, k and v."""
    given = tensors(cp)
    out = cp.attention(*given, seqlen=ROWS, deterministic=True, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def contiguous(method: str, group: Any = None) -> ContextParallel:
    return ContextParallel(group, method=method, layout="contiguous", multiple=64)


@contextmanager
def before(name: str, action: Callable[..., None]) -> Iterator[None]:
    """A function of torch.distributed, before which something is done with its arguments."""
    function = getattr(dist, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        action(*arguments)
        return function(*arguments, **options)

    setattr(dist, name, changed)
    try:
        yield
    finally:
        setattr(dist, name, function)


def late(rank: int, method: str) -> tuple[bool, int]:
    """Whether the bits are the same, whoever is late, and where; and how often this rank was."""
    cp = contiguous(method)
    delays, count = random.Random(rank), 0
    first = run(cp, causal=True)

    def wait(*_: Any) -> None:
        nonlocal count
        count += 1
        time.sleep(delays.choice([0.002, 0.005, 0.012]))

    with ExitStack() as steps:
        for name in ("batch_isend_irecv", "all_gather", "all_to_all_single"):
            steps.enter_context(before(name, wait))
        results = [run(cp, causal=True) for _ in range(RUNS[method])]
    same = (torch.equal(a, b) for again in results for a, b in zip(first, again, strict=True))
    return all(same), count


def work(layout: str = "contiguous", **options: Any) -> dict[str, Any]:
    """Bytes that this rank sends and receives in each hop, and kernels that it launches; in a
    forward, and in its backward, where gradients travel, too."""
    multiple = 64 if layout == "contiguous" else 32
    cp = ContextParallel(method="ring", layout=layout, multiple=multiple)
    given = tensors(cp, torch.bfloat16)
    counts: dict[int, list[int]] = {}  # by exchange: two tags, of keys and of values

    def count(operations: list[dist.P2POp]) -> None:
        for operation in operations:
            sizes = counts.setdefault(operation.tag // 2, [0, 0])
            tensor = operation.tensor
            sizes[operation.op is not dist.isend] += tensor.numel() * tensor.element_size()

    def counted(function: Callable[[], Any], exchanges: list[int]) -> tuple[list[Any], int, Any]:
        counts.clear()
        with before("batch_isend_irecv", count):
            launched, result = launches(function)
        found = [counts.pop(exchange, [0, 0]) for exchange in exchanges]
        assert not counts
        return found, launched, result

    keys = [2 * hop for hop in HOPS]
    gradients = [exchange + 1 for exchange in keys]
    sizes, forward, out = counted(lambda: cp.attention(*given, seqlen=ROWS, **options), keys)
    back, backward, _ = counted(lambda: torch.autograd.grad(out.sum(), given), keys + gradients)
    return {
        "forward": sizes,
        "backward": back[: len(keys)],
        "gradients": back[len(keys) :],
        "launches": [forward, backward],
    }


def error_of(cp: ContextParallel) -> str:
    try:
        run(cp)
    except RuntimeError as error:
        return str(error)
    return ""


def threads() -> int:
    """Of the operating system."""
    return len(list(Path("/proc/self/task").iterdir()))


def silent(rank: int, method: str, in_backward: bool) -> tuple[str, int]:
    """The error where rank 1 does not come, or not to the backward, and how many threads it
    leaves."""
    cp = contiguous(method, dist.new_group(timeout=timedelta(seconds=2)))
    dist.barrier()
    before = threads()
    error = ""
    if rank != 1:
        error = error_of(cp)
    elif in_backward:
        cp.attention(*tensors(cp), seqlen=ROWS)
    left = threads() - before
    dist.barrier()
    return error, left


def dead(rank: int, result: dict[str, Any]) -> tuple[str, int]:
    """The error where rank 1 is gone, and how many threads it leaves."""
    cp = contiguous("ring")
    run(cp)
    before = threads()
    if rank == 1:
        (Path(sys.argv[1]) / "1.json").write_text(json.dumps(result))
        os._exit(0)
    error = error_of(cp)
    return error, threads() - before


if __name__ == "__main__":
    number, _ = ranks.begin()
    answer: dict[str, Any] = {
        "late": {method: late(number, method) for method in METHODS},
        "all": work(),
        "causal": work(causal=True),
        "window": work(window_size=(10, 0)),
        "zigzag": work("zigzag", causal=True),
        "placed": work("zigzag", causal=True, alibi_slopes=torch.ones(3)),
        "silent": {method: silent(number, method, False) for method in METHODS},
        "silent in backward": {method: silent(number, method, True) for method in METHODS},
    }
    answer["dead"] = dead(number, answer)
    (Path(sys.argv[1]) / f"{number}.json").write_text(json.dumps(answer))
    os._exit(0)  # the group of a dead rank cannot be left
