"""Random steps of training and of generation, one after the other in one process.

    python tests/soak/steps.py --seed S --steps N

Prints a line for each step: its digest of every bit that it computed, and the process's memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import anyflash

Array = Any
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def memory() -> int:
    """Bytes that are resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Steps:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.cache: dict[str, Any] = {}
        self.fill_cache()

    def array(self, *shape: int, dtype: Any = np.float32) -> Array:
        return self.random.standard_normal(shape).astype(dtype)

    def one_of(self, *values: Any) -> Any:
        return values[self.random.integers(len(values))]

    def options(self, batch: int, rows: int, keys: int, heads: int, dtype: Any) -> dict[str, Any]:
        """Each feature in one step of four."""
        drawn: dict[str, Callable[[], dict[str, Any]]] = {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window_size": (int(self.random.integers(0, keys + 1)), 3)},
            "softcap": lambda: {"softcap": 20.0},
            "alibi": lambda: {"alibi_slopes": self.array(batch, heads) ** 2},
            "bias": lambda: {"bias": self.array(1, heads, rows, keys, dtype=dtype)},
            "blocks": lambda: {
                "block_mask": self.random.random((batch, 1, -(-rows // 64), -(-keys // 64))) < 0.7,
                "block_size": (64, 64),
            },
            "ranges": lambda: {
                "key_ranges": self.random.integers(-9, rows + 9, (batch, 1, keys, 4), np.int32)
            },
            "sinks": lambda: {"sinks": self.array(heads)},
            "dropout": lambda: {"dropout_p": 0.2, "seed": int(self.random.integers(1 << 40))},
        }
        chosen = {name: make() for name, make in drawn.items() if self.random.random() < 0.25}
        return {name: value for part in chosen.values() for name, value in part.items()}

    def train(self) -> list[Array]:
        """Forward and backward of one random problem."""
        batch, heads_k = int(self.random.integers(1, 4)), int(self.random.integers(1, 3))
        heads = heads_k * int(self.random.integers(1, 4))
        rows, keys = (int(n) for n in self.random.integers(1, 200, 2))
        d, dv = self.one_of((64, 64), (32, 32), (24, 40), (128, 128), (80, 16))
        dtype = self.one_of(*DTYPES)
        q = self.array(batch, rows, heads, d, dtype=dtype)
        k = self.array(batch, keys, heads_k, d, dtype=dtype)
        v = self.array(batch, keys, heads_k, dv, dtype=dtype)
        options = self.options(batch, rows, keys, heads, dtype)
        out, lse = anyflash.attention(q, k, v, return_lse=True, **options)
        dout = self.array(*out.shape, dtype=dtype)
        wanted = {
            f"return_d{name}": True for name in ("bias", "sinks", "alibi_slopes") if name in options
        }
        grads = anyflash.attention_backward(dout, q, k, v, out, lse, **options, **wanted)
        return [out, lse, *(x for x in grads if x is not None)]

    def train_packed(self) -> list[Array]:
        lengths = self.random.integers(0, 60, int(self.random.integers(1, 8)))
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        longest = max(int(lengths.max()), 1)
        x = [self.array(int(ends[-1]), 2, 32) for _ in range(4)]
        packing = (ends, ends, longest, longest)
        out, lse = anyflash.attention_varlen(*x[:3], *packing, causal=True, return_lse=True)
        grads = anyflash.attention_varlen_backward(x[3], *x[:3], out, lse, *packing, causal=True)
        return [out, lse, *grads[:3]]

    def fill_cache(self) -> None:
        """A paged cache for some sequences, at first empty."""
        batch, pages, size = 3, 16, 16
        self.cache = {
            "k": np.zeros((batch * pages, size, 2, 64), np.float32),
            "v": np.zeros((batch * pages, size, 2, 64), np.float32),
            "table": self.random.permutation(batch * pages).astype(np.int32).reshape(batch, pages),
            "lengths": np.zeros(batch, np.int32),
            "capacity": pages * size,
        }

    def generate(self) -> list[Array]:
        """A prompt or a token for every sequence; a full cache begins anew."""
        cache = self.cache
        new = self.one_of(1, 1, 1, 5, 33)
        if cache["lengths"].max() + new > cache["capacity"]:
            self.fill_cache()
            cache = self.cache
        angles = np.arange(cache["capacity"])[:, None] * 100.0 ** -(np.arange(16) / 16)
        out, lse = anyflash.attention_with_kvcache(
            self.array(3, new, 4, 64),
            cache["k"],
            cache["v"],
            self.array(3, new, 2, 64),
            self.array(3, new, 2, 64),
            cache_seqlens=cache["lengths"],
            block_table=cache["table"],
            rotary_cos=np.cos(angles).astype(np.float32),
            rotary_sin=np.sin(angles).astype(np.float32),
            causal=True,
            return_lse=True,
            num_splits=self.one_of(0, 1, 3),
        )
        cache["lengths"] += new
        return [out, lse, cache["k"], cache["v"]]

    def refused(self) -> list[Array]:
        """A call that fails must leave nothing behind, neither memory nor bits."""
        q = self.array(1, 8, 3, 16)
        out = np.zeros_like(q)
        try:
            anyflash.attention(q, q[:, :, :2], q[:, :, :2], out=out)
        except ValueError:
            return [out]
        raise AssertionError("3 heads on 2 are accepted")

    def step(self) -> str:
        kinds = (self.train, self.train, self.train_packed, self.generate, self.generate)
        results = self.one_of(*kinds, self.refused)()
        digest = hashlib.blake2b(digest_size=16)
        for x in results:
            digest.update(np.ascontiguousarray(x).view(np.uint8).tobytes() if x.size else b"-")
        return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    # However little there is to do, it is done by all threads.
    importlib.import_module("anyflash._core").set_work_per_thread(1)
    steps = Steps(arguments.seed)
    for _ in range(arguments.steps):
        print(steps.step(), memory(), flush=True)


if __name__ == "__main__":
    main()
