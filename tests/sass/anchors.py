"""What flash-attn 2 reaches, by the same analysis of its machine code."""

from __future__ import annotations

SOURCE = "flash-attn 2 at 0251105a compiled by nvcc 13.0"

# The configurations that flash-attn 2 picks on the A100: bf16, no dropout, lengths that fill the
# tiles; the steady-state unmasked loop. Causal is another kernel there.
ANCHORS: dict[str, dict[str, float]] = {
    "d64 full": {
        "registers": 255,
        "spills_loop": 80,
        "spills_total": 153,
        "slots_per_hmma": 4.63,
        "stall_per_hmma": 14.2,
        "smem_over_tensor": 0.85,
        "sim": 0.70,
    },
    "d64 causal": {
        "registers": 255,
        "spills_loop": 54,
        "spills_total": 133,
        "slots_per_hmma": 4.56,
        "stall_per_hmma": 13.0,
        "smem_over_tensor": 0.80,
        "sim": 0.65,
    },
    "d128 full": {
        "registers": 255,
        "spills_loop": 12,
        "spills_total": 68,
        "slots_per_hmma": 3.68,
        "stall_per_hmma": 11.3,
        "smem_over_tensor": 0.78,
        "sim": 0.77,
    },
    "d128 causal": {
        "registers": 255,
        "spills_loop": 11,
        "spills_total": 102,
        "slots_per_hmma": 3.57,
        "stall_per_hmma": 11.3,
        "smem_over_tensor": 0.78,
        "sim": 0.81,
    },
    "d256 full": {
        "registers": 254,
        "spills_loop": 0,
        "spills_total": 0,
        "slots_per_hmma": 2.96,
        "stall_per_hmma": 9.9,
        "smem_over_tensor": 1.25,
        "sim": 0.66,
    },
    "d256 causal": {
        "registers": 254,
        "spills_loop": 0,
        "spills_total": 0,
        "slots_per_hmma": 2.94,
        "stall_per_hmma": 9.9,
        "smem_over_tensor": 1.25,
        "sim": 0.65,
    },
}
