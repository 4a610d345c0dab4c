"""Do the tests bite? Each mutation breaks a kernel's source in one place; each must be caught.

A mutant is a kernel unit of a driver that passes unchanged, with copies of its headers in which
every mutated place chooses between the old and the new code at run time. So all mutations of a
unit need one compilation for each sanitizer, but those whose types differ, which are compiled
alone. Most give wrong results in plain runs; out-of-bounds accesses that change nothing and some
missing barriers need a sanitizer.
"""

from __future__ import annotations

import os
import re
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from backward_mutations import BACKWARD_MUTATIONS
from changed_unit import compile_command, compile_unit, link_driver
from decode_mutations import DECODE, DECODE_MUTATIONS, LATENT
from emulated_driver import ROOT, Case, run
from hopper_backward_mutations import (
    HOPPER_192,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_MUTATIONS,
    HOPPER_FEATURES,
    HOPPER_PAIR,
    HOPPER_WIDE,
)
from hopper_decode_mutations import HOPPER_DECODE_MUTATIONS
from hopper_mutations import HOPPER, HOPPER_MUTATIONS, HOPPER_RANGES
from mutations import (
    BACKWARD,
    CHUNKS,
    FORWARD_MUTATIONS,
    LAZY,
    ONE_BUFFER,
    RELOADED_V,
    SPLIT_KEYS,
    Mutation,
)
from range_mutations import RANGE_MUTATIONS
from unit_cases import cases_of

MUTATIONS = (
    FORWARD_MUTATIONS
    + RANGE_MUTATIONS
    + BACKWARD_MUTATIONS
    + DECODE_MUTATIONS
    + HOPPER_MUTATIONS
    + HOPPER_DECODE_MUTATIONS
    + HOPPER_BACKWARD_MUTATIONS
)
KERNELS = ROOT / "cpp" / "kernels"
REPORTS = {
    "": "WRONG",
    # What lies behind an array may be one that was freed: the warp that reads it first decides.
    "asan": "heap-buffer-overflow|heap-use-after-free|use-after-poison",
    "tsan": "data race",
}
# What a mutation's name says, and an option of the cases that are likely to notice it.
HINTS = {
    "range": "ranges=",
    "drop": "dropout=",
    "softcap": "softcap=",
    "alibi": "alibi=",
    "slope": "alibi=",
    "bias": "bias=",
    "sink": "sink=",
    "infinity": "nan=",
    "nan": "nan=",
    "finite": "nan=",
    "float32": "fp32",
    "gradient": "grad=",
}
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
# Of one kernel in a generated unit.
DESCRIPTOR = re.compile(r' *sm80::\w+_descriptor<([^(]*)>\(\s*"\w+"\),\n')


def _pattern(code: str) -> str:
    """Any white space for white space; a comment at the end reaches to the end of its line."""
    words = r"\s+".join(map(re.escape, code.split()))
    return words + r"[^\n]*\n" if "//" in code else words


def _choice(old: str, mutations: list[Mutation]) -> str:
    """Code that is `old`, or another one if the switch says so."""
    if ";" in old:
        code = f"{{\n{old}\n}}"
        for mutation in mutations:
            number = 1 + MUTATIONS.index(mutation)
            code = f"if (mutation == {number}) {{\n{mutation.new}\n}} else {code}"
        return code
    code = f"({old})"
    for mutation in mutations:
        code = f"(mutation == {1 + MUTATIONS.index(mutation)} ? ({mutation.new}) : {code})"
    return code


def _write_headers(folder: Path, mutations: list[Mutation]) -> None:
    """The headers with all mutations in place."""
    places: dict[tuple[str, str, str], list[Mutation]] = {}
    for mutation in mutations:
        places.setdefault((mutation.header, mutation.after, mutation.old), []).append(mutation)
    for (header, after, old), here in places.items():
        changed = folder / header
        changed.parent.mkdir(parents=True, exist_ok=True)
        source = (changed if changed.exists() else KERNELS / header).read_text()
        begin = 0
        if after:
            anchors = list(re.finditer(_pattern(after), source))
            assert len(anchors) == 1, f"{header} has {len(anchors)} times: {after!r}"
            begin = anchors[0].end()
        found = list(re.compile(_pattern(old)).finditer(source, begin))
        enough = bool(found) if after else len(found) == 1
        assert enough, f"{header} has {len(found)} times: {old!r}"
        code = here[0].new if here[0].alone else _choice(found[0].group(), here)
        changed.write_text(source[: found[0].start()] + code + source[found[0].end() :])


def _fewer_kernels(source: str, mutation: Mutation) -> str:
    """Those that the mutations are in: compiling is what takes the time."""
    tile_config = {LAZY: "kWide", SPLIT_KEYS: "kWide", RELOADED_V: "kCompact"}.get(mutation.unit)
    keep = ""
    if mutation.unit == DECODE:  # without its larger tiles, other units' would be taken
        keep = "16, false" if mutation.sanitizer else ""
    elif mutation.unit == LATENT:
        keep = "false"  # 16-bit caches
    elif mutation.unit in (CHUNKS, HOPPER_BACKWARD, HOPPER_192, HOPPER_PAIR, HOPPER_WIDE):
        keep = "Plain"
    elif mutation.unit == HOPPER:
        keep = "Plain" if mutation.sanitizer else "Plain|Softcap"
    elif mutation.unit in (HOPPER_RANGES, HOPPER_FEATURES):
        keep = "Ranges|Blocks|Alibi|Softcap|Dropout"
    elif tile_config:
        keep = tile_config
    elif mutation.unit == ONE_BUFFER:
        keep = "kWide" if mutation.sanitizer else "kWide|Generic"
    # Of the variants, the generic one knows all that the others do.
    elif mutation.alone or (mutation.unit == BACKWARD and mutation.sanitizer):
        keep = "Generic"
    return DESCRIPTOR.sub(lambda found: found[0] if re.search(keep, found[1]) else "", source)


def _mutant(build: Path, folder: Path, mutations: list[Mutation]) -> Path:
    """A driver of the changed unit."""
    _write_headers(folder, mutations)
    mutation = mutations[0]
    command = compile_command(build, mutation.sanitizer, mutation.unit)
    unit = folder / f"{mutation.unit}.cpp"
    changed = folder / "cuda" / f"{mutation.unit}.cu"
    source = (changed if changed.exists() else Path(command[-1])).read_text()
    unit.write_text(_fewer_kernels(source, mutation))
    changed_object = compile_unit(folder, unit, command, mutation.sanitizer)
    return link_driver(build, folder, [changed_object], command, mutation.sanitizer)


def _key(mutation: Mutation) -> tuple[str, ...]:
    alone = (mutation.name,) if mutation.alone else ()
    return (mutation.unit, mutation.sanitizer, *alone)


# By _key() and the number of the mutation, 0 for none: status and output.
Results = dict[tuple[tuple[str, ...], int], Future[tuple[int, str]]]

FULL = os.environ.get("ANYFLASH_TEST_FULL") == "1"


def _is_sampled(mutation: Mutation) -> bool:
    """Of what changes seldom, all but Hopper's kernels, `make test` takes every third mutation, but
    none that has to be compiled by itself."""
    if FULL or mutation.unit.startswith("sm90"):
        return True
    by_itself = mutation.alone or bool(mutation.sanitizer)
    return not by_itself and zlib.crc32(mutation.name.encode()) % 3 == 0


SAMPLED = [mutation for mutation in MUTATIONS if _is_sampled(mutation)]
# Under sanitizers the same cases run in test_sanitizers.py.
UNCHANGED = sorted({_key(mutation)[:2] for mutation in SAMPLED if FULL or not mutation.sanitizer})


def _likely_first(cases: list[Case], name: str) -> list[Case]:
    """A run ends with the first case that notices the mutation."""
    options = {option for word, option in HINTS.items() if word in name}
    return sorted(cases, key=lambda case: -sum(option in case.more for option in options))


def _run(mutant: Future[Path], key: tuple[str, ...], number: int) -> tuple[int, str]:
    cases = cases_of(key[0], key[1])
    if number and not key[1]:  # which report a sanitizer makes depends on the case
        cases = _likely_first(cases, MUTATIONS[number - 1].name)
    return run(mutant.result(), cases, "--stop", MUTATION=str(number), **ENVIRONMENT)


def _chosen(session: pytest.Session) -> list[tuple[tuple[str, ...], int]]:
    """What the tests that will run want to have run: keys, and numbers of mutations or 0."""
    chosen = []
    for item in session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "mutation" in params:
            mutation = params["mutation"]
            chosen.append((_key(mutation), 1 + MUTATIONS.index(mutation)))
        elif "unchanged" in params:
            chosen.append((params["unchanged"], 0))
    return chosen


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest,
    build: Path,
    pool: ThreadPoolExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """Status and output by _key() and number; all are made side by side."""
    chosen = _chosen(request.session)
    mutants = {}
    for key in dict.fromkeys(key for key, _ in chosen):
        mutations = [mutation for mutation in MUTATIONS if _key(mutation) == key]
        folder = tmp_path_factory.mktemp("mutant")
        mutants[key] = pool.submit(_mutant, build, folder, mutations)
    return {(key, number): pool.submit(_run, mutants[key], key, number) for key, number in chosen}


def test_every_mutation_has_its_place(tmp_path: Path) -> None:
    for key in {_key(mutation) for mutation in MUTATIONS}:
        folder = tmp_path / "-".join(key)
        _write_headers(folder, [mutation for mutation in MUTATIONS if _key(mutation) == key])


@pytest.mark.parametrize("mutation", SAMPLED, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, results: Results) -> None:
    status, output = results[_key(mutation), 1 + MUTATIONS.index(mutation)].result()
    assert status != 0, f"nothing noticed {mutation.name}"
    assert re.search(REPORTS[mutation.sanitizer], output), output


@pytest.mark.parametrize("unchanged", UNCHANGED, ids="-".join)
def test_unchanged_kernel_passes(unchanged: tuple[str, ...], results: Results) -> None:
    """The mutants' cases are right without a mutation: it is the mutation that is caught."""
    status, output = results[unchanged, 0].result()
    assert status == 0, output
