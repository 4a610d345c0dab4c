"""The public functions spell their arguments out: they agree, as do the objects made of these."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anyflash
import anyflash.jax
import anyflash.torch
from anyflash import _options

ADAPTERS = [anyflash.torch, anyflash.jax]
NAMES = ["attention", "attention_varlen", "attention_with_kvcache"]
TARGETS = {"out", "stream", "workspace"}  # an adapter's machinery decides where and when
PACKED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "validate"}
DEFAULTS = _options.AttentionOptions()._asdict()


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=["torch", "jax"])
def test_adapters_take_the_same(adapter: Any, name: str) -> None:
    """But for where results go, and whether gradients are deterministic."""
    ours, theirs = parameters(getattr(anyflash, name)), parameters(getattr(adapter, name))
    assert [x for x in ours if x not in TARGETS] == [x for x in theirs if x != "deterministic"]
    for x in set(ours) & set(theirs):
        assert (ours[x].kind, ours[x].default) == (theirs[x].kind, theirs[x].default), x


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_packed_and_dense_take_the_same(suffix: str) -> None:
    dense = parameters(getattr(anyflash, f"attention{suffix}"))
    packed = parameters(getattr(anyflash, f"attention_varlen{suffix}"))
    assert set(packed) - set(dense) == PACKED
    assert set(dense) <= set(packed)
    assert all(dense[x].default is packed[x].default for x in dense)


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_defaults_are_those_of_the_options(name: str) -> None:
    given = parameters(getattr(anyflash, name))
    assert {x: given[x].default for x in DEFAULTS} == DEFAULTS
    assert all(given[x].default is DEFAULTS[x] for x in DEFAULTS)  # recognized by identity


def calls_by_position() -> Iterator[tuple[str, str, list[str]]]:
    """(file, object, names of the arguments) of each object that is made of variables."""
    for path in sorted(Path(anyflash.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [x.id for x in node.args if isinstance(x, ast.Name)]
                if len(names) == len(node.args) > 4:
                    yield path.name, node.func.id, names


def fields(made: str) -> list[str]:
    if made == "given_options":
        return list(parameters(_options.given_options))
    return list(getattr(getattr(_options, made, None), "_fields", ()))


def test_objects_are_made_in_the_order_of_their_fields() -> None:
    seen = set()
    for file, made, names in calls_by_position():
        if fields(made):
            assert names == fields(made)[: len(names)], (file, made)
            seen.add(made)
    assert seen >= {
        "given_options",
        "AttentionOptions",
        "Packing",
        "OutputRequest",
        "GradientRequest",
        "KvCacheOptions",
    }
