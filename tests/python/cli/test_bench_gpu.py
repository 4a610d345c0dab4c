"""What the benchmark does around a GPU, timers and the driver's library, on stand-ins that count.

The clock of the stand-in is the number of calls that ran: each takes a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest

from anyflash.bench import _machine, _nvml, _timing
from anyflash.bench._anyflash_calls import Call


class FakeGpu:
    """PyTorch as the timers use it."""

    int8 = "int8"

    def __init__(self):
        self.milliseconds = 0.0
        self.ran = []
        self.zeroed = 0
        self.captured = None
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: FakeEvent(self),
            CUDAGraph=lambda: FakeGraph(self),
            graph=self._capture,
            current_stream=lambda: "side",
            synchronize=lambda: None,
            get_device_properties=lambda index: SimpleNamespace(L2_cache_size=2**20),
        )

    def empty(self, size, dtype, device):
        assert (dtype, device) == ("int8", "cuda")
        self.size = size
        return SimpleNamespace(zero_=self._zero)

    def _zero(self):
        self.zeroed += 1
        self.milliseconds += 1000.0  # it must not be counted

    @contextlib.contextmanager
    def _capture(self, graph, stream):
        assert stream == "side"
        self.captured = graph.calls
        yield
        self.captured = None

    def call(self, turn):
        if self.captured is not None:
            self.captured.append(turn)
            return
        self.ran.append(turn)
        self.milliseconds += 1.0


class FakeEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.milliseconds

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


class FakeGraph:
    def __init__(self, gpu):
        self.gpu, self.calls = gpu, []

    def replay(self):
        for turn in self.calls:
            self.gpu.call(turn)


@pytest.fixture
def fake_gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(_timing.importlib, "import_module", lambda name: fake)
    return fake


def test_events_enclose_the_calls_and_not_the_head_start(fake_gpu):
    watched = []
    sampler = _timing.CudaTimer(lambda: watched.append(1)).prepare(Call(fake_gpu.call, turns=2))
    assert sampler(5) == pytest.approx(1e-3)
    assert fake_gpu.ran == [0, 1, 0, 1, 0]
    assert (fake_gpu.zeroed, watched) == (1, [1])


@pytest.mark.parametrize(("turns", "calls"), [(1, 20), (3, 18), (64, 64)])
def test_a_graph_holds_twenty_calls_or_each_cache_once(fake_gpu, turns, calls):
    sampler = _timing.GraphTimer().prepare(Call(fake_gpu.call, turns=turns))
    fake_gpu.ran.clear()  # the warm-up before the capture
    assert sampler(calls + 1) == pytest.approx(1e-3)
    assert fake_gpu.ran == [i % turns for i in range(calls)] * 2


def test_a_cold_call_follows_overwritten_caches(fake_gpu):
    timer = _timing.ColdTimer()
    assert fake_gpu.size == 4 * 2**20
    assert timer.pass_seconds == pytest.approx(1.0)
    fake_gpu.zeroed = 0
    assert timer.prepare(Call(fake_gpu.call))(3) == pytest.approx(1e-3)
    assert fake_gpu.zeroed == 3


class FakeNvml:
    """The driver's library: clock, power, temperature and reasons; no limits."""

    def __init__(self, clocks):
        self.clocks = iter(clocks)

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        assert uuid == b"GPU-12"
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetClockInfo(self, device, kind, result):
        result._obj.value = next(self.clocks) if kind == _nvml.SM_CLOCK else 3201
        return 0

    def nvmlDeviceGetPowerUsage(self, device, result):
        result._obj.value = 650_000
        return 0

    def nvmlDeviceGetTemperature(self, device, kind, result):
        result._obj.value = 60
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device, result):
        result._obj.value = 0x4
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, device, result):
        return 3  # not supported


def test_clocks_and_power_are_told_once(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml([1980, 1500, 1700]))
    monkeypatch.setattr(_machine, "WATCH_SECONDS", 0.0)
    monitor = _machine.Monitor(SimpleNamespace(device="cpu"))
    assert monitor.told() == {}
    monitor.nvml = _nvml.Nvml("12")
    assert monitor.nvml.driver() == "580.1"
    assert monitor.nvml.limits() == {
        "power_limit_watts": None, "max_sm_mhz": None, "max_memory_mhz": None,
    }  # fmt: skip
    for _ in range(3):
        monitor.watch()
    assert monitor.told() == {
        "sm_mhz": 1700, "memory_mhz": 3201, "watts": 650.0, "celsius": 60, "lowest_sm_mhz": 1500,
        "slowed_by": ["power cap"],
    }  # fmt: skip
    assert monitor.told() == {}
