"""The layout of a kernel of the Hugging Face Hub, loaded by the package `kernels`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "wheel" / "hub_kernel.py"

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
q = torch.randn((1, 5, 2, 8), generator=torch.Generator().manual_seed(1), requires_grad=True)
out = kernel.flash_attn_func(q, q, q, causal=True)
out.sum().backward()
rows = [q.transpose(1, 2)] * 3
right = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
print(json.dumps({
    "error": float((out - right).abs().max()),
    "has_gradient": q.grad is not None,
    "names": [n for n in ("varlen_func", "with_kvcache") if hasattr(kernel, "flash_attn_" + n)],
    "files": sorted({m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "anyflash"}),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hub")
    paths = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(SCRIPT), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
    yield folder
    shutil.rmtree(folder)  # with all kernels, hundreds of MB


def variant_of(folder: Path) -> Path:
    (found,) = (folder / "build").glob("torch-stable-abi24-cpu-*")
    return found


def test_it_computes(folder: Path) -> None:
    pytest.importorskip("kernels")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-5 and found["has_gradient"]
    assert found["names"] == ["varlen_func", "with_kvcache"]
    assert {Path(file).is_relative_to(variant_of(folder)) for file in found["files"]} == {True}


def test_a_second_anyflash_is_refused(folder: Path) -> None:
    import anyflash

    path = variant_of(folder) / "__init__.py"
    spec = importlib.util.spec_from_file_location("_anyflash_other", path)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"has been imported; expected .*one anyflash$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert sys.modules["anyflash"] is anyflash
