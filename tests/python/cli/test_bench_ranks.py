"""The benchmark of a sequence that ranks share: two of gloo, in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anyflash import __main__ as command_line
from anyflash.bench import _cli, _ranks, _report
from anyflash.bench._presets import Wanted, cases_of, documents
from calls.bench_cases import TINY, document_of, entry_of
from run import ranks

SMALL = replace(
    TINY, heads=4, heads_k=2, causal=True, seqlen=256, ranks=2, transport="gloo", method="ring"
)
PACKED = replace(SMALL, batch=3, seqlen=147, lengths=(100, 9, 147), packing="3 documents")


@pytest.fixture(scope="module")
def entries():
    """The last case fails on both ranks. What came before it is here nevertheless."""
    pytest.importorskip("torch.distributed")
    cases = [replace(SMALL, op="both", method="ulysses"), PACKED, replace(PACKED, op="both")]
    found = []

    def collect():
        broken = replace(SMALL, d=0)
        for entry in _ranks.measured([*cases, broken], "cpu", ["torch-cp", "flash"]):
            found.append(entry)

    with pytest.raises(Exception, match="head_dim"):
        collect()
    assert [entry["key"] for entry in found] == [case.key for case in cases]
    return found


def test_ranks_that_share_a_sequence(entries):
    for entry in entries:
        results = entry["results"]
        assert set(results) == {"anyflash", "one device", "torch-cp"}
        assert all(results[name]["seconds"] > 0 for name in ("anyflash", "one device"))
        assert results["anyflash"]["peak_bytes"] == 0  # not counted on the CPU
        assert _report.value(entry, "anyflash") > 0
    why_not = [entry["results"]["torch-cp"]["unsupported"] for entry in entries]
    assert why_not == ["no ulysses", "no packed sequences", "no packed sequences"]


def test_packed_documents_on_ranks(entries):
    dense, _, packed = entries
    assert packed["lengths"] == [100, 9, 147]
    assert packed["labels"]["tokens"] == "256"
    assert "tokens" not in dense["labels"]
    assert packed["flop"] / dense["flop"] == (100**2 + 9**2 + 147**2) / 256**2


def test_one_device_in_turn():
    pytest.importorskip("torch.distributed")
    cases = [replace(SMALL, op=op, transport="alone") for op in ("forward", "both")]
    for entry in _ranks.measured(cases, "cpu", ["torch-cp"]):
        assert set(entry["results"]) == {"anyflash", "one device"}
        assert all(found["seconds"] > 0 for found in entry["results"].values())


def test_bytes_that_a_ring_sends():
    """Keys and values of 128 tokens, twice, of 2 heads of k and 2 of v. Of the other rank's keys,
    the last rank sees half."""
    one, two = (replace(SMALL, op="both", ranks=n) for n in (1, 2))
    assert two.flop == one.flop / 2
    whole = 4 * 128 * 2 * (TINY.d + TINY.d)
    assert _ranks.sent_bytes(two) == 2.5 * whole
    assert _ranks.sent_bytes(replace(two, causal=False)) == 3 * whole
    assert _ranks.sent_bytes(replace(two, op="forward")) == whole
    assert _ranks.sent_bytes(replace(PACKED, op="both")) == 3 * whole
    assert _ranks.sent_bytes(PACKED) == whole
    assert _ranks.sent_bytes(one) == 0


def test_the_preset_packs_documents_for_the_ring():
    cases = cases_of("context-parallel", Wanted("cuda", ("bfloat16",), quick=False, gpus=2), {})
    packed = [case for case in cases if case.lengths]
    assert {(c.op, c.rows, c.method, c.transport, c.packing) for c in packed} == {
        (op, 2 * rows, "ring", "nccl", "4 documents")
        for op in ("forward", "both")
        for rows in (8192, 32768)
    }
    for case in packed:
        assert len(set(case.lengths)) == len(case.lengths) == case.batch
        assert case.flop < 0.5 * replace(case, lengths=(), batch=1, seqlen=case.rows).flop
    assert documents(16384) == (5133, 1024, 7168, 3059)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    pytest.importorskip("torch.distributed.tensor.experimental")
    return ranks.run("calls.bench_on_ranks", 2, tmp_path_factory.mktemp("ranks"))


def test_what_is_timed_on_ranks_is_what_is_timed_on_one_device(on_ranks):
    for found in on_ranks:
        assert max(found["errors"].values()) < 1e-5, found["errors"]


def test_pytorch_is_timed_on_the_same_ranks(on_ranks):
    first, second = (found["results"] for found in on_ranks)
    for name in ("forward", "both", "gather", "ungrouped"):
        assert list(first[name]) == ["anyflash", "one device", "torch-cp", "rotations"]
        assert first[name]["torch-cp"]["seconds"] > 0, first[name]
        # Each rank has the slowest one's times.
        assert first[name]["torch-cp"] == second[name]["torch-cp"]
        assert first[name]["torch-cp"].get("repeated_keys", False) == (name == "ungrouped")
    assert first["forward"]["rotations"] == ["ALL_TO_ALL"]
    assert first["gather"]["rotations"] == ["ALL_GATHER"]


def test_ranks_agree_on_what_fails(on_ranks):
    for found in on_ranks:
        peers = {name: result["torch-cp"] for name, result in found["results"].items()}
        assert peers["of the CPU"]["error"].startswith("NotImplementedError: Operator aten.")
        assert peers["wrong"]["error"].startswith("its result differs from anyflash's by 1 ")
        assert peers["fails on one"] == {"error": "ValueError: rank 1 alone fails"}
        assert peers["fails later"] == {"error": "ValueError: a later call fails"}
        assert found["other rows"] == {"unsupported": "its ranks have other rows"}
        assert "seconds" in peers["after failures"]


def test_tables_have_the_memory_of_a_rank():
    entry = entry_of(replace(SMALL, unit="TFLOP/s"), **{"anyflash": 1e-3, "torch-cp": 2e-3})
    entry["results"]["anyflash"]["peak_bytes"] = 3 * 2**20
    entry["results"]["torch-cp"] |= {"peak_bytes": 5 * 2**20, "repeated_keys": True}
    text = _report.markdown(document_of([entry], preset="context-parallel"))
    assert "| peak MiB | peak MiB, torch-cp |" in text
    assert "| 3.00 | 5.00 |" in text
    assert "torch-cp: keys and values are repeated for it in 1 cases" in text


def test_a_run_that_ends_early_leaves_its_cases(monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    kept = []

    def cases(*given):
        yield entry_of(TINY, anyflash=1e-3)
        kept.append(json.loads(path.read_text()))
        raise RuntimeError("the machine is taken away")

    monkeypatch.setattr(_cli, "run", cases)
    command = ["bench", "cpu", "--only", "seqlen=512", "--only", "d=64", "--dtype", "float32"]
    monkeypatch.setattr(_cli, "measure_rooflines", lambda *given: [])
    with pytest.raises(RuntimeError, match="taken away"):
        command_line.main([*command, "--json", str(path)])
    assert [len(document["cells"]) for document in kept] == [1]
    assert kept[0]["about"]["cells_left_out"] == 3
    assert command_line.main(["bench", "--load", str(path)]) == 0
