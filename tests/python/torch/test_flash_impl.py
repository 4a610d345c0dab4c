"""anyflash.torch.register: PyTorch's registry, and its dispatcher with anyflash on the CPU."""

from __future__ import annotations

import doctest
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import anyflash.torch
from calls.launches import launches
from calls.torch_math import (
    ENDS,
    USED,
    causal,
    close,
    gradients,
    in_pages,
    math,
    packed,
    packed_math,
    randn,
    used_math,
    window,
)

aten = importlib.import_module("anyflash.torch._aten")
flash_impl = importlib.import_module("anyflash.torch._flash_impl")
registry = importlib.import_module("torch.nn.attention")

HAS_REGISTRY = hasattr(registry, "register_flash_attention_impl")
needs_registry = pytest.mark.skipif(not HAS_REGISTRY, reason="this PyTorch has no registry")


# What an operator is --------------------------------------------------------------------------


# Of each minor version of PyTorch that has a registry and could be had: what its wheel's
# torchgen/packaged/ATen/native/native_functions.yaml says after "func:" of flash attention.
SCHEMAS = {file.stem: file for file in sorted(Path(__file__).with_name("schemas").glob("*.txt"))}


def read_schemas(torch: ModuleType, version: str) -> dict[str, Any]:
    """By name, or name.overload; PyTorch has those "_for_cpu" beside what a registry replaces."""
    if version == "installed":
        found = torch._C._jit_get_all_schemas()
    else:
        lines = SCHEMAS[version].read_text().splitlines()
        found = [torch._C.parse_schema(f"aten::{line}") for line in lines]
    return {
        x.name.removeprefix("aten::") + (x.overload_name and f".{x.overload_name}"): x
        for x in found
        if x.name.startswith("aten::") and "_flash_attention" in x.name and "_cpu" not in x.name
    }


@pytest.mark.parametrize("version", ["installed", *SCHEMAS])
def test_schemas(torch: ModuleType, version: str) -> None:
    """Each operator is overridden. Every argument of it is a parameter, in its place and with its
    default, and as many results are given."""
    schemas = read_schemas(torch, version)
    assert {"_flash_attention_forward", "_flash_attention_backward"} < set(schemas)
    for name, schema in schemas.items():
        parameters = inspect.signature(aten.OVERRIDES[name]).parameters
        by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [x.name for x in schema.arguments if not x.kwarg_only] == by_position
        for x in schema.arguments:
            given = parameters[x.name]
            assert (given.kind is given.KEYWORD_ONLY) == x.kwarg_only
            default = x.default_value if x.has_default_value() else given.empty
            assert given.default == default
        results = typing.get_type_hints(aten.OVERRIDES[name])["return"]
        assert len(schema.returns) == len(typing.get_args(results) or [results])


def test_schemas_are_those_of_pytorch(torch: ModuleType) -> None:
    """What was read in a wheel is what its PyTorch says of itself."""
    version = torch.__version__.partition("+")[0]
    if version not in SCHEMAS:
        pytest.skip(f"no schemas of PyTorch {version} are kept")
    kept, own = (read_schemas(torch, x) for x in (version, "installed"))
    assert {name: str(x) for name, x in kept.items()} == {name: str(x) for name, x in own.items()}


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {  # of (2, 4, 6, 8) and (6, 4, 8)
    "contiguous": lambda torch, shape: torch.zeros(shape),
    "transposed": lambda torch, shape: torch.zeros(*shape[:-3], *(shape[-2], shape[-3], shape[-1]))
    .transpose(-3, -2),
    "slice": lambda torch, shape: torch.zeros(*shape[:-1], 3 * shape[-1])[..., : shape[-1]],
}  # fmt: skip


def described(results: Any) -> list[Any]:
    return [
        (x.shape, x.stride(), x.dtype) if hasattr(x, "stride") else x for x in results
    ]  # fmt: skip


@needs_registry
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_results_are_what_compiled_code_expects(
    torch: ModuleType, layout: str, packed: bool
) -> None:
    """Shapes, strides and dtypes are those of PyTorch's kernels for meta tensors."""
    q = LAYOUTS[layout](torch, (6, 4, 8) if packed else (2, 4, 6, 8))
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    if packed:
        forward, backward = "_flash_attention_forward", "_flash_attention_backward"
        shared: tuple[Any, ...] = (ends, ends, 4, 4, 0.0, True)
        arguments: tuple[Any, ...] = (q, q, q, *shared, False)
    else:
        forward = "_scaled_dot_product_flash_attention"
        backward, shared = f"{forward}_backward", (None, None, 6, 6, 0.0, True)
        arguments = (q, q, q, 0.0, True)

    def on_meta(name: str, given: tuple[Any, ...]) -> Any:
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if isinstance(x, torch.Tensor) else x
            for x in given
        ]  # fmt: skip
        return getattr(torch.ops.aten, name)(*moved)

    results = aten.OVERRIDES[forward](*arguments)
    assert described(results) == described(on_meta(forward, arguments))
    out, lse, state, unused = results[0], results[1], results[-3], results[-2]
    arguments = (out, q, q, q, out, lse, *shared, state, unused)
    assert described(aten.OVERRIDES[backward](*arguments)) == described(
        on_meta(backward, arguments)
    )


# The registry ---------------------------------------------------------------------------------


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """anyflash as PyTorch's flash attention of the CPU, which has none by these operators."""
    registry.register_flash_attention_impl(
        "anyflash on the CPU", register_fn=lambda: flash_impl.activate("CPU")
    )
    registry.activate_flash_attention_impl("anyflash on the CPU")
    yield
    if registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()
    importlib.import_module("torch.nn.attention._registry")._FLASH_ATTENTION_IMPLS.pop(
        "anyflash on the CPU"
    )


@needs_registry
def test_register(torch: ModuleType) -> None:
    for _ in range(2):
        anyflash.torch.register()
    assert "anyflash" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None

    def has_kernel(name: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"))

    before = {name: has_kernel(name) for name in aten.OVERRIDES if flash_impl.is_operator(name)}
    registry.activate_flash_attention_impl("anyflash")
    try:
        assert registry.current_flash_attention_impl() == "anyflash"
        assert all(map(has_kernel, before))
    finally:
        registry.restore_flash_attention_impl()
    assert {name: has_kernel(name) for name in before} == before


def test_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registry, "register_flash_attention_impl", raising=False)
    with pytest.raises(NotImplementedError, match=r"has no .*use anyflash\.torch\.sdpa_routing"):
        anyflash.torch.register()


@needs_registry
def test_operators_in_the_dispatcher(torch: ModuleType, on_cpu: None) -> None:
    """PyTorch's formula of gradients finds our backward; what was active is gone afterwards."""
    q, k, v = (randn(torch, 2, 4, 7, 8, seed=i).requires_grad_() for i in range(3))

    def attend() -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.3)[0]

    count, out = launches(attend)
    assert count == 1
    right, _ = math(torch, *[x.transpose(1, 2) for x in (q, k, v)], scale=0.3, hidden=causal)
    right = right.transpose(1, 2)
    close(torch, out, right)
    dout = randn(torch, 2, 4, 7, 8, seed=9)
    count, found = launches(lambda: gradients(torch, out, (q, k, v), dout))
    assert count > 0
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)
    registry.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        attend()


def test_removal(torch: ModuleType) -> None:
    """Also where somebody still holds the handle."""
    x = randn(torch, 1, 2, 3, 8)
    handle = flash_impl.activate("CPU")
    torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    handle.remove()
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)


@needs_registry
def test_dropout_in_the_dispatcher(torch: ModuleType, on_cpu: None) -> None:
    """The gradient of a sum of values weighs each with what the forward weighed it."""
    q = randn(torch, 1, 2, 6, 8)
    v = torch.eye(6).expand(1, 2, 6, 6).requires_grad_()
    out = torch.ops.aten._scaled_dot_product_flash_attention(q[..., :6], q[..., :6], v, 0.5)[0]
    (dv,) = torch.autograd.grad(out.sum(), v)
    close(torch, dv, out.sum(2)[..., None].expand(dv.shape))


@needs_registry
@pytest.mark.parametrize("bounds", [(-1, -1), (-1, 0), (3, 1)])
def test_varlen_attn(torch: ModuleType, on_cpu: None, bounds: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v, *rest = packed(torch)
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options = {"enable_gqa": True, "window_size": bounds}
    else:
        pytest.skip("this PyTorch's varlen_attn has neither grouped heads nor windows")
    count, out = launches(lambda: varlen.varlen_attn(q, k, v, *rest, **options))
    assert count == 1
    hidden = None if bounds == (-1, -1) else causal if bounds == (-1, 0) else window(*bounds)
    right, _ = packed_math(torch, q, k, v, ENDS, hidden=hidden)
    close(torch, out, right)
    dout = randn(torch, *out.shape, seed=9)
    found = gradients(torch, out, (q, k, v), dout)
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)


@needs_registry
def test_varlen_attn_with_pages(torch: ModuleType, on_cpu: None) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "num_splits" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch's varlen_attn takes no pages")
    q, k, v, cum_q, _, *maxima = packed(torch)
    with torch.no_grad():
        (k_pages, table), (v_pages, _) = in_pages(torch, k), in_pages(torch, v)
        options = {
            "seqused_k": torch.tensor(USED, dtype=torch.int32),
            "block_table": table,
            "enable_gqa": True,
            "window_size": (-1, 0),
            "num_splits": 2,
        }
        right, _ = used_math(torch, q, k, v, causal)
        arguments = (q, k_pages, v_pages, cum_q, None, *maxima)
        close(torch, varlen.varlen_attn(*arguments, **options), right)
        out = torch.full_like(q, torch.nan)
        close(torch, varlen.varlen_attn_out(out, *arguments, **options), right)


@needs_registry
@pytest.mark.filterwarnings("ignore::UserWarning")  # of prototypes
def test_nested_tensors(torch: ModuleType, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch computes by flash attention on a GPU; the CPU would choose another backend."""
    sdpa = importlib.import_module("torch.nested._internal.sdpa")
    backend = registry.SDPBackend.FLASH_ATTENTION
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_: backend)
    parts = [randn(torch, n, 3, 8, seed=n).requires_grad_() for n in (5, 1, 7)]
    x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    count, out = launches(lambda: attend(x, x, x, is_causal=True))
    assert count == 1
    rights = [math(torch, p[None], p[None], p[None], hidden=causal)[0][0] for p in parts]
    for actual, right in zip(out.transpose(1, 2).unbind(), rights, strict=True):
        close(torch, actual, right)
    found = torch.autograd.grad(out.values().square().sum(), parts)
    wanted = torch.autograd.grad(torch.cat(rights).square().sum(), parts)
    for dx, right in zip(found, wanted, strict=True):
        close(torch, dx, right)


@needs_registry
def test_compile(torch: ModuleType, on_cpu: None) -> None:
    def attend(x: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(x, x, x, 0.0, True)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    x = randn(torch, 2, 3, 7, 8).requires_grad_()
    out, right = compiled(x), attend(x)
    assert torch.equal(out, right)
    dout = randn(torch, 2, 3, 7, 8, seed=1)
    assert torch.equal(gradients(torch, out, x, dout)[0], gradients(torch, right, x, dout)[0])


@needs_registry
def test_example() -> None:
    assert doctest.testmod(flash_impl).failed == 0
