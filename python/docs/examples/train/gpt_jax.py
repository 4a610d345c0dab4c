"""The same GPT in plain JAX: parameters are a dict of arrays, a step is one jitted function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from config import INITIAL_STD, Config, Setup, last_std
from data import Tokens
from jax import Array
from loop import BETAS, MAX_NORM, State

import anyflash.jax

Parameters = dict[str, Array]
Attention = Callable[[Array, Array, Array], Array]

ATTENTION: dict[str, Attention] = {
    "anyflash": partial(anyflash.jax.attention, causal=True),
    "cudnn": partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
    "standard": partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
}


def gpu() -> str | None:
    """Its name; None where there is none that JAX can use."""
    try:
        return str(jax.devices("gpu")[0].device_kind)
    except RuntimeError:
        return None


def versions() -> dict[str, str]:
    """Of what JAX brings with it."""
    return {"backend": jax.devices("gpu")[0].client.platform_version} if gpu() else {}


def peak_memory(device: str) -> int | None:
    """In bytes, of arrays on the GPU until now; None on a CPU."""
    found = jax.devices("gpu")[0].memory_stats() if device == "cuda" else None
    return found["peak_bytes_in_use"] if found else None


def initial_parameters(config: Config, seed: int) -> Parameters:
    dim, last = config.dim, last_std(config)
    shapes = {"tokens": (config.vocab_size, dim), "places": (config.seqlen, dim)}
    for i in range(config.layers):
        shapes |= {
            f"{i}.qkv": (dim, 3 * dim),
            f"{i}.out": (dim, dim),
            f"{i}.up": (dim, 4 * dim),
            f"{i}.down": (4 * dim, dim),
        }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    parameters = {
        name: jax.random.normal(key, shape)
        * (last if name.endswith(("out", "down")) else INITIAL_STD)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    biases = {f"{name}.bias": jnp.zeros(shape[1]) for name, shape in shapes.items() if "." in name}
    names = ["norm", *(f"{i}.{norm}" for i in range(config.layers) for norm in ("norm1", "norm2"))]
    norms = {name: jnp.ones(dim) for name in names}
    return parameters | biases | norms | {f"{name}.bias": jnp.zeros(dim) for name in names}


def _norm(parameters: Parameters, name: str, x: Array) -> Array:
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * parameters[name] + parameters[f"{name}.bias"]


def _linear(parameters: Parameters, name: str, x: Array, dtype: jnp.dtype) -> Array:
    weight, bias = parameters[name].astype(dtype), parameters[f"{name}.bias"].astype(dtype)
    return x.astype(dtype) @ weight + bias


def _block(
    x: Array, parameters: Parameters, i: int, attend: Callable[[Array], Array], dtype: jnp.dtype
) -> Array:
    linear = partial(_linear, parameters, dtype=dtype)
    qkv = linear(f"{i}.qkv", _norm(parameters, f"{i}.norm1", x))
    x = x + linear(f"{i}.out", attend(qkv))
    hidden = jax.nn.gelu(linear(f"{i}.up", _norm(parameters, f"{i}.norm2", x)))
    return x + linear(f"{i}.down", hidden)


class Trainer:
    """See loop.Trainer."""

    def __init__(self, setup: Setup) -> None:
        self.config = setup.config
        self.attention = ATTENTION[setup.attention]
        self.device = jax.devices({"cuda": "gpu"}.get(setup.device, setup.device))[0]
        self.dtype = jnp.dtype(jnp.bfloat16 if self.device.platform == "gpu" else jnp.float32)
        self.recompute = setup.recompute
        model = jax.device_put(initial_parameters(setup.config, setup.seed), self.device)
        mean, square = (jax.tree.map(jnp.zeros_like, model) for _ in range(2))
        self.arrays = {"model": model, "mean": mean, "square": square}
        self.parameters = sum(x.size for x in model.values())
        self.steps = jnp.zeros((), jnp.int32)
        self._step = jax.jit(self._train_step, donate_argnums=0)

    def _attend(self, qkv: Array) -> Array:
        shape = (*qkv.shape[:2], self.config.heads, -1)
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        return self.attention(q, k, v).reshape(*shape[:2], self.config.dim)

    def _loss(self, parameters: Parameters, tokens: Array) -> Array:
        x = parameters["tokens"][tokens[:, :-1]] + parameters["places"][: tokens.shape[1] - 1]
        for i in range(self.config.layers):
            block = partial(_block, i=i, attend=self._attend, dtype=self.dtype)
            x = (jax.checkpoint(block) if self.recompute else block)(x, parameters)
        x = _norm(parameters, "norm", x).astype(self.dtype)
        logits = (x @ parameters["tokens"].T.astype(self.dtype)).astype(jnp.float32)  # tied
        wanted = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - wanted).mean()

    def _train_step(
        self, arrays: dict[str, Parameters], steps: Array, tokens: Array, lr: Array
    ) -> tuple[dict[str, Parameters], Array]:
        """AdamW (Loshchilov and Hutter) with PyTorch's defaults, gradients clipped to a norm."""
        loss, gradients = jax.value_and_grad(self._loss)(arrays["model"], tokens)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
        clip = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6))
        b1, b2 = BETAS
        new: dict[str, Parameters] = {"model": {}, "mean": {}, "square": {}}
        for name, gradient in gradients.items():
            g = gradient * clip
            mean = b1 * arrays["mean"][name] + (1 - b1) * g
            square = b2 * arrays["square"][name] + (1 - b2) * g * g
            change = mean / (1 - b1**steps) / (jnp.sqrt(square / (1 - b2**steps)) + 1e-8)
            new["mean"][name], new["square"][name] = mean, square
            new["model"][name] = arrays["model"][name] * (1 - 0.01 * lr) - lr * change
        return new, loss

    def step(self, batch: Tokens, lr: float) -> float:
        self.steps = self.steps + 1
        tokens = jax.device_put(batch.astype("int32"), self.device)
        self.arrays, loss = self._step(self.arrays, self.steps, tokens, jnp.float32(lr))
        return float(loss)

    def state(self) -> State:
        named = {f"{kind}/{name}": x for kind, xs in self.arrays.items() for name, x in xs.items()}
        return jax.device_get(named | {"steps": self.steps})

    def restore(self, state: State) -> None:
        for key, x in state.items():
            kind, _, name = key.partition("/")
            if kind == "steps":
                self.steps = jnp.asarray(x)
            else:
                self.arrays[kind] = self.arrays[kind] | {name: jax.device_put(x, self.device)}
