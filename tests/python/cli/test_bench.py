"""The benchmark: its cases and counts, what it measures, and that a bad peer stops nothing.

Nothing is timed for its own sake: cases are tiny, and only the form of what comes out is looked at.
"""

from __future__ import annotations

import json
import sys
import types
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from anyflash import __main__ as command_line
from anyflash.bench import _calls, _measure, _peers, _presets, _report
from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import NumpyArrays, TorchArrays, Unsupported
from anyflash.bench._cases import CACHE_DTYPES, KEY_RANGES, Case, visible_pairs
from anyflash.bench._peers import PEERS, Peer
from anyflash.bench._presets import PRESETS, Wanted, cases_of
from anyflash.bench._problem import Problem
from anyflash.bench._timing import Budget, CpuTimer, take_turns
from calls.bench_cases import SHORT, TINY, bench_of, document_of

ON_GPU = Wanted("cuda", ("bfloat16",), quick=False)


# -- cases and counts
def test_the_paper_has_flash_attention_2s_grid():
    cases = cases_of("paper", ON_GPU, {})
    assert len(cases) == len({case.key for case in cases}) == 3 * 3 * 2 * 6
    assert {case.batch * case.seqlen for case in cases} == {16384}
    assert {case.heads * case.d for case in cases} == {2048}
    assert {case.seqlen for case in cases} == {512 * 2**i for i in range(6)}
    assert {case.d for case in cases} == {64, 128, 256}
    assert {case.op for case in cases} == {"forward", "backward", "both"}


def test_training_has_the_models_of_flash_attention_2s_last_table():
    cases = cases_of("training", ON_GPU, {})
    assert {(case.model, case.heads * case.d) for case in cases} == {
        ("GPT 1.3B", 2048),
        ("GPT 2.7B", 2560),
    }
    assert {(case.seqlen, case.batch) for case in cases} == {(2048, 8), (8192, 2)}
    assert all(case.op == "both" and case.causal for case in cases)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("quick", [False, True])
def test_cases_of_a_preset_have_keys_of_their_own(preset, device, quick):
    cases = cases_of(preset, Wanted(device, ("float16", "bfloat16"), quick), {})
    assert cases
    assert len({case.key for case in cases}) == len(cases)
    assert {case.unit for case in cases}.isdisjoint(
        {"GFLOP/s"} if device == "cuda" else {"TFLOP/s"}
    )
    for case in cases:
        assert not case.lengths or (min(case.lengths) > 0 and max(case.lengths) == case.seqlen)
        assert not case.page_size or case.keys % case.page_size == 0
    x = PRESETS[preset].x
    assert not x or any(x in case.labels for case in cases)


def test_only_takes_labels_and_refuses_what_no_case_has():
    wanted = {"op": frozenset({"forward"}), "d": frozenset({"64", "256"})}
    cases = cases_of("paper", ON_GPU, wanted)
    assert {(case.op, case.d) for case in cases} == {("forward", 64), ("forward", 256)}
    with pytest.raises(ValueError, match=r"--only d=65: these cases have d=128,256,64"):
        cases_of("paper", ON_GPU, {"d": frozenset({"65"})})
    with pytest.raises(ValueError, match="these cases have no page"):
        cases_of("paper", ON_GPU, {"page": frozenset({"1"})})


@pytest.mark.parametrize("feature", KEY_RANGES)
def test_pairs_of_key_ranges_are_those_that_they_leave(feature):
    """But for the half of the diagonal that a triangle does not count; a prefix has none."""
    causal = feature != "prefix of a quarter"
    case = Case("forward", 1, 256, 1, 8, "float32", causal=causal, feature=feature)
    begin, end = Problem(case, NumpyArrays()).key_ranges[0, 0].T
    row = np.arange(256)[:, None]
    seen = (begin <= row) & (row < end)
    if causal:
        seen &= row >= np.arange(256)
    rows_of_triangles = 256 if causal else 256 - 64
    assert case.flop == 4 * 8 * (seen.sum() - rows_of_triangles / 2)


def test_a_latent_cache_counts_once():
    step = Case("decode", 2, 1, 16, 576, "bfloat16", heads_k=1, seqlen_k=100, d_v=512)
    assert step.bytes == 2 * (2 * 100 * 576 + 2 * 16 * (576 + 512))
    assert replace(step, d_v=0).bytes == 2 * (2 * 100 * 2 * 576 + 2 * 16 * 2 * 576)


@pytest.mark.parametrize(("rows", "columns"), [(3, 7), (7, 3), (1, 5), (5, 1)])
def test_visible_pairs_are_those_of_the_mask(rows, columns):
    mask = np.tri(rows, columns, columns - rows)
    assert visible_pairs(rows, columns, causal=True) == mask.sum()
    assert visible_pairs(rows, columns, causal=False) == rows * columns
    assert visible_pairs(8, 8, causal=True) == 32  # half, as the paper counts


def test_flop_and_bytes_are_counted_as_in_the_paper():
    case = Case("forward", 3, 1000, 8, 64, "bfloat16")
    assert case.flop == 4 * 3 * 8 * 1000 * 1000 * 64
    assert replace(case, op="backward").flop == 2.5 * case.flop
    assert replace(case, op="both").flop == 3.5 * case.flop
    assert replace(case, causal=True).flop == case.flop / 2
    assert replace(case, heads_k=2).flop == case.flop
    assert replace(case, lengths=(100, 200), seqlen=200).flop == 4 * 8 * (100**2 + 200**2) * 64
    assert replace(case, feature="window 512").flop == 0
    other = replace(case, d_v=32)
    assert other.labels["d"] == "64/32"
    assert other.flop == 2 * 3 * 8 * 1000 * 1000 * (64 + 32)
    assert replace(other, op="backward").flop == 2 * 3 * 8 * 1000 * 1000 * (3 * 64 + 2 * 32)
    step = Case("decode", 4, 2, 8, 64, "float16", heads_k=2, seqlen_k=100)
    assert step.bytes == 2 * (2 * 4 * 100 * 2 * 64 + 2 * 4 * 2 * 8 * 64)


# -- measuring
@pytest.mark.parametrize("op", ["forward", "backward", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_numpy_alone(op, causal):
    case = replace(TINY, op=op, causal=causal)
    results = _measure.measure(case, bench_of(NumpyArrays(), "deterministic"))["results"]
    assert results["anyflash"]["q1"] <= results["anyflash"]["seconds"] <= results["anyflash"]["q3"]
    assert len(results["anyflash"]["samples"]) >= SHORT.fewest
    assert ("seconds" in results["deterministic"]) == (op == "backward")


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_head_dim_of_v_alone(op):
    call = _measure._anyflash_calls.anyflash_call(
        _measure.Problem(replace(TINY, op=op, d_v=8), NumpyArrays())
    )
    dims = [x.shape[-1] for x in call.outputs(call.run(0))]
    assert dims == ([16, 16, 8] if op == "backward" else [8])


@pytest.mark.parametrize("op", ["forward", "backward", "both"])
@pytest.mark.parametrize("heads_k", [0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_and_its_backends(op, heads_k, causal):
    case = replace(TINY, op=op, heads_k=heads_k, causal=causal)
    entry = _measure.measure(case, bench_of(TorchArrays("cpu"), "flash", "math", "standard"))
    told = {name for name, result in entry["results"].items() if "seconds" in result}
    assert told == {"anyflash", "flash", "math"} | (set() if heads_k else {"standard"})
    assert all(_report.value(entry, name) > 0 for name in told)


FEATURES = [name for name in _presets.FEATURES if name != "packed"]


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, op):
    if op == "backward" and feature == "max_logits":
        return  # no case of the preset
    case = replace(TINY, op=op, seqlen=128, feature=feature, causal=feature == "causal", unit="ms")
    entry = _measure.measure(case, bench_of(TorchArrays("cpu"), "plain", "flash"))
    results = entry["results"]
    assert "seconds" in results["anyflash"]
    assert ("seconds" in results["plain"]) == (feature != "plain")
    in_torch = {"plain", "causal", "bias", "keep-mask", "dropout"}
    if feature == "dropout":  # PyTorch says why in a warning, which belongs to the reason
        assert "non-zero dropout" in results["flash"]["error"]
    else:
        assert "error" not in results["flash"]
    assert ("seconds" in results["flash"]) <= (feature in in_torch)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("arrays", [NumpyArrays, lambda: TorchArrays("cpu")])
@pytest.mark.parametrize("lengths", [(16, 16), (5, 1, 20)])
def test_packed_problems(op, arrays, lengths):
    case = replace(TINY, op=op, batch=len(lengths), seqlen=max(lengths), lengths=lengths)
    results = _measure.measure(case, bench_of(arrays(), "plain"))["results"]
    assert "seconds" in results["anyflash"]
    assert ("seconds" in results["plain"]) == (len(set(lengths)) == 1)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("arrays", [NumpyArrays, lambda: TorchArrays("cpu")])
def test_decoding(queries, page_size, arrays):
    case = Case(
        "decode", 2, queries, 4, 16, "float32", heads_k=2, seqlen_k=64, causal=True,
        page_size=page_size, unit="us",
    )  # fmt: skip
    peers = () if arrays is NumpyArrays else ("flash",)
    results = _measure.measure(case, bench_of(arrays(), *peers))["results"]
    assert "seconds" in results["anyflash"]
    assert all(("seconds" in results[name]) == (not page_size) for name in peers)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("arrays", [NumpyArrays, lambda: TorchArrays("cpu")])
def test_decoding_of_eight_bits(cache_dtype, arrays):
    case = Case(
        "decode", 2, 1, 4, 16, "float32", heads_k=2, seqlen_k=64, causal=True,
        page_size=16, cache_dtype=cache_dtype, unit="us",
    )  # fmt: skip
    assert case.bytes == replace(case, cache_dtype="").bytes - 3 * (2 * 64 * 2 * 2 * 16)
    assert case.labels["cache"] == f"{cache_dtype}, pages of 16"
    results = _measure.measure(case, bench_of(arrays(), "plain", "flash"))["results"]
    assert all("seconds" in results[name] for name in ("anyflash", "plain"))
    assert "flash" not in results or "seconds" not in results["flash"]


def test_memory_counts_results_and_is_linear_beside_quadratic():
    cases = [replace(TINY, seqlen=n, timing="memory", unit="MiB") for n in (256, 512)]
    bench = bench_of(NumpyArrays(), "standard")
    entries = [_measure.measure(case, bench) for case in cases]
    for entry, case in zip(entries, cases, strict=True):
        output = case.seqlen * case.heads * case.d * 4
        assert output <= entry["results"]["anyflash"]["bytes"] < 4 * output + 2**16
        assert entry["results"]["standard"]["bytes"] >= case.scores_bytes


@pytest.mark.parametrize("framework", _presets.FRAMEWORK_CALLS)
def test_calls_on_the_host(framework):
    case = Case("call", 1, 1, 1, 8, "float32", framework=framework, unit="us")
    entry = _measure.measure(case, bench_of(NumpyArrays()))
    assert all("seconds" in result for result in entry["results"].values())
    assert {"adapter", "anyflash"} & set(entry["results"])


def broken(problem):
    raise RuntimeError("CUDA error: no kernel image\nand more")


def wrong(problem):
    return Call(lambda turn: problem.q)


def missing(problem):
    raise Unsupported("no such feature")


def breaks_later(problem):
    calls = iter(range(3))
    return Call(lambda turn: (next(calls), np.copy(problem.arrays.right))[1])


def test_flash_attention_by_the_registry(monkeypatch):
    """What is activated for a row is restored after it."""
    choice = pytest.importorskip("torch").nn.attention
    if not hasattr(choice, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry")
    done = []
    monkeypatch.setattr(choice, "activate_flash_attention_impl", done.append)
    restore = "restore_flash_attention_impl"
    monkeypatch.setattr(choice, restore, lambda: done.append(restore))
    monkeypatch.setattr("torch.ones", lambda shape, dtype, device: np.ones(shape))
    for row, name in (("torch GPU flash", "framework"), ("torch GPU registry", "adapter")):
        with ExitStack() as undo:
            assert [name for name, _ in _calls.framework_calls(row, undo)] == [name]
            assert done == (["anyflash"] if name == "adapter" else [])
    assert done == ["anyflash", restore]


def test_bad_peers_are_reported_and_stop_nothing(monkeypatch):
    arrays = NumpyArrays()
    problem = _measure.Problem(TINY, arrays)
    arrays.right = _measure._anyflash_calls.anyflash_call(problem).run(0)
    for build in (broken, wrong, missing, breaks_later):
        monkeypatch.setitem(PEERS, build.__name__, Peer("", "numpy", build, ("cpu",)))
    bench = bench_of(arrays, "broken", "wrong", "missing", "breaks_later")
    entry = _measure.measure(TINY, bench)
    results = entry["results"]
    assert "seconds" in results["anyflash"]
    assert results["broken"] == {"error": "RuntimeError: CUDA error: no kernel image"}
    assert "differs from anyflash's" in results["wrong"]["error"]
    assert results["missing"] == {"unsupported": "no such feature"}
    assert results["breaks_later"]["error"].startswith("StopIteration")
    text = _report.plain(document_of([entry]))
    assert "broken: none in 1 cases: RuntimeError: CUDA error" in text
    assert "missing" not in text  # it has nothing in this table


def test_a_failure_of_anyflash_itself_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(_measure._anyflash_calls, "anyflash_call", broken)
    entry = _measure.measure(TINY, bench_of(NumpyArrays(), "standard"))
    assert "seconds" in entry["results"]["standard"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document_of([entry])))
    assert command_line.main(["bench", "--load", str(path)]) == 1


def test_samples_are_taken_in_turns():
    order = []
    calls = {name: Call(lambda turn, name=name: order.append(name)) for name in "abc"}
    budget = Budget(contender_seconds=0.0, round_seconds=0.0, fewest=3, most=3)
    samples = take_turns(calls, CpuTimer(), budget)
    assert {name: len(seconds) for name, seconds in samples.seconds.items()} == dict.fromkeys(
        "abc", 3
    )
    assert "".join(order[-9:]) == "abcbcacab"


def test_time_is_up(capsys):
    assert list(_measure.run([TINY, TINY], bench_of(NumpyArrays()), seconds=-1.0)) == []
    assert "2 cases are left out" in capsys.readouterr().err


# -- peers
def test_peers_are_chosen_by_name():
    torch, numpy = TorchArrays("cpu"), NumpyArrays()
    assert _peers.chosen_peers("none", torch, (), False) == []
    assert _peers.chosen_peers("math,flash", torch, (), False) == ["math", "flash"]
    assert {"flash", "math"} <= set(_peers.chosen_peers("", torch, (), False))
    assert set(_peers.chosen_peers("all", numpy, (), False)) == {
        "plain",
        "deterministic",
        "standard",
    }
    assert _peers.chosen_peers("", torch, ("flash",), False) == ["flash"]
    more = _peers.chosen_peers("+deterministic", torch, ("flash",), True)
    assert more == ["flash", "deterministic"]
    for text, arrays, message in (
        ("flask", torch, "there is no 'flask'"),
        ("cudnn", torch, "does not run on the backend cpu"),
        ("flash", numpy, "takes PyTorch's tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            _peers.chosen_peers(text, arrays, (), False)


def test_anyflash_under_another_name_is_no_peer(monkeypatch):
    import anyflash.flash_attn

    monkeypatch.setitem(sys.modules, "flash_attn", anyflash.flash_attn)
    problem = _measure.Problem(TINY, TorchArrays("cpu"))
    with pytest.raises(Unsupported, match="anyflash's stand-in"):
        PEERS["fa2"].build(problem)


def test_anyflash_that_is_installed_is_no_peer(monkeypatch):
    import anyflash.flash_attn_3

    names = ("flash_attn_3", "flash_attn_interface")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    anyflash.flash_attn_3.install(force=True)
    problem = _measure.Problem(TINY, TorchArrays("cpu"))
    with pytest.raises(Unsupported, match="flash_attn_interface is anyflash's stand-in"):
        PEERS["fa3"].build(problem)
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "called",
    [
        replace(TINY, op="both", causal=True, heads_k=1),
        replace(TINY, feature="alibi"),
        replace(TINY, op="backward", batch=2, lengths=(32, 7)),
        Case("decode", 2, 3, 4, 16, "float32", heads_k=2, seqlen_k=64, causal=True, unit="us"),
        Case("decode", 2, 1, 4, 16, "float32", seqlen_k=512, causal=True, page_size=256, unit="us"),
    ],
    ids=lambda case: f"{case.op}{case.feature}{case.lengths}{case.page_size}",
)
def test_flash_attn_is_called_as_it_wants(called, monkeypatch):
    """By a module with flash-attn's functions, which are anyflash's."""
    from anyflash import flash_attn

    module = types.ModuleType("flash_attn")
    vars(module).update({name: getattr(flash_attn, name) for name in flash_attn.__all__})
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    results = _measure.measure(called, bench_of(TorchArrays("cpu"), "fa2"))["results"]
    assert "seconds" in results["fa2"], results["fa2"]
