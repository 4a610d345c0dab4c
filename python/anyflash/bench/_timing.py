"""Samples of a call's time, on the CPU and on a GPU.

A sample is the mean of several calls in a row, so many that they take `round_seconds`. Contenders
take turns, sample by sample, and who is first changes from round to round. On a GPU the clock is
that of CUDA events:

* "events": around all calls of a sample, which wait for one another on the GPU while the host
  runs ahead. Where a call takes the host longer than the GPU, that is what is measured;
* "graph": the same around replays of a CUDA graph of at least 20 calls: the GPU's time alone;
* cold: before each call the L2 cache is overwritten, and each call has events of its own; the
  overwriting takes the GPU longer than a call takes the host.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyflash.bench._anyflash_calls import Call

Sampler = Callable[[int], float]  # seconds of a call, in the mean over so many
GRAPH_CALLS = 20
MOST_REPEATS = 10000
HEAD_START_BYTES = 256 * 2**20
L2_FACTOR = 4  # overwritten bytes, by the size of the L2 cache


class Timer(Protocol):
    """Makes of a call what takes samples of it."""

    def prepare(self, call: Call) -> Sampler: ...


@dataclass(frozen=True)
class Budget:
    """How long a contender may take in a case: `contender_seconds`, between `fewest` and `most`
    samples of `round_seconds` (or of one call, where that is longer)."""

    contender_seconds: float = 0.4
    round_seconds: float = 0.01
    fewest: int = 5
    most: int = 30

    def lasts(self, samples: int, spent: float) -> bool:
        return samples < self.fewest or (samples < self.most and spent < self.contender_seconds)


class CpuTimer:
    """Wall-clock time. A call that is not counted goes first: it wakes the threads, which another
    contender's may have put to sleep."""

    def prepare(self, call: Call) -> Sampler:
        def sample(repeats: int) -> float:
            with call.context():
                if repeats > 1:
                    call.run(0)
                start = time.perf_counter()
                for i in range(repeats):
                    call.run(i % call.turns)
                return (time.perf_counter() - start) / repeats

        return sample


class CudaTimer:
    """CUDA events around the calls of a sample; `watch` is told while the GPU still works."""

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.watch = watch
        self.other = self.torch.empty(self._other_bytes(), dtype=self.torch.int8, device="cuda")

    def _other_bytes(self) -> int:
        return HEAD_START_BYTES

    def _events(self) -> tuple[Any, Any]:
        event = self.torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)

    def _between(self, work: Callable[[], Any]) -> float:
        start, end = self._events()
        self.other.zero_()  # the GPU is busy until the host has launched the first call
        start.record()
        work()
        end.record()
        self.watch()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def prepare(self, call: Call) -> Sampler:
        def sample(repeats: int) -> float:
            def work() -> None:
                for i in range(repeats):
                    call.run(i % call.turns)

            with call.context():
                return self._between(work) / repeats

        return sample


class GraphTimer(CudaTimer):
    """Replays of a graph of calls, one cache of a decoding case after the other. To be used within
    `ArrayLibrary.apart()`."""

    def prepare(self, call: Call) -> Sampler:
        cuda = self.torch.cuda
        calls = call.turns * max(1, GRAPH_CALLS // call.turns)
        with call.context():
            for turn in range(3):
                call.run(turn % call.turns)
            cuda.synchronize()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=cuda.current_stream()):
                for i in range(calls):
                    call.run(i % call.turns)

        def sample(repeats: int) -> float:
            replays = math.ceil(repeats / calls)

            def work() -> None:
                for _ in range(replays):
                    graph.replay()

            return self._between(work) / (replays * calls)

        return sample


class ColdTimer(CudaTimer):
    """Every call finds an L2 cache full of other things."""

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        super().__init__(watch)
        self._between(self.other.zero_)
        self.pass_seconds = self._between(lambda: [self.other.zero_() for _ in range(10)]) / 10

    def _other_bytes(self) -> int:
        properties = self.torch.cuda.get_device_properties(0)
        return L2_FACTOR * int(getattr(properties, "L2_cache_size", 64 * 2**20))

    def prepare(self, call: Call) -> Sampler:
        passes = 1

        def sample(repeats: int) -> float:
            nonlocal passes
            pairs = [self._events() for _ in range(repeats)]
            began = time.perf_counter()
            with call.context():
                for i, (start, end) in enumerate(pairs):
                    for _ in range(passes):
                        self.other.zero_()
                    start.record()
                    call.run(i % call.turns)
                    end.record()
            host_seconds = (time.perf_counter() - began) / repeats
            self.watch()
            self.torch.cuda.synchronize()
            passes = max(passes, math.ceil(2 * host_seconds / self.pass_seconds))
            return sum(float(a.elapsed_time(b)) for a, b in pairs) / repeats / 1e3

        return sample


@dataclass
class Samples:
    """Seconds of each contender, and why one has none."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


class _Contender:
    """A sampler with its number of repeats, and what it has taken so far."""

    def __init__(self, call: Call, timer: Timer, budget: Budget) -> None:
        self.sampler, self.budget = timer.prepare(call), budget
        self.seconds: list[float] = []
        took = self.sampler(1)
        if took < budget.contender_seconds / 10:  # the first may have been slower
            took = self.sampler(3)
        self.repeats = max(1, min(MOST_REPEATS, round(budget.round_seconds / max(took, 1e-9))))
        if took < budget.contender_seconds / 10:
            self.sampler(self.repeats)  # warm-up
        self.spent = 0.0

    def lasts(self) -> bool:
        return self.budget.lasts(len(self.seconds), self.spent)

    def sample(self) -> None:
        took = self.sampler(self.repeats)
        self.seconds.append(took)
        self.spent += took * self.repeats


def take_turns(calls: dict[str, Call], timer: Timer, budget: Budget) -> Samples:
    """Time the calls round by round. Whoever raises is out; the others go on."""
    samples = Samples()
    active: dict[str, _Contender] = {}
    for name, call in calls.items():
        try:
            active[name] = _Contender(call, timer, budget)
            samples.seconds[name] = active[name].seconds
        except Exception as error:  # whatever other people's code raises
            samples.errors[name] = error
    turn = 0
    while active:
        order = list(active)
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            try:
                active[name].sample()
            except Exception as error:
                samples.errors[name] = error
                del active[name], samples.seconds[name]
        active = {name: contender for name, contender in active.items() if contender.lasts()}
        turn += 1
    return samples
