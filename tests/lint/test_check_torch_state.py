"""The checker finds who asks PyTorch about its state beside the one module, and nobody else."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from check_torch_state import HOME, questions
from checker_runs import findings

CHECKER = Path(__file__).with_name("check_torch_state.py")
run = functools.partial(findings, CHECKER)


@pytest.mark.parametrize(
    "line",
    [
        "if torch.is_grad_enabled():",
        "if not sys.modules['torch'].compiler.is_compiling():",
        "if torch.is_autocast_enabled(device) and torch.jit.is_tracing():",
        "ask = torch._C._is_any_autocast_enabled",
        "from torch import Tensor, get_autocast_dtype",
        "from torch.autograd.forward_ad import _current_level",
        "deterministic = torch.are_deterministic_algorithms_enabled()",
        "wait = not torch.cuda.is_current_stream_capturing()",
    ],
)
def test_questions(tmp_path: Path, line: str) -> None:
    text = f"import torch\n{line}\n" + "    pass\n" * line.endswith(":")
    found = run(tmp_path, "python/anyflash/x.py", text)
    assert found
    assert all(x.startswith("python/anyflash/x.py:2: ") and HOME in x for x in found)


@pytest.mark.parametrize(
    "text",
    [
        "from anyflash.torch._dispatch_state import is_compiling\nis_compiling()\n",
        "with torch.set_grad_enabled(True), torch.autocast('cpu'):\n    pass\n",
        "torch.compiler.reset()\nx.is_inference()\n",
        "sys.modules['paddle'].is_grad_enabled()\n",
        "# torch.is_grad_enabled()\n",
    ],
)
def test_no_questions(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, "python/anyflash/x.py", text) == []


def test_elsewhere(tmp_path: Path) -> None:
    """The one module may ask, and so may tests."""
    text = "torch.is_grad_enabled()\n"
    assert run(tmp_path, HOME, text) == run(tmp_path, "tests/python/x.py", text) == []


def test_the_module_asks() -> None:
    """Were it elsewhere, or its questions other ones, nothing would be checked."""
    text = (CHECKER.parents[2] / HOME).read_text()
    assert {"is_compiling", "is_grad_enabled", "get_autocast_dtype"} <= {
        question for _, question in questions(text)
    }
