"""Writes the fuzzer's first inputs from the tests' tables of cases.

    python tests/fuzz/seeds.py FOLDER              for fuzz_c_abi
    python tests/fuzz/seeds.py FOLDER safetensors  for fuzz_safetensors

An input begins with the header that call.cpp reads. Sizes that it cannot say become the nearest.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python/support"))
if TYPE_CHECKING:
    from cases.cache_case import CacheCase
    from cases.case import Case, Features
    from cases.gradient_case import GradientCase

# As in call.cpp.
FORWARD, BACKWARD, KVCACHE, MERGE = range(4)
HEADER, LAYOUTS = 48, 7
DTYPES = ("fp32", "fp64", "fp16", "bf16")
LENGTHS = (1, 0, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 70, 130)
COLUMNS = (8, 1, 2, 3, 4, 7, 15, 16, 17, 24, 32, 33, 64, 65, 80, 128)


def nearest(values: tuple[int, ...], wanted: int) -> int:
    return min(range(len(values)), key=lambda i: abs(values[i] - wanted))


def header(op: int, case: Case | CacheCase, bits: set[int], **more: int) -> bytes:
    sizes = struct.pack(
        "9B",
        op,
        min(case.batch, 3),
        nearest(LENGTHS, case.sq),
        nearest(LENGTHS, case.sk if op != KVCACHE else case.rows),
        min(max(case.heads_k, 1), 3) - 1,
        min(max(case.heads // max(case.heads_k, 1), 1), 3) - 1,
        nearest(COLUMNS, case.d),
        nearest(COLUMNS, case.head_dim_v),
        DTYPES.index(case.dtype),
    )
    rest = {"small": 0, "seed": len(case.id), "values": 0, "block": 0, "page": 0, "new": 0} | more
    left, right = getattr(case, "window", None) or case.features.window  # type: ignore[union-attr]
    fields = sizes + struct.pack(
        "<IBHBBBBBBBB",
        sum(1 << bit for bit in bits),
        rest["small"],
        rest["seed"],
        rest["values"],
        rest["block"],
        rest["page"],
        rest["new"],
        0,
        len(case.id) % 256,
        min(max(left or 0, 0), 7),
        min(max(right or 0, 0), 7),
    )
    layouts = random.Random(zlib.crc32(case.id.encode())).choices(range(LAYOUTS), k=HEADER)
    return (fields + bytes(layouts))[:HEADER]


def chosen(conditions: dict[int, Any]) -> set[int]:
    return {bit for bit, holds in conditions.items() if holds}


def of_forward(case: Case, op: int = FORWARD, more: dict[int, Any] | None = None) -> bytes:
    f: Features = case.features
    axes = f.bias.axes if f.bias else "bhqk"
    bits = chosen(
        {
            0: case.out_dtype == "fp32",
            1: f.small_dtype,
            2: f.packed,
            4: case.causal,
            5: f.window[0] is not None,
            6: f.window[1] is not None,
            7: f.softcap,
            8: f.bias and f.bias.dtype in ("bool", "uint8"),
            9: "b" not in axes,
            10: "h" not in axes,
            11: "q" not in axes,
            12: "k" not in axes,
            13: f.bias,
            15: f.blocks,
            16: f.rng_state,
            17: f.dropout_p,
            18: f.dropout_p,
            19: f.max_logits,
            20: f.seqused_k,
            21: f.alibi == "h",
            22: f.alibi,
            23: f.sinks,
            24: True,
            30: f.ranges,
        }
        | (more or {})
    )
    small = DTYPES.index(f.small_dtype) if f.small_dtype in DTYPES else 0
    return header(op, case, bits, small=small, block=int(bool(f.blocks and f.blocks.size[0] > 64)))


def of_backward(case: GradientCase) -> bytes:
    more = {25: case.grad_dtype == "fp32", 26: case.dlse} | dict.fromkeys((27, 28, 29), case.small)
    return of_forward(case.forward, BACKWARD, more)


def of_cache(case: CacheCase) -> bytes:
    append = case.append
    bits = chosen(
        {
            0: case.out_dtype == "fp32",
            3: case.page,
            4: case.causal,
            5: case.window[0] is not None,
            6: case.window[1] is not None,
            7: case.softcap,
            9: case.seqlens,
            10: case.leftpad,
            11: case.batch_idx,
            12: append and append.rotary,
            13: append and append.seqlens,
            14: case.eight_bit,
            15: case.cache_dtype == "int8",
            16: append and append.table_dtype == "fp32",
            17: append and append.rotary == case.d,
            18: append and append.neox,
            19: case.tree == "1",
            20: case.tree,
            22: case.alibi,
            23: case.sinks,
            24: True,
            25: case.scales == "head",
            26: case.scales,
            27: case.splits,
            28: case.split_size,
            29: case.latent,
        }
    )
    page = min(case.page.bit_length() - 1, 6) if case.page else 0
    return header(KVCACHE, case, bits, page=page, new=min(case.new, 3))


def of_merge(case: Case) -> bytes:
    bits = chosen({0: case.out_dtype == "fp32", 2: case.features.packed, 24: True})
    return header(MERGE, case, bits)


def seeds() -> dict[str, bytes]:
    from cases.backward import BACKWARD_CASES
    from cases.features import FEATURE_CASES
    from cases.forward import FORWARD_CASES
    from cases.kvcache import CACHE_CASES
    from cases.varlen import VARLEN_CASES

    forward = (*FORWARD_CASES, *FEATURE_CASES, *VARLEN_CASES)
    found = {f"forward-{case.id}": of_forward(case) for case in forward}
    found |= {f"backward-{case.id}": of_backward(case) for case in BACKWARD_CASES}
    found |= {f"kvcache-{case.id}": of_cache(case) for case in CACHE_CASES}
    found |= {f"merge-{case.id}": of_merge(case) for case in forward[::7]}
    return found


def safetensors() -> dict[str, bytes]:
    """A model of the example's, as small as can be, and files that are no models."""
    shapes = {"embedding": (2, 2), "norm": (2,), "rotary_cos": (2, 1), "rotary_sin": (2, 1)}
    shapes |= {f"0.{name}": (2,) for name in ("norm_attention", "norm_mlp")}
    shapes |= {f"0.{name}": (2, 2) for name in "qkvo"}
    shapes |= {"0.gate": (1, 2), "0.up": (1, 2), "0.down": (2, 1)}
    header: dict[str, Any] = {"__metadata__": {"layers": "1", "heads": "1", "heads_k": "1"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    data = struct.pack("<f", 0.5) * (end // 4)
    texts = {"model": json.dumps(header), "nothing": "{}", "list": "[1, 2]", "empty": ""}
    found = {name: struct.pack("<Q", len(text)) + text.encode() for name, text in texts.items()}
    found["model"] += data
    huge = json.dumps(
        {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 2**64 - 1]}}
    )
    found["huge"] = struct.pack("<Q", len(huge)) + huge.encode()
    found["long"] = struct.pack("<Q", 2**64 - 1) + b"{}"
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    of_files = sys.argv[2:] == ["safetensors"]
    different = {data: name for name, data in (safetensors() if of_files else seeds()).items()}
    for data, name in different.items():
        (folder / "".join(c if c.isalnum() else "-" for c in name)).write_bytes(data)
    print(f"{len(different)} inputs in {folder}")


if __name__ == "__main__":
    main()
