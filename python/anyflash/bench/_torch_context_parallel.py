"""PyTorch's own context parallelism (torch.distributed.tensor.experimental), on the ranks of ours.

It is a prototype, so anything in it may fail. After each step the ranks agree whether it failed on
one of them, so that all give up together. A rank that fails while others wait for its messages ends
the run, when the group's timeout is over.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from anyflash.bench._array_libraries import Unsupported
from anyflash.bench._cases import Case
from anyflash.bench._measure import TOLERANCE, Disagreement, refusal

EXPERIMENTAL = "torch.distributed.tensor.experimental"
KERNELS = {"torch-cp": "FLASH_ATTENTION", "torch-cp-cudnn": "CUDNN_ATTENTION"}
ROTATIONS = {"ring": "alltoall", "gather": "allgather"}  # what it calls our methods
T = TypeVar("T")


@dataclass(frozen=True)
class Shared:
    """A case on a rank: its rows of q, k, v and of dout, and where these lie in the whole. `ours`
    is what anyflash gave for them: the output, or the gradients."""

    case: Case
    tensors: Sequence[Any]
    positions: Any
    ours: tuple[Any, ...]
    device: Any


class RanksFailed(Exception):
    """A step failed on one of the ranks at least."""

    def __init__(self, why: dict[str, str]) -> None:
        super().__init__(str(why))
        self.why = why


def result(
    name: str, shared: Shared, measured: Callable[[Callable[[], Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A peer's figures, or why there are none; every rank calls it. Where it does not take grouped
    heads, keys and values are repeated for it, as its user would do."""
    case = shared.case
    if case.lengths:
        return {"unsupported": "no packed sequences"}
    if case.method not in ROTATIONS:
        return {"unsupported": f"no {case.method}"}
    found = _attempt(KERNELS[name], shared, measured, repeats=False)
    if "seconds" in found or case.kv_heads == case.heads:
        return found
    repeated = _attempt(KERNELS[name], shared, measured, repeats=True)
    return {**repeated, "repeated_keys": True} if "seconds" in repeated else repeated


def _attempt(
    kernel: str,
    shared: Shared,
    measured: Callable[[Callable[[], Any]], dict[str, Any]],
    repeats: bool,
) -> dict[str, Any]:
    with ExitStack() as stack:
        # Caught within: after a failure PyTorch 2.11 would keep its own attention in place.
        try:
            call = _agreed(lambda: _prepared(kernel, shared, repeats, stack))
            _agreed(lambda: _compare(shared, call()))
            guarded = _Guarded(call)
            figures = measured(guarded)
            _agreed(guarded.tell)
        except RanksFailed as failed:
            return failed.why
        return figures


def _agreed(step: Callable[[], T]) -> T:
    """What a step gives; RanksFailed on every rank where it fails on one."""
    import torch.distributed as dist

    value: Any = None
    mine: dict[str, str] | None = None
    try:
        value = step()
    except Exception as error:  # whatever other people's code raises
        mine = refusal(error)
    whys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whys, mine)
    for why in whys:
        if why is not None:
            raise RanksFailed(why)
    given: T = value
    return given


class _Guarded:
    """A call that does nothing from its first failure on, which is told when all ranks have ended
    their timing: until then they wait for this one's times."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._error: Exception | None = None

    def __call__(self) -> None:
        if self._error is None:
            try:
                self._call()
            except Exception as error:
                self._error = error

    def tell(self) -> None:
        if self._error is not None:
            raise self._error


def _prepared(kernel: str, shared: Shared, repeats: bool, stack: ExitStack) -> Callable[[], Any]:
    """A call within PyTorch's contexts, which the stack leaves."""
    torch: Any = importlib.import_module("torch")
    choice: Any = importlib.import_module("torch.nn.attention")
    functional: Any = importlib.import_module("torch.nn.functional")
    case = shared.case
    group = case.heads // case.kv_heads
    options = {"is_causal": case.causal}
    if group > 1 and not repeats:
        options["enable_gqa"] = True

    def attend(q: Any, k: Any, v: Any) -> Any:
        if repeats:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        # Looked up here, since the context has put another function in its place.
        return functional.scaled_dot_product_attention(q, k, v, **options)

    if not torch.equal(stack.enter_context(_context(shared)), shared.positions):
        raise Unsupported("its ranks have other rows")
    stack.enter_context(choice.sdpa_kernel(getattr(choice.SDPBackend, kernel)))
    # (batch, heads, rows, d), contiguous, which its ring would make of keys and values anyway.
    *inputs, dout = (x.detach().transpose(1, 2).contiguous() for x in shared.tensors)
    if case.op == "forward":
        return lambda: (attend(*inputs),)
    leaves = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


@contextmanager
def _context(shared: Shared) -> Iterator[Any]:
    """context_parallel, in which attention takes a rank's rows, with the positions of its ranks'
    rows."""
    torch: Any = importlib.import_module("torch")
    experimental: Any = importlib.import_module(EXPERIMENTAL)
    options: Any = importlib.import_module(f"{EXPERIMENTAL}._attention")
    where = torch.arange(shared.case.rows, device=shared.device)[None]
    options.set_rotate_method(ROTATIONS[shared.case.method])
    try:
        with experimental.context_parallel(
            _mesh(shared.device.type), buffers=[where], buffer_seq_dims=[1]
        ):
            yield where[0]
    finally:
        options.set_rotate_method("allgather")


@functools.cache  # over NCCL, a mesh may make communicators of its own
def _mesh(device_type: str) -> Any:
    import torch.distributed as dist

    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    return meshes.init_device_mesh(device_type, (dist.get_world_size(),))


def _compare(shared: Shared, found: Sequence[Any]) -> None:
    for ours, heads_first in zip(shared.ours, found, strict=True):
        a, b = ours.detach(), heads_first.detach().transpose(1, 2)
        if a.shape != b.shape:
            raise Disagreement(f"shape {tuple(b.shape)} where anyflash has {tuple(a.shape)}")
        error = float((a - b).float().norm() / a.float().norm())
        if not error <= TOLERANCE:
            raise Disagreement(f"its result differs from anyflash's by {error:.2g} of the norm")
