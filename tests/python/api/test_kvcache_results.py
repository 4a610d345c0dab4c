"""What attention_with_kvcache gives: results, workspace, errors about gradients; and uses of it."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

import anyflash
from calls.frameworks import EVERY_KIND, Kind, bits, close, random
from calls.kvcache import WRITABLE, Arguments, angles, attend, call, expected, verify

# Results and memory -------------------------------------------------------------------------------


@WRITABLE
def test_out(kind: Kind) -> None:
    arguments = call(page_size=4)
    right, _ = attend(arguments, kind)
    target = np.full_like(right, 7)
    given = kind.give(arguments | {"out": target})
    assert anyflash.attention_with_kvcache(**given) is given["out"]
    assert bits(target) == bits(right)
    out, lse = anyflash.attention_with_kvcache(**given, return_lse=True)
    assert out is given["out"]
    assert kind.take(lse).shape == (3, 4, 2)


def test_out_dtype() -> None:
    arguments = call(dtype="float16")
    out = anyflash.attention_with_kvcache(**arguments, out_dtype="float32")
    close(out, expected(arguments).out)
    rounded = anyflash.attention_with_kvcache(**arguments)
    assert bits(rounded) == bits(out.astype(np.float16))


def split_call() -> Arguments:
    """A call that needs workspace on every backend: partial results and a rotated q."""
    cos, sin = angles(400, 8)
    return {
        **{"q": random(2, 1, 4, 16), "k_cache": random(2, 400, 2, 16)},
        **{"v_cache": random(2, 400, 2, 16), "k": random(2, 1, 2, 16), "v": random(2, 1, 2, 16)},
        **{"cache_seqlens": np.array([390, 70], np.int32), "num_splits": 4},
        **{"rotary_cos": cos, "rotary_sin": sin},
    }


@WRITABLE
def test_workspace(kind: Kind) -> None:
    """It may begin anywhere, hold anything, and is not exceeded."""
    arguments = split_call()
    right, _ = attend(arguments, kind)
    size = anyflash.kvcache_workspace_size(**kind.give(arguments))
    assert type(size) is int
    assert size > 0
    for start in (0, 1, 100):
        memory = np.full(size + 200, 0xFF, np.uint8)
        part = kind.give(memory[start : start + size])
        out, _ = attend({**arguments, "workspace": part}, kind)
        assert bits(out) == bits(right)
        assert (memory[:start] == 0xFF).all()
        assert (memory[start + size :] == 0xFF).all()
        assert (memory != 0xFF).any(), "it was not used"


def test_workspace_size_counts_for_all_lengths() -> None:
    arguments = split_call()
    sizes = {
        anyflash.kvcache_workspace_size(**arguments | {"cache_seqlens": lengths})
        for lengths in (7, np.zeros(2, np.int32), np.array([399, 399], np.int32))
    }
    assert len(sizes) == 1


def test_workspace_size_takes_what_the_call_takes() -> None:
    arguments = split_call()
    q, k_cache, v_cache, k, v = (arguments.pop(n) for n in ("q", "k_cache", "v_cache", "k", "v"))
    before = bits(k_cache)
    size = anyflash.kvcache_workspace_size(
        q, k_cache, v_cache, k, v, **arguments, out=np.empty_like(q), return_lse=True
    )
    assert size == anyflash.kvcache_workspace_size(q, k_cache, v_cache, k, v, **arguments)
    assert bits(k_cache) == before
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        anyflash.kvcache_workspace_size(q, k_cache, v_cache, bias=None)


@EVERY_KIND
def test_empty_batch(kind: Kind) -> None:
    q, cache = np.ones((0, 1, 4, 16), np.float32), np.ones((0, 8, 2, 16), np.float32)
    for lengths in (0, np.zeros(0, np.int32)):
        out, lse = attend(
            {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": lengths}, kind
        )
        assert (out.shape, lse.shape) == (q.shape, (0, 4, 1))


def test_reference_counts() -> None:
    arguments = split_call()
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
    before = [sys.getrefcount(x) for x in arrays]
    for _ in range(5):
        anyflash.attention_with_kvcache(**arguments)
        with pytest.raises(ValueError, match="cache_leftpad"):
            anyflash.attention_with_kvcache(**arguments, cache_leftpad=np.zeros(9, np.int32))
    assert [sys.getrefcount(x) for x in arrays] == before


@pytest.mark.parametrize("name", ["q", "k_cache", "v", "sinks"])
def test_torch_gradients_are_refused(torch: ModuleType, name: str) -> None:
    arguments = {**call(), "sinks": random(4)}
    given = {key: torch.from_numpy(x) for key, x in arguments.items()}
    given[name].requires_grad_()
    message = rf"anyflash\.\S*attention_with_kvcache: {name} requires grad.*has no backward"
    with pytest.raises(NotImplementedError, match=message) as error:
        anyflash.attention_with_kvcache(**given)
    assert "attention_backward" not in str(error.value)
    with torch.no_grad():
        out = anyflash.attention_with_kvcache(**given)
    close(out.numpy(), expected(arguments).out)


def test_a_kernel_for_decoding_runs() -> None:
    def launches() -> dict[str, int]:
        kernels = anyflash.build_info()["kernels"]
        return {x["name"]: x["launches"] for x in kernels if x["op"] == "decode"}

    before = launches()
    anyflash.attention_with_kvcache(**call())
    after = launches()
    assert sum(after.values()) == sum(before.values()) + 1


# Uses ---------------------------------------------------------------------------------------------


@WRITABLE
def test_shared_prefix(kind: Kind) -> None:
    """One pass over what all sequences have in common, one over the rest."""
    q, keys, values = random(3, 2, 4, 16), random(3, 24, 2, 16), random(3, 24, 2, 16) + 1
    keys[:, :16], values[:, :16] = keys[:1, :16], values[:1, :16]
    lengths = np.array([3, 8, 5], np.int32)
    own = {"k_cache": keys[:, 16:], "v_cache": values[:, 16:], "cache_seqlens": lengths}
    whole = {"k_cache": keys, "v_cache": values, "cache_seqlens": lengths + np.int32(16)}
    together = q.reshape(1, 6, 4, 16)  # all sequences' queries see the whole prefix
    out_a, lse_a = attend(
        {"q": together, "k_cache": keys[:1, :16], "v_cache": values[:1, :16]}, kind
    )
    out_b, lse_b = attend({"q": q, **own, "causal": True}, kind)
    parts = [
        *(out_a.reshape(q.shape), lse_a.reshape(4, 3, 2).swapaxes(0, 1)),
        *(out_b, lse_b),
    ]
    out, lse = map(kind.take, anyflash.merge_states(*kind.give([*map(np.copy, parts)])))
    right, right_lse = attend({"q": q, **whole, "causal": True}, kind)
    close(out, right)
    close(lse, right_lse)


@WRITABLE
def test_rejected_guesses_are_overwritten(kind: Kind) -> None:
    """Speculation: the lengths alone say what counts."""
    arguments = {**call(page_size=4), "causal": True}
    guessed = {name: x + 1 if name in ("k", "v") else x for name, x in arguments.items()}
    attend(guessed, kind)  # writes all guesses; none is accepted
    verify(arguments, kind)
