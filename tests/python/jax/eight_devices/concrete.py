"""Arrays of one CPU device each, by the functions that do the work at once."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import anyflash


def test_results_lie_where_q_lies() -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 8)).astype(np.float32)
    right, right_lse = anyflash.attention(x, x, x, return_lse=True)
    for device in jax.devices()[::3]:
        q = jax.device_put(x, device)
        out, lse = anyflash.attention(q, q, q, return_lse=True)
        grads = anyflash.attention_backward(out, q, q, q, out, lse)
        merged = anyflash.merge_states(out, lse, out, lse)
        decoded = anyflash.attention_with_kvcache(q[:, :1], q, q, cache_seqlens=3)
        for result in (out, lse, *grads[:3], *merged, decoded):
            assert result.devices() == {device}
        np.testing.assert_array_equal(out, right)
        np.testing.assert_array_equal(lse, right_lse)


def test_devices_do_not_mix() -> None:
    first, second = (jax.device_put(np.ones((1, 4, 2, 8), "f"), d) for d in jax.devices()[:2])
    message = "k is on cpu:1, but q is on cpu:0; all arrays must be on one device"
    with pytest.raises(ValueError, match=message):
        anyflash.attention(first, second, first)
    with pytest.raises(ValueError, match="bias is on cpu:0, but q is on cpu:1"):
        anyflash.attention(second, second, second, bias=first[0, :, :1])
