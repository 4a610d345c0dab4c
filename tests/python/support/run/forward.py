"""Running a case on a backend, and what must hold after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from backends import capi
from backends.capi import Backend
from backends.tensors import Tensor
from cases.auxiliary import OUTPUTS
from cases.case import EMULATED_TILES, Case, Tensors, is_sampled
from oracle.attention import Array, check

LEAST_SCALE = 1e-20  # smaller ones are 0 on a GPU


def call(backend: Backend, case: Case, **changes: Any) -> tuple[Tensors, dict[str, Any]]:
    """The tensors, and the options with the outputs among them."""
    tensors, options = case.tensors(), case.options() | changes
    backend.forward(*tensors, **options)
    return tensors, options


def run(backend: Backend, case: Case, **changes: Any) -> Tensors:
    return call(backend, case, **changes)[0]


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    for name in ("out", "lse"):
        same = bits(getattr(actual, name).view) == bits(getattr(expected, name).view)
        assert same, f"{name} differs"


OTHER_ISA_SCORES = 1 << 16


def supports(name: str, case: Case) -> bool:
    """Whether the backend can run the case, and should: some are slow, and `cpu` runs them all."""
    if name.startswith("cpu"):
        some = case.scores <= OTHER_ISA_SCORES and is_sampled(case, 2)
        return not case.gpu_only and (name == "cpu" or some)
    if case.dtype not in ("fp16", "bf16") or case.cpu_only:
        return False
    if name == "cuda":
        return True
    try:
        row = expected_row(capi.backend(name), case)
    except capi.Unavailable:
        return True  # the test then fails and says what to do
    if row is None or case.tiles > EMULATED_TILES or not is_sampled(case, 2):
        return False
    return name != "emulated-sm90" or row.arch == "sm90"  # what else it runs is emulated-sm80's


def expected_row(backend: Backend, case: Case) -> capi.Row | None:
    positive = case.scale is None or case.scale >= LEAST_SCALE
    variants = case.features.variants
    return backend.row(case.dtype, case.d, case.head_dim_v, variants, positive_scale=positive)


def verify(backend: Backend, case: Case) -> None:
    old = backend.library.launches()
    tensors, options = call(backend, case)
    launched = {
        backend.usual(n): c - old[n] for n, c in backend.library.launches().items() if c != old[n]
    }

    row = expected_row(backend, case)
    assert row is not None, "no kernel for it in this build"
    if case.empty:
        assert not launched, "a kernel was launched for nothing"
    else:
        assert launched == {row.name: 1}

    max_logits = options.get("max_logits")
    logits = None if max_logits is None else max_logits.view
    check(tensors.out.view, tensors.lse.view, case.expected(), logits)
    if mask := options.get("dropout_mask"):
        kept = case.problem().dropout_mask().astype(np.uint8)
        wrong = np.argwhere(mask.view.view(np.uint8) != kept)[:3].tolist()
        assert not wrong, f"dropout_mask: another mask, or a byte beyond 1, first at {wrong}"

    results = {"out": tensors.out, "lse": tensors.lse}
    results |= {name: options[name] for name in OUTPUTS if name in options}
    for name, tensor in results.items():
        tensor.check_canaries(name)
    before = dict(zip("qkv", case.tensors(), strict=False)) | case.options()
    after = dict(zip("qkv", tensors, strict=False)) | options
    for name, tensor in before.items():
        if isinstance(tensor, Tensor) and name not in OUTPUTS:
            same = bits(tensor.storage) == bits(after[name].storage)
            assert same, f"{name} was written to"
