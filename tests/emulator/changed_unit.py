"""A kernel unit of a driver compiled anew, with changed copies of its headers."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

# Chooses a mutation at run time; 0 is none.
SWITCH = """
#include <cstdlib>
inline const int mutation = [] {
  const char* const number = std::getenv("MUTATION");
  return number == nullptr ? 0 : std::atoi(number);
}();
"""


def driver_name(sanitizer: str) -> str:
    return "_".join(filter(None, ["emulated_driver", sanitizer]))


def compile_command(build: Path, sanitizer: str, unit: str) -> list[str]:
    """What compiled the unit; its source is the last word."""
    wanted = f"{driver_name(sanitizer)}_library_generated/{unit}.cpp"
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(wanted):
            command = shlex.split(entry["command"])
            if "ccache" in Path(command[0]).name:
                command = command[1:]
            return command
    raise AssertionError(f"the test build does not compile {wanted}")


def compile_unit(
    folder: Path, unit: Path, command: list[str], sanitizer: str, switch: str = SWITCH
) -> Path:
    """Compiles `unit`, which finds changed headers in `folder`, with the command of the unchanged
    one."""
    if not (folder / "switch.h").exists():
        (folder / "switch.h").write_text(switch)
    command = list(command)
    result = unit.with_suffix(".o")
    command[command.index("-o") + 1] = str(result)
    command[-1] = str(unit)
    # What is looked for are accesses of heap blocks; the rest takes most of the time.
    flags = ["-fno-sanitize=undefined", "--param=asan-stack=0"]
    command[1:1] = [f"-I{folder}", "-include", str(folder / "switch.h")]
    command += ["-g0", *(flags if sanitizer == "asan" else [])]
    subprocess.run(command, cwd=folder, check=True)
    return result


def link_driver(
    build: Path, folder: Path, objects: list[Path], command: list[str], sanitizer: str
) -> Path:
    """A driver with these objects in place of those of the same units, which `command` compiled."""
    driver = driver_name(sanitizer)
    library = build / "tests" / "emulator" / "library"
    emulator = driver.replace("emulated_driver", "emu")
    sanitizers = [flag for flag in command if flag.startswith("-fsanitize")]
    subprocess.run(
        [
            # To read the debug information of all other units would take most of the time.
            *(command[0], *sanitizers, "-fopenmp", "-Wl,--strip-debug", "-o", folder / "driver"),
            *objects,
            library / "CMakeFiles" / f"{driver}.dir" / "driver.cpp.o",
            library / f"lib{driver}_library.a",
            library.parent / f"lib{emulator}.a",
        ],
        check=True,
    )
    return folder / "driver"
