"""GPUs whose multiprocessors have 99 KB of shared memory: the emulated one, altered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.capi import Backend
from backends.emulated import emulated, small_gpu
from cases.cache_case import Append, CacheCase
from cases.case import Bias, Blocks, Case, Features, Packed
from cases.gradient_case import GradientCase
from run.backward import verify_backward
from run.forward import verify
from run.kvcache import verify_cache

__all__ = ["emulated", "small_gpu"]

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("head_dim", [192, 250, 256, 512])
@pytest.mark.parametrize("name", ["plain", "causal", "packed", "features"])
def test_forward(small_gpu: Backend, name: str, head_dim: int) -> None:
    """The largest head dims have tiles of their own."""
    features = {
        "packed": Features(packed=Packed((70, 0, 33), (90, 5, 64)), window=(30, 10)),
        "features": Features(bias=Bias(axes="hk"), dropout_p=0.3),
    }
    kernel = {"features": "_generic"}.get(name, "" if head_dim == 192 else "_compact")
    kernel += "_compact" if head_dim == 512 and name == "features" else ""
    case = Case("small", "fp16", 2, 70, 200, 4, 2, head_dim, 128 if head_dim == 192 else 0)
    case = replace(case, causal=name == "causal", features=features.get(name, Features()))
    dims = {192: "192_128", 512: "512"}.get(head_dim, "256")
    verify(replace(small_gpu, expected=f"sm80_forward_f16_d{dims}{kernel}"), case)


@pytest.mark.parametrize("head_dim", [192, 250, 256, 512])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "features",
    [
        Features(),
        Features(softcap=2.0, alibi="h", bias=Bias(axes="hk"), sinks="normal"),
        Features(dropout_p=0.3, seed=3, offset=9),
        Features(packed=Packed((70, 0, 33), (90, 5, 64)), window=(30, 10)),
        Features(blocks=Blocks()),
    ],
    ids=["plain", "scores", "dropout", "packed", "blocks"],
)
def test_backward(
    small_gpu: Backend, features: Features, deterministic: bool, head_dim: int
) -> None:
    case = Case("small", "fp16", 1, 70, 90, 4, 2, head_dim, causal=True, features=features)
    dims = {192: 192, 512: 512}.get(head_dim, 256)
    backend = replace(small_gpu, expected=f"sm80_backward_f16_d{dims}_compact")
    verify_backward(backend, GradientCase(case, deterministic=deterministic))


@pytest.mark.parametrize(("heads", "tile"), [(16, "m16"), (64, "m32")])
@pytest.mark.parametrize("cache", ["plain", "8-bit", "pages"])
@pytest.mark.parametrize("latent", [False, True])
def test_decoding(small_gpu: Backend, latent: bool, cache: str, heads: int, tile: str) -> None:
    """Tiles of 64 rows, which latent attention has on other GPUs, do not fit."""
    case = CacheCase("small", "fp16", (150, 0, 66), 1, heads, 1, 512)
    if latent:
        case = replace(case, d=576, dv=512, latent=True)
    if cache == "8-bit":
        case = replace(case, cache_dtype="e4m3", scales="head")
    elif cache == "pages":
        case = replace(case, page=16, append=Append(), splits=2)
    kernel = f"sm80_decode_f16_d{'576_512' if latent else '512'}_{tile}"
    kernel += "_8bit" if cache == "8-bit" else ""
    verify_cache(replace(small_gpu, expected=kernel), case)


def test_usual_problems(small_gpu: Backend) -> None:
    case = Case("small", "fp16", 1, 70, 90, 4, 2, 128)
    verify(replace(small_gpu, expected="sm80_forward_f16_d128_compact"), case)
    compact = replace(small_gpu, expected="sm80_backward_f16_d128_compact")
    verify_backward(compact, GradientCase(case))
