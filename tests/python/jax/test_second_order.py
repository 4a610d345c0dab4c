"""anyflash.jax: gradients of gradients, against difference quotients of the gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import anyflash.jax
from calls.jax_calls import narrow, x64

__all__ = ["narrow"]


def check_second_order(attend: Any, floats: dict[str, Any]) -> None:
    """The derivative of all gradients along one direction, against a difference quotient."""
    random = np.random.default_rng(1)

    def like(tree: Any) -> Any:
        return jax.tree.map(lambda x: random.standard_normal(x.shape).astype(x.dtype), tree)

    weights, along, across = like(jax.eval_shape(attend, floats)), like(floats), like(floats)

    @jax.jit
    def gradients(floats: Any) -> Any:
        return jax.vjp(attend, floats)[1](weights)[0]

    def dot(a: Any, b: Any) -> float:
        return sum(float((a[name] * b[name]).sum()) for name in floats)

    second = jax.jit(lambda x: jax.vjp(gradients, x)[1](across)[0])(floats)
    step = 1e-3
    after, before = (
        gradients({name: x + sign * step * along[name] for name, x in floats.items()})
        for sign in (1, -1)
    )
    quotient = (dot(after, across) - dot(before, across)) / (2 * step)
    assert abs(dot(second, along) - quotient) < 1e-3 * max(1, abs(quotient))


@x64(True)
def test_gradients_of_gradients() -> None:
    make = np.random.default_rng(0).standard_normal
    options = {
        "causal": True,
        "softcap": 2.0,
        "window_size": (4, 0),
        "seqused_k": np.array([6, 3], np.int32),
        "block_mask": np.ones((1, 1, 1, 1), bool),
        "key_ranges": np.array([[[[0, 4]] * 6, [[1, 5]] * 6]], np.int32),
        "dropout_p": 0.3,
        "seed": 3,
        "return_lse": True,
    }
    floats = {
        **{"q": make((2, 5, 4, 3)), "k": make((2, 6, 2, 3)), "v": make((2, 6, 2, 2))},
        **{"bias": make((4, 1, 6)), "sinks": make(4), "alibi_slopes": make((2, 4))},
    }
    check_second_order(lambda floats: anyflash.jax.attention(**floats, **options), floats)


KEEP = np.random.default_rng(3).random((2, 1, 5, 6)) < 0.6
KEEP[1, 0, 2] = False  # sees no key
RANGES = np.random.default_rng(1).integers(-2, 7, (2, 1, 6, 4), np.int32)
SECOND: dict[str, tuple[dict[str, Any], int, int]] = {
    "keep": ({"bias": KEEP, "softmax_scale": 0.6, "window_size": (3, 2)}, 5, 6),
    "bias-inf": ({"bias": np.where(KEEP, 0.5, -np.inf)}, 5, 6),
    "blocks": ({"block_mask": np.eye(2, dtype=bool), "block_size": (64, 128)}, 70, 140),
    "ranges": ({"key_ranges": RANGES}, 5, 6),
}


@pytest.mark.parametrize(("options", "rows", "columns"), SECOND.values(), ids=SECOND)
@x64(True)
def test_masks_in_gradients_of_gradients(options: Any, rows: int, columns: int) -> None:
    make = np.random.default_rng(0).standard_normal
    floats = {"q": make((2, rows, 2, 3)), "k": make((2, columns, 1, 3))}
    floats["v"] = make((2, columns, 1, 2))
    attend = functools.partial(anyflash.jax.attention, **options, return_lse=True)
    check_second_order(lambda floats: attend(**floats), floats)


@x64(True)
def test_packed_gradients_of_gradients() -> None:
    make = np.random.default_rng(0).standard_normal
    options = {
        **{"cu_seqlens_q": np.array([0, 2, 2, 7], np.int32), "max_seqlen_q": 5},
        **{"cu_seqlens_k": np.array([0, 3, 4, 9], np.int32), "max_seqlen_k": 5},
        **{"seqused_k": np.array([3, 1, 4], np.int32), "dropout_p": 0.3, "seed": 3},
        "key_ranges": np.tile(np.array([[0, 4], [1, 5], [3, 0]], np.int32), (1, 3, 1)),
    }
    floats = {
        **{"q": make((7, 2, 3)), "k": make((9, 1, 3)), "v": make((9, 1, 2))},
        **{"bias": make((3, 2, 5, 5)), "alibi_slopes": make((3, 2))},
    }
    check_second_order(lambda floats: anyflash.jax.attention_varlen(**floats, **options), floats)
