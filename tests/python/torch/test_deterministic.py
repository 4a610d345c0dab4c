"""deterministic= and PyTorch's own setting: what of them reaches the backward."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from calls.torch_calls import Call


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["direct", "options"])
def test_deterministic_follows_torch(
    torch: ModuleType, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    """The default; an explicit one counts."""
    from anyflash.torch import _problem

    seen = []

    def spy(p: Any, *arguments: Any, backward: Any = _problem.backward) -> Any:
        seen.append(p.deterministic)
        return backward(p, *arguments)

    monkeypatch.setattr(_problem, "backward", spy)
    call = Call()
    for algorithms in (False, True):
        torch.use_deterministic_algorithms(algorithms)
        try:
            for given in (None, False, True):
                call.attend(call.tensors(), deterministic=given, **options).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True, False, True]


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_kernel(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    from anyflash import _core
    from anyflash._call.backward import Backward

    seen = []

    def spy(self: Any, *arguments: Any, run: Any = Backward.run) -> Any:
        seen.append(arguments[-1].deterministic)
        return run(self, *arguments)

    def direct(*arguments: Any, backward: Any = _core.backward_direct) -> Any:
        seen.append(arguments[-2])
        return backward(*arguments)

    monkeypatch.setattr(Backward, "run", spy)
    monkeypatch.setattr(_core, "backward_direct", direct)
    call = Call()
    for options in ({}, {"softcap": 30.0}):
        call.attend(call.tensors(), deterministic=deterministic, **options).sum().backward()
    assert seen == [deterministic] * 2
