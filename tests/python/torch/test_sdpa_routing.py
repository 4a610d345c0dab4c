"""anyflash.torch.sdpa_routing: what reaches anyflash within, what stays PyTorch's, what is left."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import anyflash
from anyflash.torch import sdpa_routing
from calls.launches import launches

functional = importlib.import_module("torch.nn.functional")
OWN = functional.scaled_dot_product_attention  # PyTorch's


def routed(function: Callable[[], Any]) -> tuple[int, Any]:
    with sdpa_routing():
        return launches(function)


@pytest.fixture
def x(torch: ModuleType) -> Any:
    torch.manual_seed(0)
    return torch.randn(2, 3, 9, 8)


@pytest.fixture(autouse=True)
def nothing_is_left(torch: ModuleType) -> Iterator[None]:
    yield
    assert functional.scaled_dot_product_attention is OWN
    assert torch.backends.mha.get_fastpath_enabled()
    tensor = torch.zeros(1, 1, 2, 4)
    assert launches(lambda: functional.scaled_dot_product_attention(tensor, tensor, tensor))[0] == 0


# What is routed -----------------------------------------------------------------------------------


def attend(x: Any, **options: Any) -> Any:
    return functional.scaled_dot_product_attention(x, x, x, **options)


def test_context(torch: ModuleType, x: Any) -> None:
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.randn(9, 9)}, {"scale": 0.1}):
        count, out = routed(lambda: attend(x, **options))  # noqa: B023
        assert count == 1
        torch.testing.assert_close(out, attend(x, **options))


def test_dropout(torch: ModuleType, x: Any) -> None:
    with sdpa_routing():
        count, out = launches(lambda: attend(x, dropout_p=0.5))
        assert count == 1
        assert not torch.equal(out, attend(x))


def test_gqa(torch: ModuleType, x: Any) -> None:
    """Also before PyTorch 2.5."""
    key = torch.randn(2, 1, 9, 8)
    count, out = routed(
        lambda: functional.scaled_dot_product_attention(x, key, key, enable_gqa=True)
    )
    assert count == 1
    torch.testing.assert_close(out, OWN(x, key.expand(x.shape), key.expand(x.shape)))


def test_decorator(x: Any) -> None:
    function = sdpa_routing()(attend)
    assert function.__name__ == "attend"
    for _ in range(2):
        assert launches(lambda: function(x))[0] == 1
        assert launches(lambda: attend(x))[0] == 0


def test_gradients(torch: ModuleType, x: Any) -> None:
    x.requires_grad_()
    (right,) = torch.autograd.grad(attend(x).square().sum(), x)
    with sdpa_routing():
        out = attend(x)
    count, (dx,) = launches(lambda: torch.autograd.grad(out.square().sum(), x))
    assert count > 0
    torch.testing.assert_close(dx, right)


def test_import_by_name(x: Any) -> None:
    """Modules, also those loaded meanwhile; what holds the function otherwise keeps it."""
    before, meanwhile = ModuleType("anyflash_test_before"), ModuleType("anyflash_test_meanwhile")
    before.scaled_dot_product_attention = OWN
    holder = SimpleNamespace(scaled_dot_product_attention=OWN)
    try:
        sys.modules[before.__name__] = before
        with sdpa_routing():
            meanwhile.scaled_dot_product_attention = functional.scaled_dot_product_attention
            sys.modules[meanwhile.__name__] = meanwhile
            late = functional.scaled_dot_product_attention
            assert launches(lambda: before.scaled_dot_product_attention(x, x, x))[0] == 1
            assert holder.scaled_dot_product_attention is OWN
        assert before.scaled_dot_product_attention is OWN
        assert meanwhile.scaled_dot_product_attention is OWN
        assert launches(lambda: late(x, x, x))[0] == 0
    finally:
        for name in (before.__name__, meanwhile.__name__):
            sys.modules.pop(name, None)


OPTIONS = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
MODELS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda nn: nn.MultiheadAttention(16, 4, batch_first=True),
    "encoder": lambda nn: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**OPTIONS), 2, enable_nested_tensor=False
    ),
    "decoder": lambda nn: nn.TransformerDecoder(nn.TransformerDecoderLayer(**OPTIONS), 2),
}
CALLS: dict[str, Callable[..., Any]] = {  # model, x, mask, key_padding_mask
    "attention": lambda model, x, *masks: model(
        x, x, x, need_weights=False, attn_mask=masks[0], key_padding_mask=masks[1]
    )[0],
    "encoder": lambda model, x, *masks: model(x, *masks),
    "decoder": lambda model, x, *masks: model(
        x, x[:, :7], tgt_mask=masks[0], tgt_key_padding_mask=masks[1]
    ),
}
ATTENTIONS = {"attention": 1, "encoder": 2, "decoder": 4}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_modules(torch: ModuleType, name: str, masked: bool, training: bool) -> None:
    """In inference some have a fused fast path."""
    torch.manual_seed(0)
    model = MODELS[name](torch.nn).train(training)
    masks = [None, None]
    if masked:
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 6:] = True
        masks = [torch.ones(9, 9, dtype=torch.bool).triu(1), padding]
    x = torch.randn(2, 9, 16)
    with torch.set_grad_enabled(training):
        right = CALLS[name](model, x, *masks)
        count, out = routed(lambda: CALLS[name](model, x, *masks))
    assert count == ATTENTIONS[name]
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    if training:
        weights = list(model.parameters())
        expected = torch.autograd.grad(right.square().sum(), weights)
        actual = torch.autograd.grad(out.square().sum(), weights)
        for dx, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(dx, wanted, rtol=1e-3, atol=1e-4)


def test_checkpointing(torch: ModuleType, x: Any) -> None:
    """The recomputation is routed, too."""
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    x.requires_grad_()
    (right,) = torch.autograd.grad(attend(x).square().sum(), x)
    with sdpa_routing():
        count, out = launches(lambda: checkpoint(attend, x, use_reentrant=False))
        assert count == 1
        count, (dx,) = launches(lambda: torch.autograd.grad(out.square().sum(), x))
    assert count >= 2
    torch.testing.assert_close(dx, right)


def test_compile(torch: ModuleType, x: Any) -> None:
    """What was compiled outside is compiled anew within, and the other way round."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    right = attend(x)
    for _ in range(2):
        count, out = launches(lambda: compiled(x))
        assert count == 0
        torch.testing.assert_close(out, right)
        count, out = routed(lambda: compiled(x))
        assert count == 1
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("strict", [False, True])
def test_export(torch: ModuleType, strict: bool) -> None:
    """With lengths that are free."""

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, query: Any, key: Any) -> Any:
            return functional.scaled_dot_product_attention(query, key, key) + attend(
                query, is_causal=True
            )

    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8)
    lengths = [torch.export.Dim(name, min=2, max=64) for name in ("rows", "keys")]
    shapes = tuple({2: length} for length in lengths)
    with sdpa_routing():
        program = torch.export.export(Model(), (query, key), dynamic_shapes=shapes, strict=strict)
    called = [str(x.target) for x in program.graph.nodes if x.op == "call_function"]
    assert called.count("anyflash.forward.default") == 2
    for given in ((query, key), (key, query)):
        torch.testing.assert_close(program.module()(*given), Model()(*given))


def test_compiled_code_sees_which_gpus_are_supported(torch: ModuleType, x: Any) -> None:
    is_supported = importlib.import_module("anyflash.torch._routing")._is_supported_gpu
    compiled = torch.compile(
        lambda x: x + (1 if is_supported(x.device.index or 0) else 2),
        fullgraph=True,
        backend="eager",
    )
    gpus = [device["index"] for device in anyflash.build_info()["devices"] if device["supported"]]
    assert torch.equal(compiled(x), x + (1 if 0 in gpus else 2))


def test_the_import_is_light() -> None:
    """torch._dynamo takes seconds."""
    program = "import anyflash.torch, sys; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_autocast(torch: ModuleType, x: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        count, out = routed(lambda: functional.scaled_dot_product_attention(x, x.bfloat16(), x))
    assert count == 1
    assert out.dtype == torch.bfloat16


# Its extent ---------------------------------------------------------------------------------------


def test_nesting_and_exceptions(x: Any) -> None:
    with sdpa_routing():
        with pytest.raises(KeyError), sdpa_routing():
            raise KeyError
        assert launches(lambda: attend(x))[0] == 1
        with sdpa_routing(), sdpa_routing():
            assert launches(lambda: attend(x))[0] == 1
        assert launches(lambda: attend(x))[0] == 1
    assert launches(lambda: attend(x))[0] == 0
    with pytest.raises(RuntimeError, match="at least 2 axes"), sdpa_routing():
        attend(x[0, 0, 0])


def test_the_fast_path_is_left_as_it_was(torch: ModuleType) -> None:
    mha = torch.backends.mha
    try:
        mha.set_fastpath_enabled(False)
        with sdpa_routing():
            assert not mha.get_fastpath_enabled()
        assert not mha.get_fastpath_enabled()
    finally:
        mha.set_fastpath_enabled(True)


def test_other_threads_are_routed(x: Any) -> None:
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(launches(lambda: attend(x))[0]))
    with sdpa_routing():
        thread.start()
        thread.join()
    assert counts == [1]


def test_many_threads_enter_and_leave(x: Any) -> None:
    wrong: list[Any] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            with sdpa_routing():
                if functional.scaled_dot_product_attention is OWN:
                    wrong.append("not routed")
                attend(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_replacements_by_others(monkeypatch: pytest.MonkeyPatch, x: Any) -> None:
    """One from before gets what we do not compute; a later one stays."""
    name = "scaled_dot_product_attention"
    empty = x[..., :0]
    with monkeypatch.context() as patch:
        patch.setattr(functional, name, lambda *_, **__: "theirs")
        with sdpa_routing():
            assert launches(lambda: attend(x))[0] == 1
            assert attend(empty) == "theirs"
        assert attend(x) == "theirs"
    with monkeypatch.context() as patch:
        with sdpa_routing():
            patch.setattr(functional, name, lambda *_, **__: "theirs")
            assert attend(x) == "theirs"
        assert attend(x) == "theirs"
    # What they put back is not PyTorch's, but does the same.
    assert functional.scaled_dot_product_attention is not OWN
    assert launches(lambda: attend(x))[0] == 0
    with sdpa_routing():
        assert launches(lambda: attend(x))[0] == 1
        assert launches(lambda: attend(empty))[0] == 0


# What stays PyTorch's -----------------------------------------------------------------------------


def stays(torch: ModuleType, function: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        count, out = routed(function)
        right = function()
    assert count == 0
    assert type(out) is type(right)
    if out.is_nested:
        out, right = out.to_padded_tensor(0.0), right.to_padded_tensor(0.0)
    if out.device.type == "cpu":
        torch.testing.assert_close(out, right, rtol=0, atol=0, equal_nan=True)


def test_other_tensors(torch: ModuleType, x: Any) -> None:
    class Other(torch.Tensor):
        pass

    stays(torch, lambda: attend(x.as_subclass(Other)))
    stays(torch, lambda: attend(x.to("meta")))
    stays(torch, lambda: attend(x[..., :0]))
    stays(torch, lambda: attend(x[:, :0]))
    negated, mask = (torch.complex(y, y).conj().imag for y in (x, x.new_ones(9, 9)))
    assert negated.is_neg()
    stays(torch, lambda: attend(negated))
    stays(torch, lambda: attend(x, attn_mask=mask))
    stays(torch, lambda: attend(torch.nested.nested_tensor([x[0], x[1, :, :4]])))
    stays(torch, lambda: OWN(x, x, x, x.new_zeros(9, 9).as_subclass(Other)))


def test_a_mask_with_is_causal(torch: ModuleType, x: Any) -> None:
    """Some of PyTorch's backends take both."""
    x = x.double().requires_grad_()
    mask = torch.zeros(9, 9, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        routed(lambda: attend(x, attn_mask=mask, is_causal=True))


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias(torch: ModuleType, x: Any, variant: str) -> None:
    """PyTorch's class looks for its function in torch.nn.functional."""
    make = getattr(importlib.import_module("torch.nn.attention.bias"), variant)
    query = x[:, :, :6]
    right = OWN(query, x, x, make(6, 9))
    count, out = routed(lambda: functional.scaled_dot_product_attention(query, x, x, make(6, 9)))
    assert count == 1
    torch.testing.assert_close(out, right)

    class Other(torch.Tensor):
        pass

    other = query.as_subclass(Other)
    count, out = routed(lambda: functional.scaled_dot_product_attention(other, x, x, make(6, 9)))
    assert count == 0
    torch.testing.assert_close(out.as_subclass(torch.Tensor), right)

    for given in (query, other):
        with pytest.raises(ValueError, match="a CausalBias and is_causal are both given"):
            routed(
                lambda given=given: functional.scaled_dot_product_attention(
                    given, x, x, make(6, 9), is_causal=True
                )
            )


def test_forward_mode(torch: ModuleType, x: Any) -> None:
    x = x.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        stays(torch, lambda: torch.func.jvp(attend, (x,), (x,))[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_tracers(torch: ModuleType, x: Any) -> None:
    """A trace is to run without anyflash."""
    with sdpa_routing():
        traced = torch.jit.trace(attend, x)
        graph = torch.fx.symbolic_trace(lambda x: attend(x)).graph  # noqa: PLW0108
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert OWN in [node.target for node in graph.nodes]
    torch.testing.assert_close(traced(2 * x), attend(2 * x))
