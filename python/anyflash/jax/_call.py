"""Reading a call's arguments: arrays by name, and everything else as static settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from anyflash._arrays.base import FLOATS
from anyflash._call import parsing
from anyflash._call.options import AttentionOptions, OutputRequest, Packing
from anyflash._call.results import AttentionResult, Returned
from anyflash.jax import _ffi, _random
from anyflash.jax._ffi import Arrays
from anyflash.jax._operations import FLOAT32, Settings, attend, forward_results

_T = TypeVar("_T")
_REFUSALS = (TypeError, ValueError)


def converted(x: Any) -> jax.Array:
    """What is wrong with x is raised without its name."""
    if isinstance(x, jax.Array):  # else JAX 0.6 moves what is mapped and sharded by its type
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        dtype = getattr(x, "dtype", None)
        what = type(x).__name__ + (f" of {dtype}" if dtype is not None else "")
        raise TypeError(f"is {what}; what jax.numpy.asarray takes is allowed") from None


class Call:
    """Every error begins with the operation's and an argument's names."""

    def __init__(self, operation: str, **arrays: Any) -> None:
        self.operation = operation
        self.arrays: Arrays = {}
        self.numbers: dict[str, Any] = {}
        for name, x in arrays.items():
            self.array(name, x)

    def array(self, name: str, x: Any, rank: int = 0, argument: str = "") -> None:
        """Missing leading axes are added up to ``rank``. ``argument``: its name in errors, where
        the core has another."""
        if x is None:
            return
        argument = argument or name
        if isinstance(x, type) or not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"{self.operation}: {argument} is {type(x).__name__}; an array of JAX or NumPy is "
                "allowed"
            )
        x = self.parse(argument, converted, x)
        self.arrays[name] = x.reshape((1,) * (rank - x.ndim) + x.shape)

    def parse(self, name: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """function(*arguments), its errors with the names in front."""
        try:
            return function(*arguments)
        except _REFUSALS as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.operation}: {name} {error}") from None

    def scores(self, options: AttentionOptions) -> None:
        """How scores are made, and which are hidden."""
        numbers, parse = self.numbers, self.parse
        if options.softmax_scale is not None:
            numbers["softmax_scale"] = parse("softmax_scale", parsing.scale, options.softmax_scale)
        (numbers["causal"],) = parsing.flags(self.operation, causal=options.causal)
        left, right = parse("window_size", parsing.window, options.window_size)
        numbers |= {"window_left": left, "window_right": right}
        numbers["softcap"] = parse("softcap", parsing.softcap, options.softcap)
        self.array("alibi_slopes", options.alibi_slopes)
        self.array("sinks", options.sinks)
        self.array("bias", options.bias, 4)
        self.array("block_mask", options.block_mask, 4)
        if options.block_mask is not None:
            rows, columns = parse("block_size", parsing.block_size, options.block_size)
            numbers |= {"block_size_q": rows, "block_size_k": columns}
        self.array("key_ranges", options.key_ranges)
        self.array("seqused_k", options.seqused_k)

    def dropout(self, options: AttentionOptions) -> None:
        seed, rng_state = options.seed, options.rng_state
        p = self.parse("dropout_p", parsing.probability, options.dropout_p)
        if seed is not None and rng_state is not None:
            raise ValueError(
                f"{self.operation}: seed and rng_state are both given; one of them is allowed"
            )
        if p == 0:
            return
        if seed is None and rng_state is None:
            raise ValueError(
                f"{self.operation}: dropout_p needs a seed: JAX has no global random state to draw "
                "one from; pass seed=<int or key of jax.random>, or rng_state"
            )
        self.numbers["dropout_p"] = p
        name = "seed" if rng_state is None else "rng_state"
        self.arrays["rng_state"] = self.parse(name, _random.words_of, seed, rng_state)

    def pack(self, packing: Packing) -> None:
        """q, k and v hold packed sequences."""
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given = getattr(packing, name)
            if given is None:
                raise TypeError(f"{self.operation}: {name} is None; an array of int32 is allowed")
            self.array(name, given)
        shape = tuple(self.arrays["cu_seqlens_q"].shape)
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"{self.operation}: cu_seqlens_q has shape {shape}; expected (batch + 1,)"
            )
        for name in ("max_seqlen_q", "max_seqlen_k"):
            self.numbers[name] = self.parse(name, parsing.length, getattr(packing, name))
        (self.numbers["validate"],) = parsing.flags(self.operation, validate=packing.validate)

    def check_rank(self, names: tuple[str, ...], rank: int, layout: str) -> None:
        for name in names:
            if name not in self.arrays:
                raise TypeError(f"{self.operation}: {name} is None; expected {layout}")
            shape = tuple(self.arrays[name].shape)
            if len(shape) != rank:
                raise ValueError(
                    f"{self.operation}: {name} has {len(shape)} dimensions, shape {shape}; "
                    f"expected {rank}: {layout}"
                )

    def settings(
        self,
        results: tuple[str, ...],
        lengths: tuple[Any, Any],
        out_dtype: Any,
        deterministic: Any,
    ) -> Settings:
        (deterministic,) = parsing.flags(self.operation, deterministic=deterministic)
        dtype = self.arrays["q"].dtype.name
        if out_dtype is not None:
            allowed = tuple(dict.fromkeys((dtype, FLOAT32)))
            dtype = self.parse("out_dtype", parsing.dtype, out_dtype, allowed)
        return Settings(
            self.operation,
            tuple(self.numbers.items()),
            results,
            dtype,
            lengths,
            deterministic,
        )

    def run(self, outputs: OutputRequest, deterministic: Any = False) -> Returned[jax.Array]:
        return_lse, return_max_logits, return_dropout_mask, return_result = parsing.flag_values(
            self.operation, OutputRequest._fields[:4], outputs[:4]
        )
        whole = return_result or return_max_logits or return_dropout_mask
        asked = {
            "out": True,
            "lse": return_lse or whole,
            "max_logits": return_max_logits,
            "dropout_mask": return_dropout_mask,
        }
        names = tuple(name for name, wanted in asked.items() if wanted)
        if "cu_seqlens_q" in self.arrays:
            self.check_rank(("q", "k", "v"), 3, "(total_tokens, heads, head_dim)")
            lengths = (self.numbers["max_seqlen_q"], self.numbers["max_seqlen_k"])
        else:
            self.check_rank(("q", "k", "v"), 4, "(batch, seqlen, heads, head_dim)")
            lengths = (self.arrays["q"].shape[1], self.arrays["k"].shape[1])
        settings = self.settings(names, lengths, outputs.out_dtype, deterministic)
        shapes = forward_results(settings, names, self.arrays)
        _ffi.check(self.operation, "forward", self.arrays | shapes, settings.numbers)

        arrays = _ffi.vary_alike(self.arrays)
        differentiable = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
        floats = {
            name: arrays.pop(name)
            for name in differentiable
            if name in arrays and arrays[name].dtype.name in FLOATS
        }
        results = attend(settings, floats, arrays)
        if not whole:
            out: jax.Array = results["out"]
            return (out, results["lse"]) if return_lse else out
        for name in set(results) & {"max_logits", "dropout_mask"}:
            results[name] = jax.lax.stop_gradient(results[name])
        return AttentionResult(
            results["out"],
            results["lse"],
            results.get("max_logits"),
            arrays.get("rng_state"),
            results.get("dropout_mask"),
        )
