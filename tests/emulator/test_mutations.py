"""Do the tests bite? Each mutation breaks a kernel's source in one place; each must be caught.

A mutant is the same kernel unit, compiled with one header changed, in the driver that the unchanged
unit passes. Most give wrong results in plain runs; out-of-bounds reads of what is masked later and
some missing barriers need a sanitizer.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from emulated_driver import CASES, ROOT, run

KERNELS = ROOT / "cpp" / "kernels"
UNIT = "sm80_forward_f16_d64.cpp"
SEEDS = (0, 1, 2, 3)


class Mutation(NamedTuple):
    name: str
    header: str
    old: str
    new: str
    driver: str = "emulated_driver"
    report: str = "WRONG"  # what the output must hold


ASAN = {"driver": "emulated_driver_asan", "report": "heap-buffer-overflow"}
TSAN = {"driver": "emulated_driver_tsan", "report": "data race"}
MAINLOOP = "sm80/fwd_mainloop.h"
EPILOGUE = "sm80/fwd_epilogue.h"
MASK = "variant/mask.h"
SOFTMAX = "common/softmax.h"
WAIT_K = "    cp_async_wait<0>();\n    __syncthreads();  // K_n is there"
WAIT_V = "    cp_async_wait<0>();\n    if constexpr (kMasked) found_nonfinite"


MUTATIONS = (
    Mutation("no-barrier-for-k", MAINLOOP, WAIT_K, WAIT_K.replace("__syncthreads();", "")),
    Mutation("no-wait-for-k", MAINLOOP, WAIT_K, WAIT_K.replace("cp_async_wait<0>();", "")),
    Mutation("short-wait-for-k", MAINLOOP, WAIT_K, WAIT_K.replace("<0>", "<1>")),
    Mutation("no-wait-for-v", MAINLOOP, WAIT_V, WAIT_V.replace("cp_async_wait<0>();", "")),
    Mutation("short-wait-for-v", MAINLOOP, WAIT_V, WAIT_V.replace("<0>", "<1>")),
    Mutation("no-barrier-for-v", MAINLOOP, "__syncthreads();  // V_n is there", "//"),
    Mutation("no-barrier-for-q", MAINLOOP, "__syncthreads();  // Q has landed", "//", **TSAN),
    Mutation("no-barrier-in-output", EPILOGUE, "__syncthreads_or(found", "(found"),
    Mutation("mask-off-by-one", MASK, "(last) + 1", "(last) + 2"),
    Mutation("mask-off-by-minus-one", MASK, "(last) + 1", "(last)"),
    Mutation("one-tile-too-few", MASK, " + (last % block_n != 0)", ""),
    Mutation(
        "masked-tile-unmasked", MASK, "visible(first_row) /", "visible(first_row + rows - 1) /"
    ),
    Mutation(
        "k-read-past-end",
        MAINLOOP,
        "<true>(gmem_load, at_tile(tKgK",
        "<false>(gmem_load, at_tile(tKgK",
        **ASAN,
    ),
    Mutation(
        "q-read-past-end", MAINLOOP, "<true>(gmem_load, tQgQ", "<false>(gmem_load, tQgQ", **ASAN
    ),
    Mutation("v-read-past-end", MAINLOOP, "<kMasked>(gmem_load", "<false>(gmem_load", **ASAN),
    Mutation("columns-not-guarded", "sm80/copy.h", "row_ok && columns.ok[page]", "row_ok"),
    Mutation(
        "v-read-with-another-swizzle",
        "sm80/traits.h",
        "composition(\n      SmemKV{}",
        "composition(\n      cute::get_nonswizzle_portion(SmemKV{})",
    ),
    Mutation("quad-not-reduced", SOFTMAX, "x = op(x, __shfl", "if (false) x = op(x, __shfl"),
    Mutation("output-not-rescaled", SOFTMAX, "out(row, col) *= rescale;", ""),
    Mutation("sum-not-rescaled", SOFTMAX, "sum_(row) * rescale", "sum_(row)"),
    Mutation("sign-of-scale-lost", MAINLOOP, "if (q_factor != 1.0f)", "if (false)"),
)


def _compile_command(build: Path, driver: str) -> list[str]:
    wanted = f"{driver}_library_generated/{UNIT}"
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(wanted):
            command = shlex.split(entry["command"])
            if "ccache" in Path(command[0]).name:
                command = command[1:]
            return command
    raise AssertionError(f"the test build does not compile {wanted}")


def _mutant(build: Path, folder: Path, mutation: Mutation) -> Path:
    """Compiles the changed unit and links it in place of the unchanged one."""
    source = (KERNELS / mutation.header).read_text()
    assert source.count(mutation.old) == 1, f"{mutation.header} no longer has: {mutation.old!r}"
    changed = folder / mutation.header
    changed.parent.mkdir(parents=True)
    changed.write_text(source.replace(mutation.old, mutation.new))

    command = _compile_command(build, mutation.driver)
    command[command.index("-o") + 1] = str(folder / "unit.o")
    command.insert(1, f"-I{folder}")
    subprocess.run(command, cwd=build, check=True)

    library = build / "tests" / "emulator" / "library"
    emulator = mutation.driver.replace("emulated_driver", "emu")
    sanitizers = [flag for flag in command if flag.startswith("-fsanitize")]
    subprocess.run(
        [
            *(command[0], *sanitizers, "-fopenmp", "-o", folder / "driver"),
            folder / "unit.o",
            library / "CMakeFiles" / f"{mutation.driver}.dir" / "driver.cpp.o",
            library / f"lib{mutation.driver}_library.a",
            library.parent / f"lib{emulator}.a",
        ],
        check=True,
    )
    return folder / "driver"


@pytest.fixture(scope="session")
def mutants(build: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Path]]:
    """All mutants, compiled side by side while the first ones are tested."""
    pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
    return {
        mutation.name: pool.submit(_mutant, build, tmp_path_factory.mktemp("mutant"), mutation)
        for mutation in MUTATIONS
    }


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation: Mutation, mutants: dict[str, Future[Path]]) -> None:
    driver = mutants[mutation.name].result()
    cases = [case._replace(seed=seed) for seed in SEEDS for case in CASES]
    status, output = run(
        driver, cases, ASAN_OPTIONS="detect_leaks=0", TSAN_OPTIONS="halt_on_error=1"
    )
    assert status != 0, f"nothing noticed {mutation.name}"
    assert mutation.report in output, output


@pytest.mark.parametrize("driver", sorted({mutation.driver for mutation in MUTATIONS}))
def test_unchanged_kernel_passes(build: Path, driver: str) -> None:
    """The mutants' cases are right without a mutation: it is the mutation that is caught."""
    cases = [case._replace(seed=seed) for seed in SEEDS for case in CASES]
    status, output = run(
        build / driver, cases, ASAN_OPTIONS="detect_leaks=0", TSAN_OPTIONS="halt_on_error=1"
    )
    assert status == 0, output
