"""`python -m anyflash` and its demo: what they print, and that the transformer is the right one."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import anyflash
from anyflash import __main__ as command_line
from anyflash import demo
from anyflash._cli import terminal

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "Words",
    "A considerably longer sentence, so that the batch holds rows of rather different lengths.",
)


@pytest.fixture
def packages():
    missing = [command for name, command in demo.INSTALL.items() if not _is_installed(name)]
    if missing:
        pytest.fail("the demo's packages are not installed; run: " + " && ".join(missing))


def _is_installed(package):
    return importlib.util.find_spec(package) is not None


@pytest.fixture
def encoder(packages):
    return demo.Encoder(demo.CheckedAttention())


def run_module(*arguments, hide=()):
    """`python -m anyflash ARGUMENTS` in a process to which the packages in `hide` do not exist."""
    code = (
        "import runpy, sys; "
        f"sys.modules.update(dict.fromkeys({list(hide)!r})); "
        f"sys.argv[1:] = {list(arguments)!r}; "
        "runpy.run_module('anyflash', run_name='__main__', alter_sys=True)"
    )
    start = ["-c", code] if hide else ["-m", "anyflash", *arguments]
    return subprocess.run(
        [sys.executable, *start],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=120,
    )


def ranking(output):
    """[(score, sentence), ...] as printed."""
    found = re.findall(r"^ +(-?\d\.\d{3})  (.+)$", output, re.MULTILINE)
    return [(float(score), sentence) for score, sentence in found]


def deviations(output):
    """The deviations as printed: of attention layers, of padded against unpadded embeddings."""
    found = re.findall(r"(\d\.\de[-+]\d\d|nan)  \(bound", output)
    return [float(value) for value in found]


def oracle(ids):
    """all-MiniLM-L6-v2 for one sentence, float64 throughout, head by head."""
    from safetensors.numpy import load_file

    root = Path(importlib.util.find_spec(demo.MODEL_PACKAGE).origin).parent
    weights = load_file(root / "model" / "model.safetensors")
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def linear(x, name):
        return np.einsum("ti,oi->to", x, w[name + ".weight"]) + w[name + ".bias"]

    def norm(x, name):
        z = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + 1e-12)
        return z * w[name + ".weight"] + w[name + ".bias"]

    def head(q, k, v):
        scores = np.exp(q @ k.T / np.sqrt(32.0))
        return (scores / scores.sum(1)[:, None]) @ v

    phi = np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2.0)))
    e = "embeddings."
    x = w[e + "word_embeddings.weight"][ids] + w[e + "token_type_embeddings.weight"][0]
    x = norm(x + w[e + "position_embeddings.weight"][: len(ids)], e + "LayerNorm")
    for layer in range(6):
        p = f"encoder.layer.{layer}."
        q, k, v = (linear(x, p + "attention.self." + n) for n in ("query", "key", "value"))
        cuts = [slice(32 * h, 32 * h + 32) for h in range(12)]
        heads = np.concatenate([head(q[:, c], k[:, c], v[:, c]) for c in cuts], axis=1)
        attended = linear(heads, p + "attention.output.dense")
        x = norm(x + attended, p + "attention.output.LayerNorm")
        h = linear(x, p + "intermediate.dense")
        x = norm(x + linear(h * phi(h), p + "output.dense"), p + "output.LayerNorm")
    mean = x.mean(0)
    return mean / np.sqrt((mean * mean).sum())


def test_demo_finds_the_built_in_sentence_that_answers(packages):
    result = run_module("demo", "--backend", "cpu")
    assert result.returncode == 0, result.stderr
    assert f" on the CPU ({anyflash.build_info()['cpu']['isa']})\n" in result.stdout
    ranked = ranking(result.stdout)
    assert [score for score, _ in ranked] == sorted((s for s, _ in ranked), reverse=True)
    assert len(ranked) == 5
    assert "forgotten password" in ranked[0][1]
    assert ranked[0][0] > ranked[1][0] + 0.2
    layers, padding = deviations(result.stdout)
    assert layers < 1e-5
    assert padding < 1e-5
    assert re.search(r"^\d+ attention calls took \d+\.\d ms$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("query", "closest"),
    [
        ("A physician examines her patient.", "The doctor looks at the sick woman."),
        ("The bank raised its interest rates.", "Borrowing money has become more expensive."),
        ("Wolves hunt in packs.", "Predators that live in groups chase their prey together."),
    ],
)
def test_demo_prefers_meaning_to_words(packages, query, closest):
    others = ("The patient fisherman waited on the river bank.", "He packs his suitcase.")
    result = run_module("demo", *others, closest, "--query", query, "--top", "2")
    assert result.returncode == 0, result.stderr
    ranked = ranking(result.stdout)
    assert len(ranked) == 2
    assert ranked[0][1] == closest


def test_first_sentence_is_the_query_where_none_is_given(packages):
    result = run_module("demo", "A kitten naps.", "Shares fell sharply.", "The cat is asleep.")
    assert result.returncode == 0, result.stderr
    assert "query: A kitten naps." in result.stdout
    assert [text for _, text in ranking(result.stdout)] == [
        "The cat is asleep.",
        "Shares fell sharply.",
    ]


def test_embeddings_agree_with_a_float64_model(encoder):
    tokens = encoder.tokenize(SENTENCES)
    expected = np.stack([oracle(ids) for ids in tokens])
    np.testing.assert_allclose(encoder.embed_unpadded(tokens), expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(encoder.embed_padded(tokens), expected, rtol=0, atol=2e-6)


def test_similarities_are_those_the_model_is_published_with(encoder):
    embeddings = encoder.embed_unpadded(encoder.tokenize(SENTENCES[:3]))
    # The quick start of sentence-transformers prints these for the same model and sentences.
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(embeddings @ embeddings.T, published, rtol=0, atol=1e-4)


def test_padding_has_no_influence(encoder):
    tokens = encoder.tokenize(SENTENCES)
    assert len({len(ids) for ids in tokens}) > 2
    word = encoder.tokenize(["stadium"])[0][1]
    np.testing.assert_array_equal(
        encoder.embed_padded(tokens), encoder.embed_padded(tokens, pad_id=word)
    )


def test_every_layer_runs_through_anyflash(encoder, monkeypatch):
    shapes = []
    real = anyflash.attention

    def spy(q, k, v, **options):
        shapes.append((q.shape, k.shape, v.shape, q.dtype))
        return real(q, k, v, **options)

    monkeypatch.setattr(anyflash, "attention", spy)
    tokens = encoder.tokenize(["One sentence.", "Two sentences."])
    encoder.embed_unpadded(tokens)
    assert len(tokens[0]) == len(tokens[1]) == 5
    assert shapes == [(((2, 5, 12, 32),) * 3 + (np.dtype(np.float32),))] * 6


@pytest.mark.parametrize("arguments", [("demo", "--json"), ("--json", "demo")])
def test_json_has_what_is_printed(packages, capsys, arguments):
    choices = ("A kitten naps.", "Shares fell sharply.", "The cat is asleep.", "--backend", "cpu")
    assert command_line.main([*arguments, *choices]) == 0
    found = json.loads(capsys.readouterr().out)
    assert command_line.main(["demo", *choices]) == 0
    shown = capsys.readouterr().out
    closest = [(round(hit["score"], 3), hit["sentence"]) for hit in found["closest"]]
    assert closest == ranking(shown)
    assert [f"{check['deviation']:.1e}" for check in found["checks"]] == re.findall(
        r"(\S+)  \(bound", shown
    )
    assert all(check["good"] for check in found["checks"])


@pytest.mark.parametrize("fault", [1e-3, np.nan])
def test_demo_fails_where_attention_is_wrong(packages, monkeypatch, capsys, fault):
    real = anyflash.attention
    monkeypatch.setattr(anyflash, "attention", lambda q, k, v: real(q, k, v) + np.float32(fault))
    assert command_line.main(["demo", "--backend", "cpu"]) == 1
    output = capsys.readouterr().out
    assert "TOO LARGE" in output
    assert not deviations(output)[0] <= demo.LAYER_BOUND


@pytest.mark.parametrize("package", list(demo.INSTALL))
def test_missing_package_is_named_with_its_command(packages, package):
    result = run_module("demo", hide=[package])
    assert result.returncode == 1
    assert result.stderr == (
        f"anyflash demo:\nnot installed: {package}; run:\n{demo.INSTALL[package]}\n"
    )
    assert result.stdout == ""


def test_missing_numpy_is_named_with_its_command():
    result = run_module("demo", hide=["numpy"])
    assert result.returncode == 1
    assert "python -m pip install numpy" in result.stderr
    assert "Traceback" not in result.stderr


def test_all_missing_packages_are_named_at_once():
    result = run_module("demo", hide=list(demo.INSTALL))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for command in demo.INSTALL.values():
        assert f"\n{command}\n" in result.stderr


def test_package_that_cannot_be_imported_is_named(packages, monkeypatch, capsys):
    def broken(name):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert command_line.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "safetensors cannot be imported (undefined symbol)" in error
    assert demo.INSTALL["safetensors"] in error


def test_json_is_build_info():
    result = run_module("--json")
    assert result.returncode == 0, result.stderr
    here, there = json.loads(json.dumps(anyflash.build_info())), json.loads(result.stdout)
    for kernel in here["kernels"] + there["kernels"]:
        kernel["launches"] = 0  # of each process
    assert there == here


def test_overview_names_what_is_built_and_what_runs():
    result = run_module()
    assert result.returncode == 0, result.stderr
    info = anyflash.build_info()
    assert result.stdout.startswith(f"anyflash {anyflash.__version__}\n")
    assert " ".join(info["cpu"]["compiled"]) in result.stdout
    for kernel in info["kernels"]:
        head_dim = kernel["head_dim"] or "any"
        row = rf"{kernel['op']} +{kernel['arch']} .*{kernel['dtype']} .*\b{head_dim}\b.* \w+"
        assert re.search(row, result.stdout), kernel
    for device in info["devices"]:
        assert device["name"] in result.stdout
    assert (info["device_error"] or "") in result.stdout
    assert "python -m anyflash demo" in result.stdout


def overview(info):
    return terminal.plain(command_line.overview(info))


CPU = {"isa": "avx2", "compiled": ["baseline", "avx2"], "threads": 8}


def test_overview_without_cuda():
    info = {"version": "1.2.3", "cuda": None, "cpu": CPU, "kernels": [], "devices": []}
    text = overview({**info, "device_error": "This build has no CUDA kernels."})
    assert text.startswith("anyflash 1.2.3\n\nbuilt\n  CUDA  no\n  CPU   baseline avx2\n")
    assert text.endswith("\n  CPU  avx2, 8 threads\n  GPU  This build has no CUDA kernels.")


def test_overview_groups_kernels_and_lists_devices():
    kernels = [
        {
            **{"op": op, "arch": arch, "dtype": dtype, "features": features},
            **{"head_dim": head_dim, "head_dim_v": head_dim_v},
        }
        for op, arch, dtype, head_dim, head_dim_v, features in [
            ("fwd", "sm80", "fp16", 128, 128, []),
            ("fwd", "sm80", "fp16", 64, 64, []),
            ("fwd", "sm80", "bf16", 64, 64, []),
            ("fwd", "sm80", "bf16", 64, 64, ["bias", "dropout"]),
            ("fwd", "sm80", "bf16", 128, 128, []),
            ("fwd", "sm90", "bf16", 192, 128, ["bias"]),
            ("fwd", "cpu", "bf16", 0, 0, ["bias", "dropout"]),
            # What another operation has does not count.
            ("dec", "sm80", "bf16", 64, 64, ["softcap"]),
            ("dec", "cpu", "bf16", 0, 0, ["softcap", "quantized_cache"]),
        ]
    ]
    device = {"index": 0, "name": "Old GPU", "compute_capability": "6.1", "supported": False}
    text = overview(
        {
            "version": "1.2.3",
            "cuda": {"runtime_version": "13.0", "archs": ["sm_80", "sm_90"]},
            "cpu": {**CPU, "threads": 1},
            "kernels": kernels,
            "devices": [device],
            "device_error": None,
        }
    )
    assert "  CUDA  runtime 13.0 for sm_80 sm_90\n" in text
    assert re.search(r"^ +fwd  sm80  bf16 fp16  64 128 +none$", text, re.MULTILINE)
    assert re.search(r"^ +fwd  sm80  bf16       64 +all$", text, re.MULTILINE)
    assert re.search(r"^ +fwd  sm90  bf16       192/128 +bias$", text, re.MULTILINE)
    assert re.search(r"fwd  cpu   bf16       any +all$", text, re.MULTILINE)
    assert re.search(r"^ +dec  sm80  bf16       64 +softcap$", text, re.MULTILINE)
    assert re.search(r"dec  cpu   bf16       any +all$", text, re.MULTILINE)
    assert "  CPU    avx2, 1 thread\n" in text
    assert text.endswith(
        "  GPU 0  Old GPU, compute capability 6.1: no kernels for it in this build"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "only one"], "give --query TEXT, or at least two sentences"),
        (["demo", "--top", "0"], "must be at least 1, not 0"),
        (["dmeo"], "invalid choice: 'dmeo'"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
