"""A checkpoint: one safetensors file with a model, its AdamW, and the losses so far."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

State = dict[str, npt.NDArray[Any]]
INSTEAD = "choose another --folder, or delete the file"


@dataclass(frozen=True)
class Origin:
    """What a checkpoint is of: only the same goes on from it."""

    framework: str
    model: str
    seqlen: int
    vocabulary: str  # a digest of tokenizer.json's


def save(file: Path, state: State, losses: list[float], origin: Origin) -> None:
    """Writes beside `file`, then puts it in its place: an interrupt spoils neither."""
    beside = file.with_suffix(".part")
    contiguous = {name: np.asarray(x, order="C") for name, x in state.items()}
    metadata = {"origin": json.dumps(asdict(origin)), "losses": json.dumps(losses)}
    save_file(contiguous, beside, metadata=metadata)
    with beside.open("r+b") as written:
        os.fsync(written.fileno())
    beside.replace(file)


def metadata(file: Path) -> tuple[Origin, list[float]]:
    """What `file` is of, and the losses of the steps that were done."""
    try:
        with safe_open(file, framework="np") as saved:
            found = saved.metadata() or {}
    except SafetensorError:
        raise SystemExit(f"{file} is damaged; {INSTEAD}") from None
    if "origin" not in found:
        raise SystemExit(f"{file} is not of this train.py; {INSTEAD}")
    return Origin(**json.loads(found["origin"])), json.loads(found["losses"])


def check(file: Path, **wanted: object) -> None:
    """Ends the program if `file` is of something else than these of Origin's fields."""
    found, _ = metadata(file)
    for name, asked in wanted.items():
        is_of = getattr(found, name)
        if is_of != asked:
            raise SystemExit(f"{file} is of {name} {is_of}, and not of {asked}; {INSTEAD}")


def load(file: Path) -> tuple[State, list[float]]:
    """All that another step depends on, and the losses of the steps that were done."""
    with safe_open(file, framework="np") as saved:
        state = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    return state, metadata(file)[1]
