"""anyflash.torch.attention and attention_varlen: results and gradients against the oracle's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import anyflash
import anyflash.torch as attention_of_torch
from calls.backward import FIELDS, NUMPY, OPTIONS, SINKS, Case
from calls.frameworks import EVERY_DTYPE, LARGE, bits, inputs
from calls.torch_calls import BLOCKS, LEAVES, PARTS, TORCH, VARLEN, Call


def verify(call: Call, **more: Any) -> Any:
    given = call.tensors()
    result = call.attend(given, return_result=True, **more)
    call.verify(result, call.backward(result, given))
    return result


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    verify(Call(OPTIONS[name]))


@EVERY_DTYPE
@pytest.mark.parametrize("name", ["causal", "all", "seqused"])
def test_dtypes(dtype: str, name: str) -> None:
    verify(Call(OPTIONS[name], dtype))


@LARGE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "all"])
def test_large_head_dims(name: str, dtype: str, head_dims: tuple[int, int]) -> None:
    tensors = dict(zip("qkv", inputs(dtype, head_dims=head_dims), strict=True))
    verify(Call(OPTIONS[name] | tensors, dtype))


@pytest.mark.parametrize("name", VARLEN)
def test_packed(name: str) -> None:
    verify(Call(VARLEN[name], varlen=True), validate=name == "validate")


@EVERY_DTYPE
def test_packed_dtypes(dtype: str) -> None:
    verify(Call(VARLEN["all"], dtype, varlen=True))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_block_mask(name: str) -> None:
    verify(Call(PARTS[name] | BLOCKS, varlen=name == "packed"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_dtype(dtype: str) -> None:
    result = verify(Call({"out_dtype": "float32", "causal": True}, dtype))
    assert result.out.dtype == TORCH.module.float32


@pytest.mark.parametrize("varlen", [False, True])
def test_nan_in_hidden_keys_is_not_seen(varlen: bool) -> None:
    used = [2, 4, 0, 0, 11] if varlen else [30, 50]
    call = Call({"seqused_k": np.array(used, np.int32), "causal": True}, varlen=varlen)
    for name in "kv":
        x = call.arrays[name]
        if varlen:
            x[2], x[7:10], x[25:] = np.nan, np.inf, np.nan
        else:
            x[0, 30:] = np.nan
    result = verify(call)
    assert not result.out.isnan().any()


# The same bits as with NumPy ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["plain", "bias-batch", "seqused", "dropout", "all"])
def test_bits(name: str, dtype: str) -> None:
    case = Case(OPTIONS[name], dtype, dlse=True)
    arguments = case.forward(NUMPY)
    right = anyflash.attention_backward(**arguments, **case.asked)
    call = Call(OPTIONS[name], dtype)
    call.dout, call.dlse = case.dout, case.given["dlse"]
    given = call.tensors()
    result = call.attend(given, return_result=True)
    grads = call.backward(result, given)
    assert bits(TORCH.take(result.out.detach())) == bits(arguments["out"])
    assert bits(TORCH.take(result.lse.detach())) == bits(arguments["lse"])
    for field, one, other in zip(FIELDS, grads, right, strict=True):
        assert (one is None) == (other is None), field
        assert one is None or bits(TORCH.take(one)) == bits(other), field


@pytest.mark.parametrize("varlen", [False, True])
def test_anyflash_attention_comes_here(torch: ModuleType, varlen: bool) -> None:
    """With tensors that require grad; else it does the same without recording."""
    call = Call(VARLEN["all"] if varlen else OPTIONS["all"], varlen=varlen)
    attend = anyflash.attention_varlen if varlen else anyflash.attention
    given = call.tensors()
    right, result = call.attend(given, return_result=True), attend(**given, return_result=True)
    assert result.out.grad_fn.name() == right.out.grad_fn.name() == "AttentionBackward"
    for one, other in zip(result[:2], right[:2], strict=True):
        assert torch.equal(one, other)
    grads = (call.backward(x, given) for x in (result, right))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        plain = attend(**given, return_result=True)
    assert plain.out.grad_fn is None
    assert torch.equal(plain.out, right.out)
    detached = attend(**{name: _detached(x) for name, x in given.items()})
    assert not detached.requires_grad
    assert torch.equal(detached, right.out)


def _detached(x: Any) -> Any:
    return x.detach() if hasattr(x, "detach") else x


# What is asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAVES)
def test_one_input_requires_grad(name: str) -> None:
    call = Call(OPTIONS["all"])
    whole = call.tensors()
    right = call.backward(call.attend(whole, return_lse=True), whole)
    given = call.tensors(name)
    found = call.backward(call.attend(given, return_lse=True), given)
    for leaf, one, other in zip(LEAVES, found, right, strict=True):
        assert (one is None) == (leaf != name)
        assert one is None or bits(TORCH.take(one)) == bits(TORCH.take(other))


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_output_is_used(torch: ModuleType, used: str) -> None:
    """The other one's gradient counts as 0, also where it is an explicit 0."""
    call = Call(OPTIONS["sinks"])
    grads = []
    for factor in (None, 0.0):
        given = call.tensors()
        out, lse = call.attend(given, return_lse=True)
        one, other = (out, lse) if used == "out" else (lse, out)
        loss = one.square().sum() if factor is None else one.square().sum() + factor * other.sum()
        loss.backward()
        grads.append([given[name].grad for name in ("q", "k", "v", "sinks")])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    assert not (used == "lse" and grads[0][2].any())  # of v


def test_gradients_of_nothing_differentiable(torch: ModuleType) -> None:
    """max_logits and the dropout mask have none."""
    call = Call({"dropout_p": 0.5, "seed": 1})
    result = call.attend(call.tensors(), return_max_logits=True, return_dropout_mask=True)
    assert result.out.requires_grad
    assert result.lse.requires_grad
    assert not result.max_logits.requires_grad
    assert not result.dropout_mask.requires_grad


def test_result_fields(torch: ModuleType) -> None:
    call = Call({"dropout_p": 0.25, "seed": 7})
    given = call.tensors()
    out = call.attend(given)
    pair = call.attend(given, return_lse=True)
    result = call.attend(given, return_result=True)
    assert isinstance(out, torch.Tensor)
    assert type(pair) is tuple
    assert isinstance(result, anyflash.AttentionResult)
    assert torch.equal(out, result.out)
    assert torch.equal(pair[1], result.lse)
    assert result[2:] == (None, (7, 0), None)
    right = anyflash.attention(*inputs(), dropout_p=0.25, seed=7, return_dropout_mask=True)
    for name in ("max_logits", "dropout_mask"):
        alone = call.attend(given, **{f"return_{name}": True})
        filled = [x is not None for x in alone]
        assert filled == [True, True, name == "max_logits", True, name == "dropout_mask"]
    assert (alone.dropout_mask.numpy() == right.dropout_mask).all()
    logits = call.attend(given, return_max_logits=True).max_logits
    numpy = anyflash.attention(*inputs(), return_max_logits=True).max_logits
    assert bits(logits.numpy()) == bits(numpy)


# Dropout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["seed", "tensor", "pair", "drawn"])
@pytest.mark.parametrize("varlen", [False, True])
def test_random_states(torch: ModuleType, how: str, varlen: bool) -> None:
    """The same numbers in both passes, wherever they come from; they can be given again."""
    state: dict[str, Any] = {
        "seed": {"seed": (1 << 63) + 5},
        "tensor": {"rng_state": torch.tensor([7, -3])},
        "pair": {"rng_state": ((1 << 64) - 1, 1 << 63)},
    }.get(how, {})
    call = Call({"dropout_p": 0.3}, varlen=varlen)
    result = verify(call, **state)
    if how == "tensor":
        assert result.rng_state is state["rng_state"]
    elif how == "drawn":
        assert (result.rng_state.shape, result.rng_state.dtype) == ((2,), torch.int64)
    else:
        assert result.rng_state == state.get("rng_state", ((1 << 63) + 5, 0))
    again = call.attend(call.tensors(), rng_state=result.rng_state)
    assert torch.equal(again, result.out)


def test_manual_seed(torch: ModuleType) -> None:
    call = Call({"dropout_p": 0.5})

    def draw() -> list[Any]:
        torch.manual_seed(3)
        return [call.attend(call.tensors()) for _ in range(2)]

    one, other = draw(), draw()
    assert not torch.equal(one[0], one[1])
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_nothing_is_drawn_without_dropout(torch: ModuleType) -> None:
    before = torch.get_rng_state()
    call = Call()
    result = call.attend(call.tensors(), dropout_p=0.0, return_result=True)
    call.attend(call.tensors(), dropout_p=0.5, seed=3)
    assert result.rng_state is None
    assert torch.equal(torch.get_rng_state(), before)


# Layouts ------------------------------------------------------------------------------------------


def layouts(torch: ModuleType, x: Any) -> dict[str, Any]:
    return {
        "bhsd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "columns": torch.stack([x, x], -1)[..., 1],
        "slice": torch.cat([x, x], 1)[:, x.shape[1] :],
    }


@pytest.mark.parametrize("layout", ["bhsd", "columns", "slice"])
def test_layouts_of_inputs_and_gradients(torch: ModuleType, layout: str) -> None:
    call = Call({"causal": True, "sinks": SINKS})
    given = call.tensors()
    out = call.attend(given)
    right = torch.autograd.grad(out, [given[x] for x in "qkv"], TORCH.give(call.dout))
    for name in "qkv":
        given[name] = layouts(torch, given[name].detach())[layout].requires_grad_()
    other = call.attend(given)
    dout = layouts(torch, TORCH.give(call.dout))[layout]
    assert not (dout.is_contiguous() and layout != "slice")
    grads = torch.autograd.grad(other, [given[x] for x in "qkv"], dout)
    assert torch.equal(out, other)
    for one, two in zip(grads, right, strict=True):
        assert torch.equal(one, two)


def test_stride_0(torch: ModuleType) -> None:
    """sum() gives such a gradient; expanded keys get the sum of theirs."""
    call = Call()
    given = call.tensors()
    call.attend(given).sum().backward()
    right = torch.autograd.grad(
        call.attend(given), given["q"], torch.ones((*given["q"].shape[:-1], 12))
    )[0]
    assert torch.equal(given["q"].grad, right)
    narrow = {name: given[name].detach()[:, :, :1].clone().requires_grad_() for name in "kv"}
    wide = {name: x.expand(-1, -1, 4, -1) for name, x in narrow.items()}
    q = given["q"].detach()
    out = attention_of_torch.attention(q, **wide)
    assert torch.equal(out, attention_of_torch.attention(q, **narrow))
    grads = torch.autograd.grad(out, [*narrow.values()], TORCH.give(call.dout))
    other = torch.autograd.grad(
        attention_of_torch.attention(q, **narrow), [*narrow.values()], TORCH.give(call.dout)
    )
    for one, two in zip(grads, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_negative_gradients(torch: ModuleType) -> None:
    """Which torch never computed: a bit says that they are."""
    call = Call()
    given = call.tensors()
    results = call.attend(given, return_lse=True)
    for x, right in zip(results, (TORCH.give(call.dout), TORCH.give(call.dlse)), strict=True):
        lazy = torch._neg_view(right)
        one = torch.autograd.grad(x, given["q"], lazy, retain_graph=True)[0]
        assert torch.equal(one, torch.autograd.grad(x, given["q"], -right, retain_graph=True)[0])


def test_empty_tensors(torch: ModuleType) -> None:
    for batch, rows, keys in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q = torch.ones(batch, rows, 2, 8, requires_grad=True)
        k = torch.ones(batch, keys, 1, 8, requires_grad=True)
        sinks = torch.ones(2, requires_grad=True)
        out, lse = attention_of_torch.attention(q, k, k, sinks=sinks, return_lse=True)
        (out.sum() + lse.sum()).backward()
        assert out.shape == q.shape
        assert not q.grad.any()
        assert k.grad.shape == k.shape
        right = float(batch * rows) if keys == 0 else None
        assert right is None or (sinks.grad == right).all()


def test_large_gradients_accumulate(torch: ModuleType) -> None:
    """Two backward passes add up, and a graph that was freed says so."""
    call = Call()
    given = call.tensors()
    out = call.attend(given)
    out.sum().backward(retain_graph=True)
    once = given["q"].grad.clone()
    out.sum().backward()
    assert torch.equal(given["q"].grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["k", "out"])
def test_a_tensor_that_changed_is_noticed(torch: ModuleType, name: str) -> None:
    call = Call()
    given = call.tensors()
    k = given["k"] * 1
    out = call.attend(given | {"k": k})
    loss = out.sum()
    (k if name == "k" else out.detach()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_validate_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To both passes; on a CPU lengths are checked always."""
    from anyflash._call.backward import Backward
    from anyflash._call.forward import Forward

    seen = []
    for kind in (Forward, Backward):

        def spy(self: Any, packing: Any, pack: Any = kind._pack) -> None:
            seen.append(packing.validate)
            pack(self, packing)

        monkeypatch.setattr(kind, "_pack", spy)
    call = Call(varlen=True)
    for validate in (False, True):
        call.attend(call.tensors(), validate=validate).sum().backward()
    assert seen == [False, False, True, True]


def test_masks_are_made_like_a_tensor_that_wants_a_gradient():
    q = torch.randn(1, 128, 2, 8, requires_grad=True)
    blocks = anyflash.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 128, 128, (64, 64), like=q
    )
    ranges = anyflash.create_key_ranges(documents=[0] * 128, like=q)
    assert blocks.tolist() == [[[[True, False], [True, True]]]]
    assert ranges.shape == (1, 1, 128, 2)
    assert not blocks.requires_grad
    assert not ranges.requires_grad
