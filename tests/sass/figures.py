"""The figures of anyflash's sm_80 kernels, the rules for them, and the recorded ones."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from anchors import ANCHORS
from machine_code.analysis import Launch, analyse
from machine_code.disassembly import Disassembler
from machine_code.machine import MACHINES, ctas_by_registers

RECORDED = Path(__file__).parent / "recorded.json"
ARCH = "sm_80"
MACS_PER_HMMA = 16 * 8 * 16
PARTED_ABOVE = 256  # larger head dims take several launches; flash-attn 2 has none of them
MIN_WARPS_PER_SM = 8  # two a scheduler: one computes while the other waits

# Local loads and stores allowed in the hot loop, by head dim: what flash-attn 2 has, where there is
# an anchor; elsewhere what it has at the next larger anchor. recorded.json holds what we have.
ANCHOR_DIMS = {32: 64, 64: 64, 96: 128, 128: 128, 192: 256, 256: 256}
SPILL_LIMITS = {
    (op, dim): ANCHORS[op][f"d{anchor} full"]["spills_loop"]
    for op in ANCHORS
    for dim, anchor in ANCHOR_DIMS.items()
}

# Of flash-attn 2's stall cycles, and of its ratio of shared memory to tensor cores, that the plain
# backward may reach, where there is an anchor: no more than its digits leave open, and with the
# tiles of other GPUs or of small problems this share.
BACKWARD_SHARE = 1.005
OTHER_TILES_SHARE = 1.15

# Of the plain forward kernel's sim that the generic one must reach.
GENERIC_SHARE = 0.5

# (figure, +1 where more is better or -1, relative tolerance)
COMPARED = (
    ("registers", -1, 0.02),
    ("spills_loop", -1, 0.0),
    ("spills_total", -1, 0.0),
    ("slots_per_hmma", -1, 0.02),
    ("stall_per_hmma", -1, 0.02),
    ("smem_over_tensor", -1, 0.02),
    ("sim", +1, 0.02),
    ("ctas", +1, 0.0),
)

Figures = dict[str, float]
Row = dict[str, Any]  # one of anyflash.build_info()["kernels"]


class KernelKey(NamedTuple):
    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    features: tuple[str, ...]
    block_m: int = 0  # of decoding kernels, which are there for several
    tile_config: str = ""  # "compact" or "wide": for GPUs with less or more shared memory


# Of the plain kernel's sim that those with one feature in its tiles must reach.
ONE_FEATURE_SHARE = 0.7

# By the C++ names of the variants (kernels/variant: forward_variants.h, backward_variants.h,
# backward_single_feature.h).
FEATURES = {
    "Plain": (),
    "Alibi": ("alibi",),
    "Softcap": ("softcap",),
    "Dropout": ("dropout",),
    "Ranges": ("key_ranges",),
    "Scored": ("softcap", "alibi"),
    "Generic": ("softcap", "alibi", "bias", "block_mask", "key_ranges", "dropout"),
}
DECODE_FEATURES = {"0": ("softcap", "alibi"), "1": ("softcap", "alibi", "quantized_cache")}
TILE_CONFIGS = ("", "compact", "wide")
DTYPES = {"half_t": "float16", "bfloat16_t": "bfloat16"}


def kernel_key(mangled: str) -> KernelKey | None:
    """Of an operation's main kernel, by its template arguments; None for other kernels."""
    if decode := re.search(
        r"sm80\d+decode_kernelI.*?DecodeTraitsIN7cutlass"
        r"\d+(half_t|bfloat16_t)ELi(\d+)ELi(\d+)ELi(\d+)ELb([01])E",
        mangled,
    ):
        element, dim, dim_v, block_m, is_8bit = decode.groups()
        features = DECODE_FEATURES[is_8bit]
        dims = int(dim), int(dim_v)
        return KernelKey("decode", DTYPES[element], *dims, features, int(block_m))
    if "11KeyGradientE1E" in mangled:  # of the two launches by chunks, that for dK is the main one
        return None
    found = re.search(
        r"sm80\d+(forward|backward|prefill)(?:_by_chunks)?_kernelI.*?(?:For|Back)wardTraitsIN7cutlass"
        r"\d+(half_t|bfloat16_t)ELi(\d+)ELi(\d+)E",
        mangled,
    )
    variant = re.search(rf"\d({'|'.join(FEATURES)})(?:Forward|Backward)E", mangled)
    tile_config = re.search(r"10TileConfigE([012])E", mangled)
    if not (found and variant and tile_config):
        return None
    op, element, head_dim, head_dim_v = found.groups()
    dims = int(head_dim), int(head_dim_v)
    return KernelKey(
        op,
        DTYPES[element],
        *dims,
        FEATURES[variant[1]],
        # Prefill has one of the forward's for each variant.
        tile_config="" if op == "prefill" else TILE_CONFIGS[int(tile_config[1])],
    )


def row_key(row: Row) -> KernelKey:
    dims = row["head_dim"], row["head_dim_v"]
    block_m = row["block_m"] if row["op"] == "decode" else 0
    return KernelKey(
        row["op"], row["dtype"], *dims, tuple(row["features"]), block_m, row["tile_config"]
    )


def plain_name(name: str) -> str:
    """Of the kernel without features."""
    return re.sub("_(generic|scored|alibi|softcap|dropout|ranges)(?=_wide$|$)", "", name)


class Library:
    """The installed library, or another build of it, named by ANYFLASH_LIBRARY."""

    def __init__(self) -> None:
        import anyflash  # the rules below can be tested without it

        info = anyflash.build_info()
        installed = Path(anyflash.__file__).parent / "lib" / "libanyflash.so"
        self.file = Path(os.environ.get("ANYFLASH_LIBRARY", installed))
        kernels = [row for row in info["kernels"] if row["arch"] == "sm80"]
        archs = info["cuda"]["archs"] if info["cuda"] else []
        self._analyses: dict[str, dict[str, Any]] = {}
        self.absent = ""  # why there is nothing to check
        if not kernels:
            self.absent = "CPU-only build"
        elif ARCH not in archs:
            self.absent = f"a build without {ARCH} machine code, only for {', '.join(archs)}"
        self.rows: dict[str, Row] = {} if self.absent else {row["name"]: row for row in kernels}

    @functools.cached_property
    def _disassembler(self) -> Disassembler:
        return Disassembler(self.file, ARCH)

    @functools.cached_property
    def compiler(self) -> str:
        return self._disassembler.compiler()

    @functools.cached_property
    def _resources(self) -> dict[str, dict[str, int]]:
        return self._disassembler.resources()

    @functools.cached_property
    def _code(self) -> dict[str, Any]:
        return self._disassembler.code(name for name in self._resources if kernel_key(name))

    def mangled(self, row: Row) -> str:
        key = row_key(row)
        found = [name for name in self._resources if kernel_key(name) == key]
        if len(found) != 1:
            raise LookupError(f"{row['name']}: {len(found)} functions in {self.file} have {key}")
        return found[0]

    def analysis(self, name: str) -> dict[str, Any]:
        if name not in self._analyses:
            self._analyses[name] = self._analyse(self.rows[name])
        return self._analyses[name]

    def _analyse(self, row: Row) -> dict[str, Any]:
        mangled = self.mangled(row)
        launch = Launch(32 * row["warps"], row["smem_bytes"])
        return analyse(
            row["name"],
            self._resources[mangled],
            self._code[mangled],
            MACHINES[ARCH],
            launch,
            with_sim=row["op"] != "decode",
        )

    def figures(self, name: str) -> Figures:
        row = self.rows[name]
        of = decode_figures if row["op"] == "decode" else figures
        return of(self.analysis(name), 32 * row["warps"])

    def how_to_inspect(self, name: str) -> str:
        row = self.rows[name]
        return (
            f"  inspect: python tests/sass/sass_cost.py {self.file} {self.mangled(row)} "
            f"--threads {32 * row['warps']} --smem {row['smem_bytes']}"
        )


def decode_figures(analysis: dict[str, Any], threads: int) -> Figures:
    """Decoding waits for memory, and its loop holds parts that rarely run (element loads, masks),
    so that counts of instructions say nothing: what matters is that enough CTAs fit."""
    return {
        "registers": analysis["regs"],
        "spills_loop": analysis["loop"]["counts"].get("LDL_STL", 0),
        "spills_total": analysis["ldl_stl_total"],
        "ctas": ctas_by_registers(MACHINES[ARCH], analysis["regs"], threads),
    }


def figures(analysis: dict[str, Any], _threads: int) -> Figures:
    loop, metrics = analysis["loop"], analysis["metrics"]
    return {
        "registers": analysis["regs"],
        "spills_loop": loop["counts"].get("LDL_STL", 0),
        "spills_total": analysis["ldl_stl_total"],
        "slots_per_hmma": metrics["issue_slots_per_hmma"],
        "stall_per_hmma": round(loop["stall_cycles"] / loop["counts"]["HMMA"], 3),
        "smem_over_tensor": metrics["smem_over_tensor"],
        "sim": analysis["share_of_mma_peak"]["sim"],
    }


def expected_hmma(row: Row) -> int:
    """Of one warp and iteration. A product takes block_m * block_n * head_dim MACs: Q K^T and P V;
    the backward's Q K^T, dS K and dS^T Q, and dO V^T and P^T dO. Above head dim 256 a launch of the
    forward makes 256 columns, and the backward's main one leaves out P^T dO."""
    d, dv = row["head_dim"], row["head_dim_v"]
    if row["op"] == "decode" and d > PARTED_ABOVE:  # warps that share columns make all scores
        columns = d * (2 if d != dv else 4 // (row["block_m"] // 16)) + dv
    elif d <= PARTED_ABOVE:
        columns = 3 * d + 2 * dv if row["op"] == "backward" else d + dv
    else:
        columns = 3 * d + dv if row["op"] == "backward" else d + PARTED_ABOVE
    macs: int = row["block_m"] * row["block_n"] * columns
    warps: int = row["warps"]
    return macs // (MACS_PER_HMMA * warps)


def compare(before: Figures, now: Figures) -> tuple[list[str], list[str]]:
    """What got worse and what got better, beyond the tolerances."""
    worse: list[str] = []
    better: list[str] = []
    for figure, sign, tolerance in COMPARED:
        if figure not in before:  # decoding kernels have their own
            continue
        gain = sign * (now[figure] - before[figure])
        if abs(gain) > tolerance * before[figure] + 1e-9:
            change = f"{figure} {before[figure]:g} -> {now[figure]:g}"
            (better if gain > 0 else worse).append(change)
    return worse, better


def load_recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    return recorded
