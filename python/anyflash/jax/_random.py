"""Dropout's random state as JAX has it: four words of 32 bits, since 64 bits are off by default."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anyflash._call import parsing

_MASK = 0xFFFFFFFF


def words_of(seed: Any, rng_state: Any) -> Any:
    """(4,) uint32: the words of seed and offset, low ones first. What is wrong with the argument is
    raised without its name."""
    if rng_state is not None:
        return _words_of_state(rng_state)
    if isinstance(seed, numbers.Integral):
        return _constant(parsing.seed(seed), 0)
    if not hasattr(seed, "dtype") or not hasattr(seed, "shape"):
        parsing.seed(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return _words_of_key(jax.random.key_data(seed) if seed.shape == () else seed)
    if seed.dtype == jnp.uint32 and seed.shape == (2,):
        return _words_of_key(seed)
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(
            f"is {seed.dtype.name} of shape {tuple(seed.shape)}; an int, an integer array of shape "
            "() or a key of jax.random is allowed"
        )
    wide = seed.astype(jnp.uint32)
    high = jnp.uint32(0)
    if seed.dtype.itemsize == 8:
        high = (seed >> 32).astype(jnp.uint32)
    return jnp.stack([wide, high, jnp.uint32(0), jnp.uint32(0)])


def _constant(seed: int, offset: int) -> Any:
    words = (seed & _MASK, seed >> 32, offset & _MASK, offset >> 32)
    return jnp.asarray(np.array(words, np.uint32))


def _words_of_key(data: Any) -> Any:
    """key(7) is seed 7."""
    if data.shape != (2,):
        raise ValueError(
            f"is a key of {data.size} words; a key of jax.random of 2 words (threefry2x32, JAX's "
            "default), or an int, is allowed"
        )
    return jnp.concatenate([data[::-1], jnp.zeros(2, jnp.uint32)])


def _words_of_state(state: Any) -> Any:
    if isinstance(state, (tuple, list)):
        return _constant(*parsing.rng_pair(state))
    kind = (getattr(getattr(state, "dtype", None), "name", ""), tuple(getattr(state, "shape", ())))
    if kind == ("uint32", (4,)):
        return jnp.asarray(state)
    if kind in (("int64", (2,)), ("uint64", (2,))):
        if isinstance(state, np.ndarray):
            return jnp.asarray(state.view(np.uint32))
        return jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(4)
    raise TypeError(
        f"is {kind[0] or type(state).__name__} of shape {kind[1]}; a pair (seed, offset) of int, "
        "the rng_state of a result, uint32 (4,), or int64 or uint64 (2,) is allowed"
    )
