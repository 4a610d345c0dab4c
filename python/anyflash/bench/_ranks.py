"""The preset context-parallel: a sequence that several devices share.

Ranks are processes, one on each GPU over NCCL, or on the CPU over gloo. Where there are fewer GPUs
than ranks, the ring's work is timed on one GPU ("alone"), rank after rank. That is all hops, but
nothing is sent, and there is no moment in which that would begin. "one device" is the whole
sequence on a single device, by the number of ranks. PyTorch's own context parallelism runs on the
same ranks.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from anyflash.bench import _torch_context_parallel
from anyflash.bench._cases import ITEM_SIZES, Case
from anyflash.bench._measure import OWN, summary
from anyflash.bench._timing import Budget
from anyflash.bench._torch_context_parallel import KERNELS, Shared

ONE_DEVICE = "one device"
_TIMEOUT_SECONDS = 120.0
# Long samples: the host is ahead of the GPU then, as in a model.
_BUDGET = Budget(contender_seconds=0.5, round_seconds=0.1, fewest=3, most=10)
_LONG_SECONDS = 0.5  # a call that needs no second warm-up
_POLL_SECONDS = 0.2  # how often the ranks' results are looked for


def measured(
    cases: Sequence[Case], backend: str, peers: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Entries of the cases as they come, by ranks and transport. Peers are those that ranks can
    run; others are left out."""
    peers = [name for name in peers if name in KERNELS]
    groups: dict[tuple[int, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.ranks, case.transport), []).append(case)
    for (ranks, transport), group in groups.items():
        if transport == "alone":
            found = _alone(group, backend)
        else:
            found = _together(_Group(ranks, group, backend, peers))
        for case, results in zip(group, found, strict=True):
            sizes = {name: value for name, value in asdict(case).items() if name != "lengths"}
            lengths = {"lengths": list(case.lengths)} if case.lengths else {}
            yield {
                "key": case.key, "labels": case.labels, **sizes, "flop": case.flop, "bytes": 0,
                **lengths, "sent_bytes": sent_bytes(case), "results": results,
            }  # fmt: skip


def sent_bytes(case: Case) -> int:
    """The most that a rank's ring sends in a call: keys and values to every other rank, and in a
    backward these again, and gradients of others' keys. Of a causal mask, by zigzag, the last rank
    sends all of its keys and half of the gradients, and the first one the reverse. Of packed
    sequences on a GPU all is sent, since the host does not know their lengths."""
    if case.method != "ring":
        return 0
    rows = case.rows if case.lengths else case.batch * case.rows
    elements = rows // case.ranks * case.kv_heads * (case.d + case.value_dim)
    item = ITEM_SIZES[case.dtype]
    gradient = max(item, 4)
    if case.op == "forward":
        each = item
    elif case.causal and not case.lengths:
        each = max(2 * item + gradient // 2, item + gradient)
    else:
        each = 2 * item + gradient
    return (case.ranks - 1) * elements * each


# -- one device
def _alone(cases: Sequence[Case], backend: str) -> Iterator[dict[str, Any]]:
    device = _device(0, backend)
    for case in cases:
        of_ranks = [_virtual_call(case, rank, device) for rank in range(case.ranks)]
        *samples, whole = _in_turns([*of_ranks, _whole_call(case, device)])
        del of_ranks
        _release(device)
        slowest = max(samples, key=statistics.median)
        total = sum(statistics.median(s) for s in samples)
        results = {
            OWN: summary(slowest) | {"all_ranks_seconds": total},
            ONE_DEVICE: summary([s / case.ranks for s in whole]),
        }
        _tell("alone", case, results)
        yield results


def _virtual_call(case: Case, rank: int, device: Any) -> Callable[[], Any]:
    """The ring of one rank, which finds random keys and values wherever others' would arrive."""
    from anyflash._call.options import AttentionOptions
    from anyflash.torch.distributed._arguments import read_whole
    from anyflash.torch.distributed._autograd import Attention, Call
    from anyflash.torch.distributed._layout import Layout
    from anyflash.torch.distributed._problem import Given
    from anyflash.torch.distributed._ring import Ring
    from anyflash.torch.distributed._transport import Group

    class Here(NamedTuple):
        """An exchange that ended before it began."""

        received: Any

        def wait(self) -> Any:
            return self.received

    kept: dict[range, Any] = {}  # keys and values by hops: every call finds the same

    class LocalRing(Ring):
        def _exchange(self, hop: int, what: str, tag: int, send: Any, receive: Any) -> Any:
            return Here(None if receive is None else receive.data)

        def _start(self, exchanges: Any) -> None:
            pass

        def _begin(self, hops: range, own: Any) -> Any:
            if hops not in kept:
                kept[hops] = super()._begin(hops, own)
                for x in kept[hops].keys[:2]:
                    x.normal_()
            return kept[hops]

    group, layout = Group(None, rank, case.ranks), Layout("zigzag", case.ranks, 64)
    whole = read_whole(AttentionOptions(causal=case.causal), (case.seqlen, case.seqlen), False)
    tensors = _tensors(case, layout.rows(rank, case.seqlen), device)
    call = Call(group, layout, LocalRing, whole, Given(), None, tensors[0].dtype)
    apply: Any = Attention.apply
    return _call(case, lambda *x: apply(call, *x, None, None, None)[0], tensors)


# -- ranks
class _Group(NamedTuple):
    """Ranks, and what they measure."""

    ranks: int
    cases: list[Case]
    backend: str
    peers: list[str]


def _together(group: _Group) -> Iterator[dict[str, Any]]:
    """Results as they come. What came before a rank failed comes, too."""
    mp: Any = importlib.import_module("torch.multiprocessing")
    failure: Exception | None = None
    ended, count = False, 0
    with tempfile.TemporaryDirectory() as folder:
        running = mp.spawn(_rank, (folder, group), nprocs=group.ranks, join=False)
        try:
            while not ended:
                try:
                    ended = running.join(_POLL_SECONDS)
                except Exception as error:
                    failure, ended = error, True
                while (path := _result_path(folder, count)).exists():
                    yield json.loads(path.read_text())
                    count += 1
        finally:
            for process in running.processes:
                process.kill()  # those that ended are not touched
    if failure is not None:
        raise failure


def _result_path(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.json"


def _rank(rank: int, folder: str, group: _Group) -> None:
    """A process's part."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    cases = group.cases
    device = _device(rank, group.backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        cases[0].transport,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=group.ranks,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )
    for number, case in enumerate(cases):
        results = rank_results(case, rank, device, group.peers)
        if rank == 0:
            _tell(f"{number + 1}/{len(cases)}", case, results)
            unfinished = Path(folder) / "unfinished"
            unfinished.write_text(json.dumps(results))
            unfinished.replace(_result_path(folder, number))
    dist.barrier()
    dist.destroy_process_group()
    if device.type == "cpu":
        # Gloo's threads may drop tensors while the interpreter ends, which aborts the process
        # (github.com/pytorch/pytorch/issues/190489).
        os._exit(0)


def rank_results(
    case: Case, rank: int, device: Any, peers: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Of this rank, in the default process group; the first one's are the case's."""
    import torch.distributed as dist

    from anyflash.torch.distributed import ContextParallel

    cp = ContextParallel(method=case.method, layout="zigzag")
    positions = cp.positions(case.rows, device)
    tensors = _tensors(case, positions.numel(), device)
    call = _call(case, _attention(case, cp, device, seqlen=case.rows), tensors)

    def figures(call: Callable[[], Any]) -> dict[str, Any]:
        def slowest(value: float) -> float:
            return _largest(value, device)

        peak = slowest(_peak_bytes(call, device))
        return summary(_seconds(call, slowest)) | {"peak_bytes": int(peak)}

    ours = {OWN: figures(call)}
    beside = {}
    if peers:
        first = call()
        outputs = first if isinstance(first, tuple) else (first,)
        shared = Shared(case, tensors, positions, outputs, device)
        for name in peers:
            _release(device)
            beside[name] = _torch_context_parallel.result(name, shared, figures)
        del first, outputs, shared
    del tensors, call
    _release(device)
    if rank == 0:
        whole = [s / case.ranks for s in _seconds(_whole_call(case, device))]
        ours[ONE_DEVICE] = summary(whole)
    _release(device)
    dist.barrier()
    return ours | beside


def _largest(value: float, device: Any) -> float:
    """Of all ranks."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


# -- both
def _tell(where: str, case: Case, results: dict[str, Any]) -> None:
    told = ", ".join(
        f"{name} {1e3 * found['seconds']:.3g} ms" if "seconds" in found else f"{name} -"
        for name, found in results.items()
        if "unsupported" not in found
    )
    print(f"{where} {case.key}: {told}", file=sys.stderr, flush=True)


def _device(rank: int, backend: str) -> Any:
    import torch

    return torch.device("cuda", rank) if backend == "cuda" else torch.device("cpu")


def _tensors(case: Case, rows: int, device: Any) -> list[Any]:
    """q, k, v and dout of so many rows."""
    import torch

    lead = (rows,) if case.lengths else (case.batch, rows)
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    dims = case.d, case.d, case.value_dim, case.value_dim
    return [
        torch.randn(*lead, h, d, dtype=getattr(torch, case.dtype), device=device)
        for h, d in zip(heads, dims, strict=True)
    ]


def _call(case: Case, attention: Callable[..., Any], tensors: list[Any]) -> Callable[[], Any]:
    import torch

    *inputs, dout = tensors
    if case.op == "forward":
        return lambda: attention(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)


def _attention(case: Case, functions: Any, device: Any, **options: Any) -> Callable[..., Any]:
    """`attention` of some functions, or `attention_varlen` where sequences are packed."""
    import torch

    if not case.lengths:
        return lambda *x: functions.attention(*x, causal=case.causal, **options)
    ends = [0, *itertools.accumulate(case.lengths)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    packing = starts, starts, case.seqlen, case.seqlen
    return lambda *x: functions.attention_varlen(*x, *packing, causal=case.causal, **options)


def _whole_call(case: Case, device: Any) -> Callable[[], Any]:
    import anyflash.torch

    attention = _attention(case, anyflash.torch, device)
    return _call(case, attention, _tensors(case, case.rows, device))


def _release(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _peak_bytes(call: Callable[[], Any], device: Any) -> float:
    """Memory that a call takes beside its inputs, results included; 0 on the CPU."""
    import torch

    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def _seconds(
    call: Callable[[], Any], slowest: Callable[[float], float] = lambda s: s
) -> list[float]:
    """Samples of a call's time on the slowest rank; all ranks take as many."""
    (samples,) = _in_turns([call], slowest)
    return samples


def _in_turns(
    calls: Sequence[Callable[[], Any]], slowest: Callable[[float], float] = lambda s: s
) -> list[list[float]]:
    """Samples of each call. A GPU's clock falls as it gets warm, for one call as for the others."""
    repeats = []
    for call in calls:
        once = slowest(_timed(call, 1))
        if once < _LONG_SECONDS:
            once = slowest(_timed(call, 1))
        repeats.append(max(1, round(_BUDGET.round_seconds / once)))
    samples: list[list[float]] = [[] for _ in calls]
    spent = 0.0
    while _BUDGET.lasts(len(samples[0]), spent):
        for call, count, found in zip(calls, repeats, samples, strict=True):
            found.append(slowest(_timed(call, count)))
            spent += found[-1] * count / len(calls)
    return samples


def _timed(call: Callable[[], Any], repeats: int) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
