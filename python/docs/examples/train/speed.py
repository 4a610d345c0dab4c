"""How fast training is, in tokens, FLOPs, and shares of the device's peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

from config import Config

# Dense products in bfloat16, from the vendor's data sheets, by the whole name of the device.
PEAK_TFLOPS = {r"NVIDIA A100.*": 312.0, r"NVIDIA H100 80GB HBM3": 989.0, r"NVIDIA H200": 989.0}


def peak_tflops(gpu: str | None) -> float | None:
    """None: not known."""
    for name, peak in PEAK_TFLOPS.items():
        if gpu and re.fullmatch(name, gpu):
            return peak
    return None


def flops_per_token(config: Config, parameters: int) -> int:
    """Forward and backward, as FlashAttention-2 (section 4.2) counts: six for each parameter, and
    twelve for each layer's dim and each of the sequence's places. Neither is a causal mask
    deducted, nor is what is computed twice added."""
    return 6 * parameters + 12 * config.layers * config.dim * config.seqlen


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    tflops: float  # in a second
    mfu: float | None  # model FLOPs utilization; None: the device's peak is not known

    def __str__(self) -> str:
        share = "" if self.mfu is None else f", {self.mfu:.1%} MFU"
        return f"{self.tokens_per_second:,.0f} tokens/s, {self.tflops:.3g} TFLOP/s{share}"


def speed(config: Config, parameters: int, step: tuple[int, float], peak: float | None) -> Speed:
    """Of `step`: its sequences, and the seconds that it took."""
    batch_size, seconds = step
    rate = batch_size * config.seqlen / seconds
    tflops = rate * flops_per_token(config, parameters) / 1e12
    return Speed(rate, tflops, tflops / peak if peak else None)
