"""Running a case of the backward, and what must hold after it."""

from __future__ import annotations

from typing import Any

from backends import capi
from backends.capi import Backend
from backends.tensors import Tensor
from cases.case import is_sampled
from cases.gradient_case import EMULATED_TILES, Call, GradientCase
from oracle.gradients import check_gradients
from run.forward import LEAST_SCALE, OTHER_ISA_SCORES, bits


def backward(backend: Backend, case: GradientCase, **changes: Any) -> Call:
    """`changes` are options of the forward."""
    call = case.call()
    call.options.update(changes)
    run_call(backend, call)
    return call


def run_call(backend: Backend, call: Call) -> None:
    tensors = [call.tensors[name] for name in capi.BACKWARD_TENSORS]
    backend.backward(*tensors, gradient=call.gradient, **call.options)


def supports_backward(name: str, case: GradientCase) -> bool:
    """Whether the backend can run the case, and should: some are slow."""
    forward = case.forward
    sampled = is_sampled(case, 2)
    if name.startswith("cpu"):
        some = sampled and case.everywhere and forward.scores <= OTHER_ISA_SCORES
        return not forward.gpu_only and (name == "cpu" or some)
    if forward.dtype not in ("fp16", "bf16") or forward.cpu_only:
        return False
    if name == "cuda":
        return True
    try:
        row = backward_row(capi.backend(name), case)
    except capi.Unavailable:
        return True  # the test then fails and says what to do
    if row is None or not sampled or not case.everywhere or forward.tiles > EMULATED_TILES:
        return False
    return name != "emulated-sm90" or row.arch == "sm90"  # what else it runs is emulated-sm80's


def backward_row(backend: Backend, case: GradientCase) -> capi.Row | None:
    forward = case.forward
    return backend.row(
        forward.dtype,
        forward.d,
        forward.head_dim_v,
        forward.features.variants,
        op="backward",
        positive_scale=forward.scale is None or forward.scale >= LEAST_SCALE,
    )


def verify_backward(backend: Backend, case: GradientCase) -> None:
    old = backend.library.launches()
    call = backward(backend, case)
    launched = {
        backend.usual(n): c - old[n] for n, c in backend.library.launches().items() if c != old[n]
    }
    row = backward_row(backend, case)
    assert row is not None, "no kernel for it in this build"
    outputs = call.outputs()
    nothing = not any(tensor.view.size for tensor in outputs.values())
    assert launched == ({} if nothing else {row.name: 1})

    bounds = case.expected().bounds
    bounds = {name: bound for name, bound in bounds.items() if name in outputs}
    check_gradients({name: tensor.view for name, tensor in outputs.items()}, bounds)
    for name, tensor in outputs.items():
        tensor.check_canaries(name)
    _check_unchanged(call, case.call())


def _check_unchanged(after: Call, before: Call) -> None:
    """Inputs, and outputs that are the forward's alone."""
    outputs = after.outputs()
    for old, new in zip(before, after, strict=True):
        for name, tensor in old.items():
            if isinstance(tensor, Tensor) and not (name in outputs and new[name] is outputs[name]):
                assert bits(tensor.storage) == bits(new[name].storage), f"{name} was written to"
