"""A wheel as users get it: its name, what it holds, and in empty environments.

    python -m pip install -r tests/requirements/wheel.txt
    python -m pytest tests/wheel --wheel build/dist/anyflash-*.whl

The environments are made with the Python that runs the tests, and packages come from the index.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).parents[2]
MOST_BYTES = 100_000_000
NEEDED = re.compile(
    r"lib(c|m|gcc_s|pthread|dl|rt|anyflash|gomp)(-[0-9a-f]+)?\.so(\.[\d.]+)?|ld-linux-.*\.so\.\d"
)
TORCH_CPU = ("torch", "numpy")
# By package, of tests/requirements: the pins of the oldest that anyflash works with.
OLDEST = {
    name: re.findall(rf"^{name}==.*", text, re.MULTILINE)
    for text, names in [
        ((ROOT / "tests/requirements/oldest-torch.txt").read_text(), ("torch", "numpy")),
        ((ROOT / "tests/requirements/oldest.txt").read_text(), ("jax", "jaxlib", "numpy")),
    ]
    for name in names
}
# Pythons for which these were not made.
NO_OLDEST = {"oldest numpy": (3, 13), "oldest torch": (3, 14), "oldest jax": (3, 14)}


def version() -> str:
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def libraries(unpacked: Path) -> dict[str, Path]:
    return {path.name: path for path in unpacked.glob("anyflash/**/*.so*") if path.is_file()}


def dynamic(path: Path, tag: str) -> list[str]:
    """The strings of all entries DT_`tag`."""
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        attribute = tag.lower()
        return [getattr(x, attribute) for x in section.iter_tags(f"DT_{tag}")]


def exported(path: Path) -> set[str]:
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(section, SymbolTableSection)
        return {
            symbol.name
            for symbol in section.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
        }


def test_name(wheel: Path) -> None:
    """One file for every CPython from 3.10 on, and for older systems than the one that built it."""
    pattern = rf"anyflash-{re.escape(version())}-cp310-abi3-(manylinux_2_\d+_\w+\.?)+\.whl"
    assert re.fullmatch(pattern, wheel.name)


def test_size(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize(
    "pattern",
    [
        "anyflash/py.typed",
        "anyflash/_core.pyi",
        "anyflash/_api/keywords.pyi",
        "anyflash/_core.abi3.so",
        "anyflash/lib/libanyflash.so*",
        "anyflash/lib/libanyflash_tvm_ffi.so",
        "anyflash/lib/cmake/anyflash/anyflash-config.cmake",
        "anyflash/lib/pkgconfig/anyflash.pc",
        "anyflash/include/anyflash/anyflash.h",
        "anyflash/include/anyflash/attention.h",
        "anyflash/include/dlpack/dlpack.h",
        "anyflash-*.dist-info/licenses/LICENSE",
    ],
)
def test_holds(unpacked: Path, pattern: str) -> None:
    assert list(unpacked.glob(pattern))


def test_says_what_it_holds(unpacked: Path) -> None:
    """The SBOM of the build backend, after the repair, which lists what it has added itself."""
    (path,) = unpacked.glob("anyflash-*.dist-info/sboms/anyflash.cdx.json")
    versions = {
        part["name"]: part.get("version") for part in json.loads(path.read_text())["components"]
    }
    assert versions.keys() >= {"DLPack", "nanobind", "libstdc++"}
    assert all(versions.values()), versions
    for name in versions:  # with the terms of each
        text = f"anyflash-*.dist-info/licenses/third_party/licenses/{name.replace(' ', '_')}.txt"
        assert list(unpacked.glob(text)), name
    (library,) = unpacked.glob("anyflash/lib/libanyflash.so*")
    has_gpu_code = b".nv_fatbin" in library.read_bytes()
    assert versions.keys() >= {"CUTLASS", "CUDA"} or not has_gpu_code


def test_holds_nothing_else(unpacked: Path) -> None:
    """No sources of kernels, no caches, no tests."""
    for path in unpacked.rglob("*"):
        assert path.suffix not in {".cu", ".cpp", ".pyc", ".o"}, path
        assert path.name not in {"tests", "tuner.py", "tuned_tiles.py"}, path


def test_needs_no_standard_library_of_the_system(unpacked: Path) -> None:
    """But for the C library; above all not libstdc++, of which a program may have loaded an older
    one."""
    found = libraries(unpacked)
    assert "_core.abi3.so" in found
    for path in found.values():
        for name in dynamic(path, "NEEDED"):
            assert NEEDED.fullmatch(name), f"{path.name} needs {name}"
        for runpath in dynamic(path, "RUNPATH") + dynamic(path, "RPATH"):
            assert all(entry.startswith("$ORIGIN") for entry in runpath.split(":") if entry)


def test_shows_no_standard_library(unpacked: Path) -> None:
    """A second libstdc++ in a process is harmless as long as nobody can see it."""
    found = libraries(unpacked)
    assert exported(found["_core.abi3.so"]) == {"PyInit__core"}
    (library,) = [path for name, path in found.items() if re.match(r"libanyflash[-.]", name)]
    shown = exported(library)
    assert "anyflash_forward" in shown
    assert not {name for name in shown if "anyflash" not in name}
    shown = exported(found["libanyflash_tvm_ffi.so"])
    assert "__tvm_ffi_forward" in shown
    assert not {name for name in shown if not name.startswith("__tvm_ffi_")}


def run(python: Path, *command: str) -> str:
    done = subprocess.run(
        [python, *command], capture_output=True, text=True, cwd=python.parent, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, wheel: Path, *packages: str) -> Path:
    """Its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--only-binary=:all:")
    run(python, *pip, str(wheel), *packages)
    return python


# The result of uniform attention is the mean of the values.
NUMPY = """
import numpy as np, anyflash
q = np.zeros((1, 3, 2, 8), np.float32)
v = np.random.default_rng(0).standard_normal(q.shape).astype(np.float32)
out = anyflash.attention(q, q, v)
assert np.allclose(out, v.mean(1, keepdims=True), atol=1e-6)
"""
TORCH = """
v = torch.randn(1, 3, 2, 8, requires_grad=True)
q = torch.zeros(1, 3, 2, 8)
out = anyflash.torch.attention(q, q, v)
assert torch.allclose(out, v.mean(1, keepdim=True).expand_as(v), atol=1e-6)
out.sum().backward()
assert torch.allclose(v.grad, torch.ones_like(v), atol=1e-5)
assert str(torch.ops.anyflash.forward.default._schema)
"""
JAX = """
import jax, anyflash.jax
v = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
q = jax.numpy.zeros_like(v)
total = lambda v: anyflash.jax.attention(q, q, v).sum()
assert jax.numpy.allclose(jax.jit(jax.grad(total))(v), 1.0, atol=1e-5)
"""


def versions(*names: str) -> tuple[str, ...]:
    return tuple(pin for name in names for pin in OLDEST[name])


@pytest.mark.parametrize(
    ("packages", "programs"),
    [
        ((), ("import anyflash; assert anyflash.build_info()['kernels']",)),
        (("numpy",), (NUMPY,)),
        (
            TORCH_CPU,
            ("import anyflash.torch, torch" + TORCH, "import torch, anyflash.torch" + TORCH),
        ),
        (("jax",), (JAX,)),
        (("numpy==1.26.4",), (NUMPY,)),
        (versions("torch", "numpy"), ("import anyflash.torch, torch" + TORCH,)),
        (versions("jax", "jaxlib", "numpy"), (JAX,)),
    ],
    ids=["alone", "numpy", "torch", "jax", "oldest numpy", "oldest torch", "oldest jax"],
)
def test_in_an_empty_environment(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    wheel: Path,
    packages: tuple[str, ...],
    programs: tuple[str, ...],
) -> None:
    if sys.version_info >= NO_OLDEST.get(request.node.callspec.id, (4,)):
        pytest.skip("there is none for this Python")
    python = environment(tmp_path / "env", wheel, *packages)
    for program in programs:
        run(python, "-c", program)
    assert f"anyflash {version()}" in run(python, "-m", "anyflash", "doctor")


def test_an_engine_links_it(tmp_path: Path, wheel: Path) -> None:
    """From C, against the library that the repair has changed."""
    python = environment(tmp_path / "env", wheel)
    include = run(python, "-c", "import anyflash; print(anyflash.get_include())").strip()
    library = str(Path(include).parent / "lib")
    program = tmp_path / "attention"
    source = ROOT / "cpp/examples/c/attention.c"
    links = ("-L", library, "-lanyflash", f"-Wl,-rpath,{library}", "-lm")
    command = ("cc", "-std=c99", source, "-I", include, "-o", program, *links)
    for step in (command, (program,)):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "difference of the output" in done.stdout


def test_every_kernel_is_there(tmp_path: Path, wheel: Path) -> None:
    """Of a wheel with code for GPUs."""
    python = environment(tmp_path / "env", wheel)
    info = json.loads(run(python, "-m", "anyflash", "--json"))
    if info["cuda"] is None:
        pytest.skip("a wheel without code for GPUs")
    # On aarch64 also for Jetson and DRIVE: Orin, and Thor by its number of CUDA 12 or 13.
    jetson = ["sm_87"] if platform.machine() == "aarch64" else []
    archs = [arch for arch in info["cuda"]["archs"] if arch not in {"sm_101", "sm_110"}]
    assert archs == ["sm_80", "sm_90", "sm_100", "sm_120", *jetson, "compute_80", "sm_90a"]
    assert len(info["cuda"]["archs"]) == len(archs) + len(jetson)
    recorded = json.loads((ROOT / "tests/sass/recorded.json").read_text())["kernels"]
    names = {kernel["name"] for kernel in info["kernels"]}
    assert not set(recorded) - names
    listed = run(python, "-m", "anyflash")
    assert "sm80" in listed
