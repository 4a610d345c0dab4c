"""anyflash.integrations.transformers: masks whose columns are two intervals at most."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from anyflash.integrations import _hf_attention
from anyflash.integrations._hf_ranges import key_ranges
from models.hf_models import build, difference, padding, run, tokens

IMAGES = ((4, 17), (20, 30))  # tokens of two images


def mask_of(ranges: Tensor, rows: int) -> Tensor:
    """(batch, 1, rows, keys) bool"""
    row = torch.arange(rows)[:, None]
    a, b, c, d = (x[:, :, None] for x in ranges.unbind(-1))
    return ((a <= row) & (row < b)) | ((c <= row) & (row < d))


def random_mask(rows: int, keys: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, rows + 1, (2, 1, keys, 4), generator=random, dtype=torch.int32)
    return mask_of(ends.sort(-1).values, rows)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_ranges_say_what_the_mask_says(rows: int) -> None:
    mask = random_mask(rows, 90, rows)
    found = key_ranges(lambda first, count: mask[:, :, first : first + count], rows)
    assert found is not None
    assert found.shape == (2, 1, 90, 4)
    assert torch.equal(mask_of(found, rows), mask)
    one = mask[:1].expand(3, -1, -1, -1)  # the same for all sequences
    found = key_ranges(lambda first, count: one[:, :, first : first + count], rows)
    assert found is not None
    assert len(found) == 1


@pytest.mark.parametrize("begin", [0, 250, 600])
def test_three_intervals_are_not_two(begin: int) -> None:
    mask = torch.zeros((1, 1, 700, 9), dtype=torch.bool)
    for i in range(3):
        mask[:, :, begin + 3 * i + 1, 4] = True
    assert key_ranges(lambda first, count: mask[:, :, first : first + count], 700) is None


def within_images(batch: Any, head: Any, row: Any, column: Any) -> Any:
    """Tokens of an image see each other."""
    parts = [
        (begin <= row) & (row < end) & (begin <= column) & (column < end) for begin, end in IMAGES
    ]
    return parts[0] | parts[1]


def given_ranges(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls of anyflash.torch.attention, from now on, are given key_ranges."""
    calls: list[bool] = []
    attention = _hf_attention.attention

    def recorded(*tensors: Any, **options: Any) -> Any:
        calls.append(options.get("key_ranges") is not None)
        return attention(*tensors, **options)

    monkeypatch.setattr(_hf_attention, "attention", recorded)
    return calls


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
def test_images_in_a_causal_model(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    special = partial(masking_utils.create_causal_mask, or_mask_function=within_images)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", special)
    keep = padding(kind, seqlen=40)
    inputs = {"input_ids": tokens(*keep.shape), "attention_mask": keep}
    model = build("llama", torch.float64)
    exact = run(model, "exact", keep, inputs)
    calls = given_ranges(monkeypatch)
    assert max(difference(run(model, "anyflash", keep, inputs), exact)) < 1e-6
    assert calls == [True, True]


def test_few_queries_have_a_mask_of_all_scores() -> None:
    config = build("llama").config
    config._attn_implementation = "anyflash"
    make = masking_utils.create_causal_mask
    known = inspect.signature(make).parameters
    for length, shape in ((16, (1, 1, 16, 16)), (17, (1, 1, 17, 4))):
        given: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
        if "cache_position" in known:
            given["cache_position"] = torch.arange(length)
        embeddings = torch.empty(1, length, 0)
        mask = make(config, embeddings, or_mask_function=within_images, **given)
        assert mask.shape == shape
