"""Options of anyflash.attention on a GPU, against the same call on the CPU in float32."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash

pytestmark = pytest.mark.cuda


def random(torch: ModuleType, *shape: int, dtype: str = "float16") -> Any:
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to("cuda", getattr(torch, dtype))


def inputs(torch: ModuleType, dtype: str = "float16") -> list[Any]:
    """Two sequences, 130 queries, 200 keys, 4 heads on 2."""
    return [random(torch, 2, n, heads, 64, dtype=dtype) for n, heads in ((130, 4), (200, 2))] + [
        random(torch, 2, 200, 2, 48, dtype=dtype)
    ]


def on_cpu(x: Any) -> Any:
    """Tensors in host memory, 16-bit numbers as float32."""
    if not hasattr(x, "cpu"):
        return x
    x = x.cpu()
    return x.float() if x.dtype.is_floating_point else x


def verify(torch: ModuleType, given: list[Any], **options: Any) -> None:
    flags = {"return_max_logits": True, "return_dropout_mask": True}
    result = anyflash.attention(*given, **options, **flags)
    host = {name: on_cpu(x) for name, x in options.items()}
    expected = anyflash.attention(*map(on_cpu, given), **host, **flags)
    assert all(x.device == given[0].device for x in (*result[:3], result.dropout_mask))
    torch.testing.assert_close(on_cpu(result.out), expected.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(result.lse.cpu(), expected.lse, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(result.max_logits.cpu(), expected.max_logits, rtol=2e-2, atol=2e-2)
    assert torch.equal(result.dropout_mask.cpu(), expected.dropout_mask)


OPTIONS = {
    "window": lambda torch: {"window_size": (20, 9)},
    "softcap": lambda torch: {"softcap": 1.5},
    "alibi": lambda torch: {"alibi_slopes": random(torch, 4, dtype="float32")},
    "bias": lambda torch: {"bias": random(torch, 4, 130, 200)},
    "bias-fp32": lambda torch: {"bias": random(torch, 2, 1, 1, 200, dtype="float32")},
    "bias-expanded": lambda torch: {"bias": random(torch, 200).expand(2, 4, 130, 200)},
    "keep": lambda torch: {"bias": random(torch, 130, 200) > 0},
    "blocks": lambda torch: {"block_mask": random(torch, 2, 4, 2, 2) > 0},
    "sinks": lambda torch: {"sinks": random(torch, 4, dtype="bfloat16")},
    "dropout": lambda torch: {"dropout_p": 0.25, "seed": 3},
    "seqused": lambda torch: {
        "seqused_k": torch.tensor([150, 0], dtype=torch.int32, device="cuda"),
        "causal": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(torch: ModuleType, name: str) -> None:
    verify(torch, inputs(torch), **OPTIONS[name](torch))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_options_together(torch: ModuleType, dtype: str) -> None:
    names = ("window", "softcap", "alibi", "bias", "blocks", "sinks", "dropout")
    options = {key: x for name in names for key, x in OPTIONS[name](torch).items()}
    verify(torch, inputs(torch, dtype), **options)


def test_block_mask_like_a_cuda_tensor(torch: ModuleType) -> None:
    given = inputs(torch)
    mask = anyflash.create_block_mask(
        lambda b, h, i, j: j <= i + 70, None, None, 130, 200, (64, 64), like=given[0]
    )
    assert mask.device == given[0].device
    verify(torch, given, block_mask=mask, block_size=(64, 64))


def test_float64_options_are_refused(torch: ModuleType) -> None:
    sinks = random(torch, 4, dtype="float64")
    with pytest.raises(TypeError, match=r"anyflash\.attention: sinks is float64"):
        anyflash.attention(*inputs(torch), sinks=sinks)


def test_rng_state_is_read_by_a_replay(torch: ModuleType) -> None:
    """A CUDA graph that is replayed drops what the state then says."""
    given = inputs(torch)
    state = torch.tensor([1, 2], device="cuda")
    out = torch.empty_like(given[0][..., :48])
    options = {"dropout_p": 0.5, "out": out}
    anyflash.attention(*given, **options, rng_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        anyflash.attention(*given, **options, rng_state=state)
    for pair in ((1, 2), (1, 3), (9, 9)):
        state.copy_(torch.tensor(pair))
        graph.replay()
        replayed = out.clone()
        anyflash.attention(*given, **options, rng_state=pair)
        assert torch.equal(replayed, out)


def packed(torch: ModuleType) -> list[Any]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    ends = [[0, 70, 70, 75], [0, 130, 140, 140]]
    lengths = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ends]
    tensors = [random(torch, n, heads, 64) for n, heads in ((75, 4), (140, 2), (140, 2))]
    return [*tensors, *lengths, 70, 130]


def test_packed(torch: ModuleType) -> None:
    given = packed(torch)
    out, lse = anyflash.attention_varlen(*given, causal=True, validate=True, return_lse=True)
    expected, expected_lse = anyflash.attention_varlen(
        *map(on_cpu, given), causal=True, return_lse=True
    )
    torch.testing.assert_close(on_cpu(out), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=2e-2, atol=2e-2)
    q, k, v = (x[None, :n] for x, n in zip(given[:3], (70, 130, 130), strict=True))
    assert torch.equal(anyflash.attention(q, k, v, causal=True)[0], out[:70])


def test_packed_lengths(torch: ModuleType) -> None:
    """Wrong ones are refused where that is asked for, and harmless where not."""
    given = packed(torch)
    given[3][1] = 1 << 30
    with pytest.raises(ValueError, match=r"anyflash\.attention_varlen: .*cu_seqlens_q"):
        anyflash.attention_varlen(*given, validate=True)
    anyflash.attention_varlen(*given)
    torch.cuda.synchronize()


def test_merge(torch: ModuleType) -> None:
    q, k, v = inputs(torch)
    parts = [
        x
        for keys in (slice(0, 80), slice(80, 200))
        for x in anyflash.attention(
            q, k[:, keys], v[:, keys], return_lse=True, out_dtype=torch.float32
        )
    ]
    out, lse = anyflash.merge_states(*parts, out_dtype=q.dtype)
    expected, expected_lse = anyflash.attention(q, k, v, return_lse=True)
    assert (out.dtype, out.device) == (q.dtype, q.device)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    assert anyflash.merge_states(*parts, out=parts[0], lse=parts[1])[0] is parts[0]
    torch.testing.assert_close(parts[0].to(q.dtype), out, rtol=1e-3, atol=1e-3)


def test_cupy(torch: ModuleType, cupy: ModuleType) -> None:
    given = inputs(torch)
    options = {"bias": random(torch, 130, 200) > 0, "sinks": random(torch, 4, dtype="float32")}
    flags = {"dropout_p": 0.5, "seed": 1, "return_dropout_mask": True}
    expected = anyflash.attention(*given, **options, **flags)
    arrays = [cupy.asarray(x.cpu().numpy()) for x in given]
    others = {name: cupy.asarray(x.cpu().numpy()) for name, x in options.items()}
    result = anyflash.attention(*arrays, **others, **flags)
    assert type(result.out) is type(result.dropout_mask) is cupy.ndarray
    assert (result.out.get() == expected.out.cpu().numpy()).all()
    assert (result.dropout_mask.get() == expected.dropout_mask.cpu().numpy()).all()
