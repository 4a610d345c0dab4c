"""tests/tune: what is measured, which tiles are chosen, and how they are written. The GPU, its
kernels and their times are made up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tuner
from tuned_tiles import SIZES, Key, Measured, alike, chosen, rewritten, rows

import anyflash
from anyflash.bench import _cli
from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import NumpyArrays
from anyflash.bench._timing import Budget
from calls.bench_cases import SHORT, bench_of

FILE = Path(__file__).resolve().parents[3] / "cpp/src/tuned_tiles.cpp"
KEY = Key("forward", 128, 128, bounded=False, size="long")
SMALL = KEY._replace(size="small grid")
CAUSAL = KEY._replace(bounded=True)


def measured(key=KEY, rules="", bits=None, **seconds):
    """`default=1.0, wide=1.1`: seconds of each config; `bits`: those that differ from the rest."""
    times = {"" if config == "default" else config: s for config, s in seconds.items()}
    return Measured(key, times, rules, dict.fromkeys(times, 0) | (bits or {}))


# -- choosing
def test_only_what_gains_more_than_noise_is_written():
    assert chosen([measured(default=1.0, wide=0.97)]) == {KEY: "wide"}
    assert chosen([measured(default=1.0, wide=0.99)]) == {}
    assert chosen([measured(default=1.0, wide=1.1)]) == {}
    assert chosen([measured(rules="wide", default=1.0, wide=1.1)]) == {KEY: ""}
    assert chosen([measured(default=1.0, wide=0.9, compact=0.8)]) == {KEY: "compact"}


def test_the_geometric_mean_of_a_keys_problems_decides():
    gains = [measured(default=1.0, wide=0.8), measured(default=10.0, wide=12.0)]
    assert chosen(gains) == {KEY: "wide"}
    assert chosen([*gains, measured(default=1.0, wide=1.1)]) == {}
    # The rules may choose another one for each.
    cases = [measured(default=1.0, wide=1.5), measured(rules="wide", default=1.5, wide=1.0)]
    assert chosen(cases) == {}


def test_each_key_has_its_own():
    cases = [
        measured(default=1.0, wide=0.9),
        measured(SMALL, default=1.0, wide=1.2),
        measured(CAUSAL, rules="wide", default=0.9, wide=1.0),
    ]
    assert chosen(cases) == {KEY: "wide", CAUSAL: ""}
    other = KEY._replace(op="backward")
    assert chosen([*cases, measured(other, default=1.0, wide=0.5)])[other] == "wide"


def test_a_gpu_takes_rooms_with_the_same_bits():
    """For all keys of some head dims: the fastest group, if it gains on the rules' own."""
    other = {"wide": 1}
    faster = [measured(bits=other, default=1.0, wide=0.5)]
    assert chosen([*faster, measured(SMALL, bits=other, default=1.0, wide=1.2)]) == {
        KEY: "wide",
        SMALL: "wide",
    }
    assert chosen([*faster, measured(SMALL, bits=other, default=1.0, wide=3.0)]) == {}
    # Within the rules' group they still choose by key.
    cases = [
        measured(bits=other, default=1.0, wide=0.9, compact=0.8),
        measured(SMALL, bits=other, default=1.0, wide=0.9, compact=1.2),
    ]
    assert chosen(cases) == {KEY: "compact"}
    assert alike(cases) == [{"", "compact"}, {"wide"}]
    # One problem where bits differ is enough.
    cases[0] = replace(cases[0], bits={"": 0, "wide": 0, "compact": 1})
    assert sorted(map(sorted, alike(cases))) == [[""], ["compact"], ["wide"]]


def test_other_bits_need_a_gain_as_well():
    other = {"wide": 1}
    assert chosen([measured(bits=other, default=1.0, wide=0.99)]) == {}
    assert chosen([measured(bits=other, default=1.0, wide=0.97)]) == {KEY: "wide"}


# -- the file
def test_the_committed_table_can_be_read_and_written():
    text = FILE.read_text()
    table = rows(text)
    lines = [line for line in text.splitlines() if line.startswith("    {")]
    assert len(lines) == len(table) + 1
    assert all(capability > 0 for capability, _ in table)
    for capability in {capability for capability, _ in table} | {0}:
        configs = {key: config for (cc, key), config in table.items() if cc == capability}
        assert rewritten(text, capability, configs) == text
    # A GPU takes one key's row at most, so that order is of no consequence.
    assert len(table) == len(set(table))


def test_rows_of_other_gpus_stay():
    bare = rewritten(FILE.read_text(), 90, {})
    first = rewritten(bare, 100, {KEY: "wide", SMALL: ""})
    long = '{{100, "sm80"}, {Op::kForward, 128, 128}, {false, Size::kLong}, TileConfig::kWide}'
    assert f"    {long},\n" in first
    small = (
        '{{100, "sm80"}, {Op::kForward, 128, 128}, {false, Size::kSmallGrid}, TileConfig::kDefault}'
    )
    assert f"    {small},\n    {{}},\n" in first
    second = rewritten(first, 89, {CAUSAL._replace(op="backward", d=192): "compact"})
    line = '{{89, "sm80"}, {Op::kBackward, 192, 128}, {true, Size::kLong}, TileConfig::kCompact}'
    assert f"    {line},\n    {{{{100, " in second
    third = rewritten(second, 100, {CAUSAL: "compact"})
    added = {x: y for x, y in rows(third).items() if x[0] in {89, 100}}
    assert added == {
        (89, Key("backward", 192, 128, True, "long")): "compact",
        (100, CAUSAL): "compact",
    }
    assert rewritten(rewritten(third, 89, {}), 100, {}) == bare


def test_another_file_is_refused():
    with pytest.raises(ValueError, match="not the table of tiles"):
        rewritten("int main() {}\n", 90, {KEY: "wide"})


# -- measuring, on a GPU that is not there
class FakeGpu:
    """Kernels by config, their times, and how dispatch chooses: `rules`, or what is preferred."""

    def __init__(self, monkeypatch, times, rules="wide", tuned="", fits=None):
        self.names = {config: f"sm80_forward_bf16_d128_{config or 'default'}" for config in times}
        self.times, self.rules, self.tuned = times, rules, tuned
        self.fits = set(times) if fits is None else fits
        self.other_bits = {"wide": 1.0}
        self.preferred = None
        self.counts = dict.fromkeys(self.names.values(), 0)
        self.ran = []
        kernels = [
            {"name": name, "arch": "sm80", "op": "forward", "dtype": "bfloat16", "head_dim": 128,
             "head_dim_v": 128, "features": [], "tile_config": config}
            for config, name in self.names.items()
        ]  # fmt: skip
        alone = [
            {**kernels[0], "head_dim": 64},
            {**kernels[0], "features": ["bias"], "tile_config": "x"},
        ]
        info = {**anyflash.build_info(), "kernels": [*kernels, *alone]}
        monkeypatch.setattr(tuner, "_core", SimpleNamespace(prefer_kernel=self.prefer))
        monkeypatch.setattr(tuner, "launches", lambda: dict(self.counts))
        monkeypatch.setattr(tuner, "_anyflash_calls", SimpleNamespace(anyflash_call=self.call))
        monkeypatch.setattr(tuner, "anyflash", SimpleNamespace(build_info=lambda: info))
        self.bench = replace(bench_of(NumpyArrays()), timers={"events": self, "graph": self})

    def prefer(self, name):
        self.preferred = name

    @property
    def config(self):
        by_name = {name: config for config, name in self.names.items()}
        if self.preferred is None:
            return self.tuned
        wanted = by_name.get(self.preferred)
        return wanted if wanted in self.fits else self.rules

    def call(self, problem):
        def run(turn):
            self.ran.append(self.config)
            self.counts[self.names[self.config]] += 1
            return (np.full(3, self.other_bits.get(self.config, 2.0)),)

        return Call(run, lambda result: result)

    def prepare(self, call):
        def sample(repeats):
            with call.context():
                call.run(0)
                return self.times[self.config]

        return sample


def test_each_kernel_is_timed_by_its_name_in_turns(monkeypatch):
    gpu = FakeGpu(monkeypatch, {"": 3.0, "wide": 2.0, "compact": 1.0})
    family = "forward", 128, 128, "sm80"
    assert tuner.families("bfloat16") == {family: gpu.names}
    assert tuner.families("float16") == {}
    (key, case), *_ = tuner.cases(family, "bfloat16", 132, True)
    result = tuner.measure(key, case, gpu.names, gpu.bench)
    assert result.measured == Measured(
        key, {"": 3.0, "wide": 2.0, "compact": 1.0}, "wide", {"": 0, "wide": 1, "compact": 0}
    )
    assert result.now == ""
    assert gpu.preferred is None
    assert gpu.ran[-3 * SHORT.fewest :][:4] == ["", "wide", "compact", "wide"]


def test_what_does_not_fit_is_left_out(monkeypatch):
    gpu = FakeGpu(monkeypatch, {"": 3.0, "wide": 2.0}, rules="", fits={""})
    (key, case), *_ = tuner.cases(("forward", 128, 128, "sm80"), "bfloat16", 132, True)
    result = tuner.measure(key, case, gpu.names, gpu.bench)
    assert dict(result.measured.seconds) == {"": 3.0}
    # A kernel that is not plain runs it.
    only = {"wide": gpu.names["wide"]}
    assert tuner.measure(key, case, only, gpu.bench) is None


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("multiprocessors", [36, 108, 132, 188])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_every_key_has_cases(d, multiprocessors, quick):
    pairs = list(tuner.cases(("backward", d, 128, "sm80"), "bfloat16", multiprocessors, quick))
    keys = {key for key, _ in pairs}
    assert len({case.key for _, case in pairs}) == len(pairs)
    every = itertools.product((False, True), SIZES)
    assert keys == {Key("backward", d, 128, bounded, size) for bounded, size in every}
    for key, case in pairs:
        ctas = -(-case.seqlen // 128) * case.heads * case.batch
        assert (key.size == "small grid") == (ctas < multiprocessors)
        assert key.size != "short" or case.seqlen <= 512
        assert key.size != "long" or case.seqlen > 512
        assert (case.causal, case.d, case.value_dim) == (key.bounded, d, 128)
        assert case.timing == ("graph" if key.size == "small grid" else "events")


def test_the_command_writes_what_it_found(monkeypatch, tmp_path, capsys):
    import torch

    gpu = FakeGpu(monkeypatch, {"": 3.0, "wide": 2.0, "compact": 1.0}, rules="")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(multi_processor_count=132),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 1))
    monkeypatch.setattr(tuner, "arrays_for", lambda backend: gpu.bench.arrays)
    monkeypatch.setattr(_cli, "timers_of", lambda arrays, monitor, cold: gpu.bench.timers)
    monkeypatch.setattr(_cli, "QUICK", Budget(0.0, 1.0, 1, 1))
    path = tmp_path / "tiles.cpp"
    path.write_text(FILE.read_text())
    assert tuner.main(["--quick", "--write", str(path)]) == 0
    table = {key: config for (cc, key), config in rows(path.read_text()).items() if cc == 121}
    every = itertools.product((False, True), SIZES)
    assert table == {Key("forward", 128, 128, *both): "compact" for both in every}
    told = capsys.readouterr().out
    assert "not the same bits, so that only one of: default, compact | wide" in told
    lines = [line.split() for line in told.splitlines()]
    assert ["forward", "128", "full", "long", "compact", "tuned"] in [x[:6] for x in lines]
    assert ["now,", "rules"] in [x[5:7] for x in lines]


# -- the command's arguments
@pytest.mark.skipif(
    any(device["supported"] for device in anyflash.build_info()["devices"]), reason="a GPU is here"
)
def test_without_a_gpu(capsys):
    assert tuner.main([]) == 2
    assert "tuner.py: " in capsys.readouterr().err


def test_a_file_that_is_not_the_table_is_refused_first(monkeypatch, tmp_path, capsys):
    gpu = FakeGpu(monkeypatch, {"": 3.0, "wide": 2.0})
    monkeypatch.setattr(tuner, "arrays_for", lambda backend: gpu.bench.arrays)
    monkeypatch.setattr(_cli, "timers_of", lambda arrays, monitor, cold: gpu.bench.timers)
    path = tmp_path / "tiles.cpp"
    assert tuner.main(["--write", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text("")
    assert tuner.main(["--write", str(path)]) == 2
    assert "it is not the table" in capsys.readouterr().err
    assert not gpu.ran


def test_kernels_have_rooms():
    for kernel in anyflash.build_info()["kernels"]:
        configs = [
            config for config in ("compact", "wide") if kernel["name"].endswith(f"_{config}")
        ]
        assert kernel["tile_config"] == "".join(configs)


@pytest.mark.parametrize("name", ["sm80_forward_bf16_d65", "cpu_baseline_forward_f32"])
def test_preferring_names_kernels_of_a_gpu(name):
    with pytest.raises(ValueError, match=f'there is no CUDA kernel "{name}"; this build has '):
        anyflash._core.prefer_kernel(name)
    with tuner.preferring(""):
        pass
