"""Random steps of training and of generation, one after the other in one process.

    python tests/soak/random_steps.py --seed S --steps N [--device cuda]

Prints a line for each step: its digest of every bit that it computed, and the process's memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (32, 32), (24, 40), (128, 128), (80, 16))
    cache_dtypes: tuple[Any, ...] = (np.float32,)
    cache_dims: tuple[int, ...] = (64,)
    longest: int = 200
    deterministic: bool = False  # results on the CPU are, whatever is asked for
    # The widest heads of kernels with all features, by dtype; absent: any.
    featured: Mapping[str, int] = field(default_factory=dict)

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
    """In PyTorch's memory, in both dtypes of tensor cores."""

    dtypes: tuple[Any, ...] = (ml_dtypes.bfloat16, np.float16)
    head_dims: tuple[tuple[int, int], ...] = (
        *((64, 64), (32, 32), (24, 40), (64, 16)),
        *((96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    )
    cache_dtypes: tuple[Any, ...] = dtypes
    cache_dims: tuple[int, ...] = (64, 96, 128, 192, 256)
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
FEATURES = {"softcap", "alibi", "bias", "block_mask", "key_ranges", "dropout"}


def of_build(gpu: Gpu, kernels: Sequence[Mapping[str, Any]]) -> Gpu:
    """Without what a build of few kernels has none for. `kernels` are build_info's."""

    def widest(dtype: Any, op: str, features: Collection[str] = (), block_m: int = 0) -> int:
        return max(
            (
                int(kernel["head_dim"])
                for kernel in kernels
                if (kernel["arch"], kernel["op"]) == ("sm80", op)
                and kernel["dtype"] == np.dtype(dtype).name
                and set(kernel["features"]) >= set(features)
                and block_m in (0, kernel["block_m"])
            ),
            default=0,
        )

    def trained(dtype: Any, features: Collection[str] = ()) -> int:
        return min(widest(dtype, op, features) for op in ("forward", "backward"))

    dtypes = tuple(x for x in gpu.dtypes if trained(x) >= 64)
    if not dtypes:
        raise SystemExit("this build has no kernels for GPUs")
    dim = min(map(trained, dtypes))
    cached = min(widest(x, "decode", block_m=m) for x in dtypes for m in (16, 32, 64))
    return replace(
        gpu,
        dtypes=dtypes,
        cache_dtypes=dtypes,
        head_dims=tuple(dims for dims in gpu.head_dims if max(dims) <= dim),
        cache_dims=tuple(d for d in gpu.cache_dims if d <= cached),
        featured={np.dtype(x).name: trained(x, FEATURES) for x in dtypes},
    )


class Steps:
    def __init__(self, seed: int, device: Cpu = DEVICES["cpu"]) -> None:
        self.random = np.random.default_rng(seed)
        self.device = device
        self.cache: dict[str, Any] = {}
        self.caches = 0
        self.fill_cache()

    def array(self, *shape: int, dtype: Any = np.float32) -> Array:
        return self.device.put(self.random.standard_normal(shape).astype(dtype))

    def one_of(self, *values: Any) -> Any:
        return values[self.random.integers(len(values))]

    def options(self, sizes: tuple[int, int, int, int], dtype: Any, plain: bool) -> dict[str, Any]:
        """Each feature in one step of four; `plain`: those that every kernel has. `sizes` are
        batch, heads, queries and keys."""
        batch, heads, rows, keys = sizes
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
        if plain:
            drawn = {name: drawn[name] for name in ("causal", "window", "sinks")}
        chosen = {name: make() for name, make in drawn.items() if self.random.random() < 0.25}
        return {name: value for part in chosen.values() for name, value in part.items()}

    def heads(self) -> tuple[int, int, Any, int, int]:
        """(d, dv, dtype, heads, heads_k). Of wide heads there are few, so that such a step takes
        about as long as others."""
        d, dv = self.one_of(*self.device.head_dims)
        heads_k = 1 if d > 64 else int(self.random.integers(1, 3))
        heads = heads_k * int(self.random.integers(1, 3 if d > 64 else 4))
        return d, dv, self.one_of(*self.device.dtypes), heads, heads_k

    def train(self) -> list[Array]:
        """Forward and backward of one random problem. Half of them are for the plain kernels, which
        a GPU has its fastest for."""
        d, dv, dtype, heads, heads_k = self.heads()
        batch = 1 if d > 64 else int(self.random.integers(1, 4))
        rows, keys = (int(n) for n in self.random.integers(1, self.device.longest, 2))
        q = self.array(batch, rows, heads, d, dtype=dtype)
        k = self.array(batch, keys, heads_k, d, dtype=dtype)
        v = self.array(batch, keys, heads_k, dv, dtype=dtype)
        name = np.dtype(dtype).name
        plain = self.random.random() < 0.5 or max(d, dv) > self.device.featured.get(name, d + dv)
        options = self.options((batch, heads, rows, keys), dtype, plain)
        out, lse = anyflash.attention(q, k, v, return_lse=True, **options)
        dout = self.array(*out.shape, dtype=dtype)
        wanted = {
            f"return_d{name}": True for name in ("bias", "sinks", "alibi_slopes") if name in options
        }
        wanted["deterministic"] = self.device.deterministic
        grads = anyflash.attention_backward(dout, q, k, v, out, lse, **options, **wanted)
        return [out, lse, *(x for x in grads if x is not None)]

    def train_packed(self) -> list[Array]:
        most = self.device.longest // 3
        lengths = self.random.integers(0, most, int(self.random.integers(1, 8)))
        total, longest = int(lengths.sum()), max(int(lengths.max()), 1)
        ends = self.device.put(np.cumsum([0, *lengths]).astype(np.int32))
        d, dv, dtype, heads, heads_k = self.heads()
        x = [
            self.array(total, n, columns, dtype=dtype)
            for n, columns in ((heads, d), (heads_k, d), (heads_k, dv), (heads, dv))
        ]
        packing = (ends, ends, longest, longest)
        out, lse = anyflash.attention_varlen(*x[:3], *packing, causal=True, return_lse=True)
        options = {"causal": True, "deterministic": self.device.deterministic}
        grads = anyflash.attention_varlen_backward(x[3], *x[:3], out, lse, *packing, **options)
        return [out, lse, *grads[:3]]

    def fill_cache(self) -> None:
        """A paged cache for some sequences, at first empty; head dims and dtypes take turns."""
        batch, pages, size = 3, 16, 16
        dims, dtypes = self.device.cache_dims, self.device.cache_dtypes
        d, dtype = dims[self.caches % len(dims)], dtypes[self.caches // len(dims) % len(dtypes)]
        self.caches += 1
        empty = np.zeros((batch * pages, size, 1 if d > 64 else 2, d), dtype)
        table = self.random.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
        self.cache = {
            "k": self.device.put(empty.copy()),
            "v": self.device.put(empty.copy()),
            "table": self.device.put(table),
            "lengths": np.zeros(batch, np.int32),
            "capacity": pages * size,
            "dtype": dtype,
        }

    def generate(self) -> list[Array]:
        """A prompt or a token for every sequence; a full cache begins anew."""
        cache = self.cache
        new = self.one_of(1, 1, 1, 5, 33)
        if cache["lengths"].max() + new > cache["capacity"]:
            self.fill_cache()
            cache = self.cache
        dtype, (heads_k, d) = cache["dtype"], cache["k"].shape[2:]
        angles = np.arange(cache["capacity"])[:, None] * 100.0 ** -(np.arange(16) / 16)
        out, lse = anyflash.attention_with_kvcache(
            self.array(3, new, 2 * heads_k, d, dtype=dtype),
            cache["k"],
            cache["v"],
            self.array(3, new, heads_k, d, dtype=dtype),
            self.array(3, new, heads_k, d, dtype=dtype),
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
        dtype = self.one_of(*self.device.cache_dtypes)
        q = self.array(1, 8, 3, 16, dtype=dtype)
        out = self.device.put(np.zeros((1, 8, 3, 16), dtype))
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
    if isinstance(device, Gpu):
        device = of_build(device, anyflash.build_info()["kernels"])
    steps = Steps(arguments.seed, device)
    for _ in range(arguments.steps):
        print(steps.step(), device.memory(), flush=True)


if __name__ == "__main__":
    main()
