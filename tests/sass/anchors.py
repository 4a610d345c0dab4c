"""What flash-attn 2 reaches, by the same analysis of its machine code."""

from __future__ import annotations

SOURCE = "flash-attn 2 at 0251105a compiled by nvcc 13.0"

# The configurations that flash-attn 2 picks on the A100: bf16, no dropout, lengths that fill the
# tiles; the steady-state unmasked loop. Causal is another kernel there, and its backward masks in
# every iteration.
FIGURES = (
    "registers",
    "spills_loop",
    "spills_total",
    "slots_per_hmma",
    "stall_per_hmma",
    "smem_over_tensor",
    "sim",
)
TABLES: dict[str, dict[str, tuple[float, ...]]] = {
    "forward": {
        "d64 full": (255, 80, 153, 4.63, 14.2, 0.85, 0.7),
        "d64 causal": (255, 54, 133, 4.56, 13.0, 0.8, 0.65),
        "d128 full": (255, 12, 68, 3.68, 11.3, 0.78, 0.77),
        "d128 causal": (255, 11, 102, 3.57, 11.3, 0.78, 0.81),
        "d256 full": (254, 0, 0, 2.96, 9.9, 1.25, 0.66),
        "d256 causal": (254, 0, 0, 2.94, 9.9, 1.25, 0.65),
    },
    "backward": {
        "d64 full": (255, 9, 48, 3.52, 12.8, 1.13, 0.62),
        "d64 causal": (255, 10, 50, 4.01, 13.0, 1.13, 0.6),
        "d128 full": (255, 6, 33, 2.78, 11.3, 1.07, 0.7),
        "d128 causal": (255, 7, 35, 3.05, 11.6, 1.07, 0.69),
        "d256 full": (255, 0, 0, 2.93, 11.4, 1.28, 0.62),
        "d256 causal": (255, 0, 0, 2.88, 11.4, 1.28, 0.61),
    },
}
# By operation and configuration.
ANCHORS: dict[str, dict[str, dict[str, float]]] = {
    op: {name: dict(zip(FIGURES, row, strict=True)) for name, row in rows.items()}
    for op, rows in TABLES.items()
}
