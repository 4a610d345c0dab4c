"""The table of the fastest tiles (cpp/src/tuned_tiles.cpp): what to write there, and how."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anyflash.bench._report import geometric_mean

LEAST_GAIN = 1.02  # below, noise decides


SIZES = ("small grid", "short", "long")  # ProblemSize of tuned_tiles.h


class Key(NamedTuple):
    """What a row of the table is about: problems of plain kernels for these head dims."""

    op: str
    d: int
    d_v: int
    bounded: bool  # by a causal mask, or a window
    size: str  # one of SIZES
    arch: str = "sm80"  # the kernels' family

    @property
    def family(self) -> tuple[str, int, int, str]:
        return self.op, self.d, self.d_v, self.arch


@dataclass(frozen=True)
class Measured:
    """A problem: seconds of each config (KernelDescriptor::tile_config), which one the rules
    choose, and which ones gave the same bits: those with the same number."""

    key: Key
    seconds: Mapping[str, float]
    rules: str
    bits: Mapping[str, int]


def chosen(measured: Iterable[Measured]) -> dict[Key, str]:
    """The configs to write: those that gain on what the rules choose, in the geometric mean of a
    key's problems. All that a GPU takes for some head dims must give a row the same bits: the size
    of a grid depends on the batch."""
    ordered = sorted(measured, key=lambda m: m.key)
    found: dict[Key, str] = {}
    for _, grouped in itertools.groupby(ordered, lambda m: m.key.family):
        family = list(grouped)
        best: dict[Key, str] = {}
        most = 0.0
        for configs in alike(family):
            wanted, gain = _fastest(configs, family)
            if all(m.rules in configs for m in family):
                gain *= LEAST_GAIN  # where others are faster by less, nothing changes
            if gain > most:
                best, most = wanted, gain
        found |= best
    return found


def alike(family: Sequence[Measured]) -> list[set[str]]:
    """Configs that gave the same bits in all problems."""
    configs = set.intersection(*(set(m.seconds) for m in family))
    groups: dict[tuple[int, ...], set[str]] = {}
    for config in sorted(configs):
        groups.setdefault(tuple(m.bits[config] for m in family), set()).add(config)
    return list(groups.values())


def _fastest(configs: set[str], family: Sequence[Measured]) -> tuple[dict[Key, str], float]:
    """Of these configs, the one for each key that the rules would not choose, and how many times as
    fast as the rules' all keys then are."""
    wanted: dict[Key, str] = {}
    gains = []
    for key, grouped in itertools.groupby(family, lambda m: m.key):
        cases = list(grouped)
        by_config = {
            config: geometric_mean([m.seconds[m.rules] / m.seconds[config] for m in cases])
            for config in sorted(configs)
        }
        config = max(by_config, key=by_config.__getitem__)
        if all(m.rules in configs for m in cases) and by_config[config] <= LEAST_GAIN:
            gains.append(1.0)
        else:
            wanted[key] = config
            gains.append(by_config[config])
    return wanted, geometric_mean(gains)


ROW = re.compile(
    r"^ *\{\{(\d+), \"(\w+)\"\}, \{Op::k(\w+), (\d+), (\d+)\}, "
    r"\{(true|false), Size::k(\w+)\}, TileConfig::k(\w+)\},$"
)
SIZE_NAMES = {"".join(map(str.capitalize, size.split())): size for size in SIZES}
END = re.compile(r"^ *\{\},$")


def rows(text: str) -> dict[tuple[int, Key], str]:
    """Configs, by compute capability (90 for 9.0) and key."""
    found = {}
    for line in text.splitlines():
        if match := ROW.match(line):
            capability, arch, op, d, d_v, bounded, size, config = match.groups()
            key = Key(op.lower(), int(d), int(d_v), bounded == "true", SIZE_NAMES[size], arch)
            found[int(capability), key] = "" if config == "Default" else config.lower()
    return found


def rewritten(text: str, capability: int, configs: Mapping[Key, str]) -> str:
    """The file with these rows, instead of those that it has for this compute capability."""
    lines = text.splitlines()
    ends = [i for i, line in enumerate(lines) if END.match(line)]
    if len(ends) != 1:
        raise ValueError("it is not the table of tiles, cpp/src/tuned_tiles.cpp: no row ends it")
    table = {(cc, key): config for (cc, key), config in rows(text).items() if cc != capability}
    table |= {(capability, key): config for key, config in configs.items()}
    names = {size: name for name, size in SIZE_NAMES.items()}
    made = [
        f'    {{{{{cc}, "{key.arch}"}}, {{Op::k{key.op.capitalize()}, {key.d}, {key.d_v}}}, '
        f"{{{str(key.bounded).lower()}, Size::k{names[key.size]}}}, "
        f"TileConfig::k{config.capitalize() or 'Default'}}},"
        for (cc, key), config in sorted(table.items())
    ]
    before, after = lines[: ends[0]], lines[ends[0] :]
    kept = [line for line in before if not ROW.match(line)]
    return "\n".join([*kept, *made, *after]) + "\n"
