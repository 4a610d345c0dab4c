"""Ranks that are late, silent or dead, and chunks that nobody sees, on three ranks.

python -m calls.context_parallel_faults FOLDER RANK SIZE DEVICE
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anyflash.torch.distributed import ContextParallel, _transport
from calls.context_parallel import randn
from calls.launches import launches
from run import ranks

ROWS = 3 * 64


def tensors(cp: ContextParallel) -> list[torch.Tensor]:
    return [cp.shard(randn(1, ROWS, 3, 8) + i).requires_grad_() for i in range(3)]


def run(cp: ContextParallel, **options: Any) -> list[torch.Tensor]:
    """out, and the gradients of q, k and v."""
    given = tensors(cp)
    out = cp.attention(*given, seqlen=ROWS, deterministic=True, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def late(rank: int) -> bool:
    """Whether the bits are the same, whoever is late, and where."""
    cp = ContextParallel(method="ring", layout="contiguous", multiple=64)
    delays = random.Random(rank)
    first = run(cp, causal=True)
    exchange = _transport.dist.batch_isend_irecv

    def delayed(operations: Any) -> Any:
        time.sleep(delays.choice([0.0, 0.0, 0.003, 0.01]))
        return exchange(operations)

    _transport.dist.batch_isend_irecv = delayed
    try:
        results = [run(cp, causal=True) for _ in range(35)]  # of six exchanges each
    finally:
        _transport.dist.batch_isend_irecv = exchange
    return all(torch.equal(a, b) for again in results for a, b in zip(first, again, strict=True))


def work(layout: str = "contiguous", **options: Any) -> tuple[int, int]:
    """Messages that this rank sends or receives, and kernels that it launches, in a forward."""
    multiple = 64 if layout == "contiguous" else 32
    cp = ContextParallel(method="ring", layout=layout, multiple=multiple)
    given = tensors(cp)
    exchange, messages = _transport.dist.batch_isend_irecv, 0

    def counted(operations: Any) -> Any:
        nonlocal messages
        messages += len(operations)
        return exchange(operations)

    _transport.dist.batch_isend_irecv = counted
    try:
        count, _ = launches(lambda: cp.attention(*given, seqlen=ROWS, **options))
    finally:
        _transport.dist.batch_isend_irecv = exchange
    return messages, count


def error_of(cp: ContextParallel) -> str:
    try:
        run(cp)
    except RuntimeError as error:
        return str(error)
    return ""


def silent(rank: int) -> str:
    """The error where rank 1 does not come."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    cp = ContextParallel(group, method="ring", layout="contiguous", multiple=64)
    error = "" if rank == 1 else error_of(cp)
    dist.barrier()
    return error


def dead(rank: int, result: dict[str, Any]) -> str:
    """The error where rank 1 is gone."""
    cp = ContextParallel(method="ring", layout="contiguous", multiple=64)
    run(cp)
    if rank == 1:
        (Path(sys.argv[1]) / "1.json").write_text(json.dumps(result))
        os._exit(0)
    return error_of(cp)


if __name__ == "__main__":
    number, _ = ranks.begin()
    answer: dict[str, Any] = {
        "late": late(number),
        "all": work(),
        "causal": work(causal=True),
        "window": work(window_size=(10, 0)),
        "zigzag": work("zigzag", causal=True),
        "placed": work("zigzag", causal=True, alibi_slopes=torch.ones(3)),
        "silent": silent(number),
    }
    threads = threading.active_count()
    answer["dead"] = dead(number, answer)
    answer["threads"] = threading.active_count() - threads
    (Path(sys.argv[1]) / f"{number}.json").write_text(json.dumps(answer))
    os._exit(0)  # the group of a dead rank cannot be left
