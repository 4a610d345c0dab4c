"""Random steps of training and of generation, one after the other in one process.

    python tests/soak/random_steps.py --seed S --steps N [--device cuda]

Prints a line for each step: its digest of every bit that it computed, and the process's memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import anyflash

Array = Any


@dataclass(frozen=True)
class Cpu:
    """Where the arrays lie, and what is drawn for them."""

    dtypes: tuple[Any, ...] = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
    cache_dtype: Any = np.float32
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (32, 32), (24, 40), (128, 128), (80, 16))
    longest: int = 200
    deterministic: bool = False  # results on the CPU are, whatever is asked for

    def put(self, x: Array) -> Array:
        return x

    def bits(self, x: Array) -> bytes:
        return np.ascontiguousarray(x).view(np.uint8).tobytes() if x.size else b"-"

    def memory(self) -> int:
        """Bytes that are resident."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Gpu(Cpu):
    """In PyTorch's memory, by kernels that every set has: bfloat16, head dims up to 64."""

    dtypes: tuple[Any, ...] = (ml_dtypes.bfloat16,)
    cache_dtype: Any = ml_dtypes.bfloat16
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (32, 32), (24, 40), (64, 16))
    longest: int = 700
    deterministic: bool = True
    device: str = "cuda"  # the tests have no GPU, and put the tensors elsewhere

    def put(self, x: Array) -> Array:
        torch: Any = importlib.import_module("torch")
        x = np.ascontiguousarray(x)
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(x).to(self.device)

    def bits(self, x: Array) -> bytes:
        torch: Any = importlib.import_module("torch")
        flat = x.detach().contiguous().reshape(-1)
        return flat.view(torch.uint8).cpu().numpy().tobytes() if x.numel() else b"-"

    def memory(self) -> int:
        """And what PyTorch has taken of the GPU's."""
        torch: Any = importlib.import_module("torch")
        return super().memory() + int(torch.cuda.memory_reserved())


DEVICES = {"cpu": Cpu(), "cuda": Gpu()}


class Steps:
    def __init__(self, seed: int, device: Cpu = DEVICES["cpu"]) -> None:
        self.random = np.random.default_rng(seed)
        self.device = device
        self.cache: dict[str, Any] = {}
        self.fill_cache()

    def array(self, *shape: int, dtype: Any = np.float32) -> Array:
        return self.device.put(self.random.standard_normal(shape).astype(dtype))

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
                "block_mask": self.device.put(
                    self.random.random((batch, 1, -(-rows // 64), -(-keys // 64))) < 0.7
                ),
                "block_size": (64, 64),
            },
            "ranges": lambda: {
                "key_ranges": self.device.put(
                    self.random.integers(-9, rows + 9, (batch, 1, keys, 4), np.int32)
                )
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
        rows, keys = (int(n) for n in self.random.integers(1, self.device.longest, 2))
        d, dv = self.one_of(*self.device.head_dims)
        dtype = self.one_of(*self.device.dtypes)
        q = self.array(batch, rows, heads, d, dtype=dtype)
        k = self.array(batch, keys, heads_k, d, dtype=dtype)
        v = self.array(batch, keys, heads_k, dv, dtype=dtype)
        options = self.options(batch, rows, keys, heads, dtype)
        out, lse = anyflash.attention(q, k, v, return_lse=True, **options)
        dout = self.array(*out.shape, dtype=dtype)
        wanted = {
            f"return_d{name}": True for name in ("bias", "sinks", "alibi_slopes") if name in options
        }
        wanted["deterministic"] = self.device.deterministic
        grads = anyflash.attention_backward(dout, q, k, v, out, lse, **options, **wanted)
        return [out, lse, *(x for x in grads if x is not None)]

    def train_packed(self) -> list[Array]:
        lengths = self.random.integers(0, 60, int(self.random.integers(1, 8)))
        total, longest = int(lengths.sum()), max(int(lengths.max()), 1)
        ends = self.device.put(np.cumsum([0, *lengths]).astype(np.int32))
        x = [self.array(total, 2, 32, dtype=self.device.cache_dtype) for _ in range(4)]
        packing = (ends, ends, longest, longest)
        out, lse = anyflash.attention_varlen(*x[:3], *packing, causal=True, return_lse=True)
        options = {"causal": True, "deterministic": self.device.deterministic}
        grads = anyflash.attention_varlen_backward(x[3], *x[:3], out, lse, *packing, **options)
        return [out, lse, *grads[:3]]

    def fill_cache(self) -> None:
        """A paged cache for some sequences, at first empty."""
        batch, pages, size = 3, 16, 16
        empty = np.zeros((batch * pages, size, 2, 64), self.device.cache_dtype)
        table = self.random.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
        self.cache = {
            "k": self.device.put(empty.copy()),
            "v": self.device.put(empty.copy()),
            "table": self.device.put(table),
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
        dtype = self.device.cache_dtype
        angles = np.arange(cache["capacity"])[:, None] * 100.0 ** -(np.arange(16) / 16)
        out, lse = anyflash.attention_with_kvcache(
            self.array(3, new, 4, 64, dtype=dtype),
            cache["k"],
            cache["v"],
            self.array(3, new, 2, 64, dtype=dtype),
            self.array(3, new, 2, 64, dtype=dtype),
            cache_seqlens=self.device.put(cache["lengths"].copy()),
            block_table=cache["table"],
            rotary_cos=self.device.put(np.cos(angles).astype(np.float32)),
            rotary_sin=self.device.put(np.sin(angles).astype(np.float32)),
            causal=True,
            return_lse=True,
            num_splits=self.one_of(0, 1, 3),
        )
        cache["lengths"] += new
        return [out, lse, cache["k"], cache["v"]]

    def refused(self) -> list[Array]:
        """A call that fails must leave nothing behind, neither memory nor bits."""
        q = self.array(1, 8, 3, 16, dtype=self.device.cache_dtype)
        out = self.device.put(np.zeros((1, 8, 3, 16), self.device.cache_dtype))
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
            digest.update(self.device.bits(x))
        return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    arguments = parser.parse_args()
    # However little there is to do, it is done by all threads.
    importlib.import_module("anyflash._core").set_work_per_thread(1)
    device = DEVICES[arguments.device]
    steps = Steps(arguments.seed, device)
    for _ in range(arguments.steps):
        print(steps.step(), device.memory(), flush=True)


if __name__ == "__main__":
    main()
