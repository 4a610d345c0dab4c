"""A program on several ranks, each a process of its own: of gloo on the CPU, or of NCCL, each on a
GPU of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 300.0  # for all ranks together, also on a busy machine


def run(module: str, world_size: int, folder: Path, device: str = "cpu") -> list[Any]:
    """What `python -m module` has each rank give to `finish`."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, "-m", module, str(folder), str(rank), str(world_size), device]
        for rank in range(world_size)
    ]
    ranks = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    deadline = time.monotonic() + SECONDS
    try:
        errors = [
            rank.communicate(timeout=max(deadline - time.monotonic(), 1.0))[1] for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, error in zip(ranks, errors, strict=True):
        assert rank.returncode == 0, error[-3000:]
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(world_size)]


def begin() -> tuple[int, int]:
    """(rank, world_size) of this process, which may now communicate. On a GPU, "cuda" is its
    own."""
    import torch
    import torch.distributed as dist

    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if device() == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device() == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    return rank, world_size


def device() -> str:
    return sys.argv[4]


def run_cases(cases: dict[str, Callable[[], None]]) -> NoReturn:
    """Gives `finish` each case's traceback, or "" where it has passed."""
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    finish(found)


def finish(result: Any) -> NoReturn:
    """Ends the process, without the interpreter's own end: gloo's threads may still drop tensors
    of Python's then, which aborts the process (github.com/pytorch/pytorch/issues/190489)."""
    import torch.distributed as dist

    (Path(sys.argv[1]) / f"{sys.argv[2]}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    os._exit(0)
