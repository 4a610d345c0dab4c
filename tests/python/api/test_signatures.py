"""The public functions spell their arguments out: they agree, as do the objects made of these."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anyflash
from anyflash._call import options

# Those whose framework is here.
ADAPTERS = {
    name: importlib.import_module(f"anyflash.{name}")
    for name in ("torch", "jax")
    if importlib.util.find_spec(name)
}
NAMES = ["attention", "attention_varlen", "attention_with_kvcache"]
# An adapter's machinery decides where and when; a part of an attention is for those who join parts.
OF_ADAPTERS = {"deterministic", "context_axis", "method", "layout"}
NOT_OF_ADAPTERS = {"out", "lse", "prior", "stream", "workspace", "part"}
PACKED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "validate"}
DEFAULTS = options.AttentionOptions()._asdict()


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_take_the_same(adapter: Any, name: str) -> None:
    """But for where results go, whether gradients are deterministic, and how devices share."""
    ours, theirs = parameters(getattr(anyflash, name)), parameters(getattr(adapter, name))
    assert [x for x in ours if x not in NOT_OF_ADAPTERS] == [
        x for x in theirs if x not in OF_ADAPTERS
    ]
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
        return list(parameters(options.given_options))
    return list(getattr(getattr(options, made, None), "_fields", ()))


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


def keywords() -> dict[str, set[str]]:
    """Of the TypedDicts that the overloads take the others from."""
    text = Path(anyflash.__path__[0], "_api", "keywords.pyi").read_text()
    return {
        node.name: {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)}  # type: ignore[attr-defined]
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not keep overloads")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "package", [anyflash, *ADAPTERS.values()], ids=lambda package: package.__name__
)
def test_overloads_take_the_same(package: Any, name: str) -> None:
    function = getattr(package, name)
    overloads = typing.get_overloads(function)
    assert len(overloads) >= 3
    others = keywords()["KvCacheKeywords" if name.endswith("kvcache") else "Keywords"]
    for overload in overloads:
        own = parameters(overload)
        kind = str(own.pop("options").annotation).partition("[")[2].partition("[")[0]
        assert set(own) | keywords()[kind] | others == set(parameters(function)), kind


def test_results_of_python_3_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its named tuples cannot be generic; they have the same fields."""
    path = Path(anyflash.__path__[0], "_call", "results.py")
    spec = importlib.util.spec_from_file_location("results_3_10", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    spec.loader.exec_module(module)
    for kind in (anyflash.AttentionResult, anyflash.AttentionGrads):
        older = getattr(module, kind.__name__)
        assert older is not kind
        assert older._fields == kind._fields


@pytest.mark.parametrize("kind", [anyflash.AttentionResult, anyflash.AttentionGrads, anyflash.Part])
def test_results_are_pickled_by_their_public_names(kind: Any) -> None:
    result = kind(*range(len(kind._fields)))
    text = pickle.dumps(result, protocol=0)
    assert b"canyflash\n" in text
    assert pickle.loads(text) == result
    assert type(pickle.loads(text)) is kind
