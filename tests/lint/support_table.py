"""The table of kernels in the guide, made from the list that the installed library reports.

python tests/lint/support_table.py           prints it
python tests/lint/support_table.py --write   puts it into the page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyflash

PAGE = Path(__file__).parents[2] / "python/docs/guide/support.md"
BEGIN = "from the kernel list -->\n"
END = "<!-- end of support-table -->"
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEADER = (
    "| kernels | operation | features | dtypes | head dims (qk/v) | tile (queries x keys) |\n"
    "|---|---|---|---|---|---|"
)


def head_dims(kernel: dict[str, Any]) -> str:
    dims = kernel["head_dim"], kernel["head_dim_v"]
    return "/".join(str(dim) for dim in dict.fromkeys(dims)) if any(dims) else "any"


def rows(kernels: list[dict[str, Any]]) -> list[str]:
    """One line for kernels that differ in dtype, head dims and tile only."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for kernel in kernels:
        features = ", ".join(kernel["features"]) or "none"
        groups.setdefault((kernel["arch"], kernel["op"], features), []).append(kernel)
    lines = []
    for group, members in groups.items():
        ordered = sorted(members, key=lambda kernel: (kernel["head_dim"], kernel["head_dim_v"]))
        cells = (
            sorted({kernel["dtype"] for kernel in members}, key=DTYPES.index),
            dict.fromkeys(map(head_dims, ordered)),
            dict.fromkeys(f"{kernel['block_m']} x {kernel['block_n']}" for kernel in ordered),
        )
        lines.append(f"| {' | '.join((*group, *map(', '.join, cells)))} |")
    return lines


def main() -> None:
    table = "\n".join([HEADER, *rows(anyflash.build_info()["kernels"])]) + "\n"
    if "--write" not in sys.argv:
        print(table, end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
