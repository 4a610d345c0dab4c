"""Writes a model of random numbers for the engine, which shows that it runs: needs NumPy alone.

python random_model.py MODEL.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LAYERS, HEADS, HEADS_K, HEAD_DIM, HIDDEN, VOCABULARY, POSITIONS = 2, 4, 2, 16, 96, 50, 96
NUMBERS = {"layers": LAYERS, "heads": HEADS, "heads_k": HEADS_K}


def weights() -> dict[str, Array]:
    """What model.h lists, always the same."""
    rng = np.random.default_rng(1)
    width, width_k = HEADS * HEAD_DIM, HEADS_K * HEAD_DIM
    angles = np.arange(POSITIONS)[:, None] * 100.0 ** -(np.arange(HEAD_DIM // 2) / HEAD_DIM * 2)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, width), "norm": (width,)}
    for i in range(LAYERS):
        shapes |= {f"{i}.{name}": (width,) for name in ("norm_attention", "norm_mlp")}
        shapes |= {f"{i}.{name}": (width, width) for name in ("q", "o")}
        shapes |= {f"{i}.{name}": (width_k, width) for name in ("k", "v")}
        shapes |= {f"{i}.{name}": (HIDDEN, width) for name in ("gate", "up")}
        shapes[f"{i}.down"] = (width, HIDDEN)
    result = {
        name: rng.standard_normal(shape) * (1 if len(shape) == 1 else 2 / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }
    result |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in result.items()}


def write_safetensors(path: Path, tensors: dict[str, Array], metadata: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {name: str(x) for name, x in metadata.items()}}
    offset = 0
    for name, tensor in tensors.items():
        ends = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python random_model.py MODEL.safetensors")
    write_safetensors(Path(sys.argv[1]), weights(), NUMBERS)
