"""The text that is learned: Python's own reference, which every Python ships; tokens by BPE."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics  # what help("...") prints

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

Tokens = npt.NDArray[np.int64]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2's, of `vocab_size` tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def load(folder: Path, vocab_size: int) -> tuple[Tokenizer, Tokens]:
    """The tokenizer, which is kept in `folder`, and the text's tokens: shape (tokens,)."""
    text = "\n".join(topics[name] for name in sorted(topics))
    file = folder / "tokenizer.json"
    if not file.exists():
        train_tokenizer(text, vocab_size).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise SystemExit(f"{file} has {size} tokens, the model {vocab_size}; use another --folder")
    return tokenizer, np.array(tokenizer.encode(text).ids, np.int64)


def digest(tokenizer: Tokenizer) -> str:
    """Of its vocabulary, whose numbers the embeddings belong to."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def batch(tokens: Tokens, step: int, seed: int, batch_size: int, seqlen: int) -> Tokens:
    """Random pieces of the text: shape (batch_size, seqlen + 1). A step's are always the same, so
    that a run that was interrupted goes on as if it had not been."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(tokens) - seqlen, batch_size)
    return np.stack([tokens[start : start + seqlen + 1] for start in starts])
