"""What type checkers see of the public functions: lint.py has mypy read it, and nothing runs it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import assert_type

import anyflash
import anyflash.jax
import anyflash.torch
from anyflash import AttentionGrads, AttentionResult

X = npt.NDArray[np.float32]


def dense(x: X, t: Tensor, is_wanted: bool) -> None:
    assert_type(anyflash.attention(x, x, x), X)
    assert_type(anyflash.attention(t, t, t, causal=True, softcap=3.0, bias=t), Tensor)
    assert_type(anyflash.attention(x, x, x, out=x, stream=0), X)
    assert_type(anyflash.attention(x, x, x, return_lse=True), tuple[X, X])
    assert_type(anyflash.attention(t, t, t, return_result=True), AttentionResult[Tensor])
    assert_type(anyflash.attention(t, t, t, return_max_logits=True), AttentionResult[Tensor])
    result = anyflash.attention(t, t, t, return_lse=True, return_dropout_mask=True)
    assert_type(result, AttentionResult[Tensor])
    assert_type(result.dropout_mask, Tensor | None)
    assert_type(
        anyflash.attention(x, x, x, return_lse=is_wanted),
        X | tuple[X, X] | AttentionResult[X],
    )
    anyflash.attention(x, x, x, softcup=3.0)  # type: ignore[call-overload]
    anyflash.attention(x, x, x, softcap="3")  # type: ignore[call-overload]
    anyflash.attention(x, x)  # type: ignore[call-overload]


def packed(x: X, ends: npt.NDArray[np.int32], t: Tensor) -> None:
    assert_type(anyflash.attention_varlen(x, x, x, ends, ends, 3, 3, validate=True), X)
    assert_type(anyflash.attention_varlen(x, x, x, ends, ends, 3, 3, return_lse=True), tuple[X, X])
    assert_type(
        anyflash.attention_varlen(x, x, x, ends, ends, 3, 3, return_result=True),
        AttentionResult[X],
    )
    assert_type(anyflash.torch.attention_varlen(t, t, t, t, t, 3, 3, deterministic=True), Tensor)
    assert_type(
        anyflash.torch.attention_varlen(t, t, t, t, t, 3, 3, return_lse=True),
        tuple[Tensor, Tensor],
    )
    anyflash.attention_varlen(x, x, x, ends, ends, 3)  # type: ignore[call-overload]


def backward(x: X, ends: npt.NDArray[np.int32]) -> None:
    grads = anyflash.attention_backward(x, x, x, x, x, x)
    assert_type(grads, AttentionGrads[X])
    assert_type(grads.dq, X)
    assert_type(grads.dbias, X | None)
    packing = ends, ends, 3, 3
    assert_type(anyflash.attention_varlen_backward(x, x, x, x, x, x, *packing), AttentionGrads[X])


def kvcache(x: X, t: Tensor, a: jax.Array, is_wanted: bool) -> None:
    assert_type(anyflash.attention_with_kvcache(x, x, x, cache_seqlens=3), X)
    assert_type(anyflash.attention_with_kvcache(x, x, x, return_lse=True), tuple[X, X])
    assert_type(anyflash.attention_with_kvcache(x, x, x, return_lse=is_wanted), X | tuple[X, X])
    assert_type(anyflash.torch.attention_with_kvcache(t, t, t, t, t), Tensor)
    assert_type(
        anyflash.torch.attention_with_kvcache(t, t, t, return_lse=True), tuple[Tensor, Tensor]
    )
    step = anyflash.jax.attention_with_kvcache
    assert_type(step(a, a, a), jax.Array)
    assert_type(step(a, a, a, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(step(a, a, a, a, a), tuple[jax.Array, jax.Array, jax.Array])
    assert_type(
        step(a, a, a, a, a, return_lse=True), tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    )
    assert_type(step(a, a, None, head_dim_v=3), jax.Array)
    assert_type(step(a, a, None, head_dim_v=3, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(step(a, a, None, a, head_dim_v=3), tuple[jax.Array, jax.Array])
    assert_type(
        step(a, a, None, a, head_dim_v=3, return_lse=True),
        tuple[jax.Array, jax.Array, jax.Array],
    )
    assert_type(anyflash.attention_with_kvcache(x, x, None, x, head_dim_v=3), X)
    assert_type(anyflash.torch.attention_with_kvcache(t, t, None, t, head_dim_v=3), Tensor)
    assert_type(anyflash.kvcache_workspace_size(x, x, x, cache_seqlens=3), int)


def torch(t: Tensor) -> None:
    assert_type(anyflash.torch.attention(t, t, t, deterministic=True, sinks=t), Tensor)
    assert_type(anyflash.torch.attention(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(anyflash.torch.attention(t, t, t, return_result=True), AttentionResult[Tensor])
    assert_type(anyflash.torch.scaled_dot_product_attention(t, t, t), Tensor)
    anyflash.torch.attention(t, t, t, bias=3.0)  # type: ignore[call-overload]
    anyflash.torch.attention(t, t, t, out=t)  # type: ignore[call-overload]


def of_jax(a: jax.Array, x: X) -> None:
    assert_type(anyflash.jax.attention(a, a, a, seed=jax.random.key(0)), jax.Array)
    assert_type(anyflash.jax.attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])
    assert_type(anyflash.jax.attention(a, a, a, return_result=True), AttentionResult[jax.Array])
    assert_type(anyflash.jax.attention_varlen(a, a, a, a, a, 3, 3), jax.Array)


def others(x: X, t: Tensor, predicate: Any) -> None:
    assert_type(anyflash.merge_states(x, x, x, x), tuple[X, X])
    mask = anyflash.create_block_mask(predicate, None, None, 512, 512)
    assert_type(mask, npt.NDArray[np.bool_])
    assert_type(anyflash.create_block_mask(predicate, 1, 1, 512, 512, like=t), Tensor)
    assert_type(anyflash.expand_block_mask(mask, 512, 512), npt.NDArray[np.bool_])
