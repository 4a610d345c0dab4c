"""anyflash.torch and torch.func: vmap in every way, derivatives of derivatives, Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import anyflash
from anyflash.torch import attention, attention_varlen, attention_with_kvcache, sdpa_routing
from calls.frameworks import inputs, random
from calls.torch_calls import TORCH
from calls.varlen import packed

SIZE = 3  # of the mapped axis
LEAVES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
MASK = torch.tensor([[True], [False]])


def given() -> dict[str, Any]:
    return dict(zip("qkv", map(torch.from_numpy, inputs()), strict=True))


def tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(random(*shape))


def ranges(batch: int, heads: int) -> torch.Tensor:
    numbers = np.random.default_rng(1).integers(-5, 40, (batch, heads, 50, 2), np.int32)
    return torch.from_numpy(numbers)


def several(x: torch.Tensor) -> torch.Tensor:
    """What a mapped argument is: others like x, by value."""
    if x.dtype == torch.bool:
        return torch.stack([x, ~x, x])
    if not x.is_floating_point():
        return torch.stack([x, x - 1, x])
    return torch.stack([x, -x, x.flip(0)])


# name: the options, and which of the arguments are mapped
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all-three": ({"causal": True}, ("q", "k", "v")),
    "only-k": ({"window_size": (9, 2)}, ("k",)),
    "bias": ({"bias": tensor(2, 4, 30, 50)}, ("bias",)),
    "bias-1": ({"bias": tensor(1, 1, 30, 50)}, ("q", "bias")),
    "bias-2": ({"bias": tensor(30, 50)}, ("v", "bias")),
    "bias-fixed": ({"bias": tensor(2, 1, 1, 50)}, ("q",)),
    "keep": ({"bias": tensor(4, 30, 50) > 0}, ("bias",)),
    "blocks": ({"block_mask": MASK[:, :, None, None]}, ("block_mask", "k")),
    "ranges": ({"key_ranges": ranges(2, 2)}, ("key_ranges", "k")),
    "ranges-fixed": ({"key_ranges": ranges(1, 2)}, ("q",)),
    "slopes": ({"alibi_slopes": tensor(4)}, ("alibi_slopes",)),
    "slopes-batch": ({"alibi_slopes": tensor(2, 4)}, ("alibi_slopes", "q")),
    "slopes-fixed": ({"alibi_slopes": tensor(4), "softcap": 0.7}, ("q",)),
    "sinks": ({"sinks": tensor(4)}, ("sinks", "q")),
    "sinks-fixed": ({"sinks": tensor(4)}, ("q", "v")),
    "used": ({"seqused_k": torch.tensor([37, 11], dtype=torch.int32)}, ("seqused_k", "q")),
    "dropout": ({"dropout_p": 0.4, "seed": 3}, ("q",)),
    "state": ({"dropout_p": 0.4, "rng_state": torch.tensor([1, 2])}, ("rng_state",)),
}


def compare(function: Any, tensors: list[Any], in_dims: tuple[int | None, ...]) -> None:
    """vmap has the bits of a loop."""
    mapped = torch.vmap(function, in_dims)(*tensors)
    each = [
        function(
            *(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True))
        )
        for i in range(SIZE)
    ]
    for found, *right in zip(mapped, *each, strict=True):
        assert torch.equal(found, torch.stack(right))


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str) -> None:
    """Of the results, then of the gradients of all that has one."""
    options, names = CASES[name]
    arguments = given() | options
    leaves = [key for key in LEAVES if key in arguments and arguments[key].is_floating_point()]
    keys = [*leaves, *(key for key in names if key not in leaves)]
    fixed = {key: x for key, x in arguments.items() if key not in keys}
    tensors = [several(arguments[key]) if key in names else arguments[key] for key in keys]
    in_dims = tuple(0 if key in names else None for key in keys)

    def attend(*tensors: Any) -> Any:
        result = attention(
            **dict(zip(keys, tensors, strict=True)),
            **fixed,
            return_max_logits=True,
            return_dropout_mask=True,
        )
        return result.out, result.lse, result.max_logits, result.dropout_mask

    def loss(*tensors: Any) -> Any:
        out, lse = attend(*tensors)[:2]
        seen = lse != -torch.inf
        return out.square().sum() + torch.where(seen, lse, 0.0).sum()

    compare(attend, tensors, in_dims)
    compare(torch.func.grad(loss, tuple(range(len(leaves)))), tensors, in_dims)


def test_in_dims() -> None:
    q, k, v = given().values()
    q, k = several(q).movedim(0, 4), several(k).movedim(0, 2)
    compare(lambda *x: attention(*x, return_lse=True), [q, k, v], (4, 2, None))
    compare(lambda *x: anyflash.attention(*x, return_lse=True), [q, k, v], (4, 2, None))


def test_vmap_within_vmap() -> None:
    q, k, v = given().values()
    qs, ks = several(q), several(k)
    found = torch.vmap(lambda x: torch.vmap(lambda y: attention(x, y, v))(ks))(qs)
    for i, j in ((0, 1), (2, 0)):
        assert torch.equal(found[i, j], attention(qs[i], ks[j], v))


@pytest.mark.parametrize("names", [("q", "k", "v"), ("v",), ("bias",), ("cu_seqlens_q", "sinks")])
def test_vmap_of_packed_sequences(names: tuple[str, ...]) -> None:
    keys = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments = dict(zip(keys, TORCH.give(packed()), strict=True))
    arguments |= {"bias": tensor(9, 20), "sinks": tensor(4)}
    leaves = ["q", "k", "v", "bias", "sinks"]
    keys = (*leaves, *(key for key in names if key not in leaves))
    fixed = {key: x for key, x in arguments.items() if key not in keys}
    other = torch.tensor([0, 1, 1, 9, 9, 15], dtype=torch.int32)
    first = arguments["cu_seqlens_q"]
    replaced = {"cu_seqlens_q": torch.stack([first, other, first])}
    tensors = [
        replaced.get(key, None if key in replaced else several(arguments[key]))
        if key in names
        else arguments[key]
        for key in keys
    ]
    in_dims = tuple(0 if key in names else None for key in keys)

    def attend(*tensors: Any) -> Any:
        call = dict(zip(keys, tensors, strict=True)) | fixed
        return attention_varlen(**call, causal=True, return_lse=True)

    def loss(*tensors: Any) -> Any:
        return attend(*tensors)[0].square().sum()

    compare(attend, tensors, in_dims)
    compare(torch.func.grad(loss, tuple(range(len(leaves)))), tensors, in_dims)


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_vmap_of_decoding() -> None:
    """By torch's own loop, which cannot write caches."""
    cache, new = tensor(2, 16, 1, 8), tensor(2, 1, 1, 8)
    q = several(tensor(2, 1, 2, 8))
    for attend in (attention_with_kvcache, anyflash.attention_with_kvcache):

        def step(q: Any, *new: Any, f: Any = attend) -> Any:
            return f(q, cache, cache.clone(), *new, cache_seqlens=3)

        assert torch.equal(torch.vmap(step)(q), torch.stack([step(x) for x in q]))
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.vmap(step)(q, several(new), several(new))


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_randomness_of_vmap(randomness: str) -> None:
    q, k, v = given().values()

    def run() -> Any:
        torch.manual_seed(0)
        call = torch.vmap(
            lambda q: attention(q, k, v, dropout_p=0.5, return_dropout_mask=True).dropout_mask,
            randomness=randomness,
        )
        return call(torch.stack([q, q, q]))

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            run()
        return
    masks = run()
    assert torch.equal(masks, run())
    assert torch.equal(masks[0], masks[1]) == (randomness == "same")


def test_grad_is_that_of_autograd() -> None:
    arguments = given() | {"bias": tensor(30, 50)}
    leaves = {key: x.clone().requires_grad_() for key, x in arguments.items()}
    attention(**leaves, causal=True).square().sum().backward()
    for attend in (attention, anyflash.attention):
        found = torch.func.grad(lambda x, f=attend: f(**x, causal=True).square().sum())(arguments)
        for key, x in found.items():
            assert torch.equal(x, leaves[key].grad)


def small(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def plain(q: Any, k: Any, v: Any) -> Any:
    """(batch, seqlen, heads, head_dim), one head of k for each of q."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


QKV = (small(2, 3, 1, 2), small(2, 4, 1, 2), small(2, 4, 1, 2))


def test_jacobians() -> None:
    """Rows are mapped over the backward."""
    for argument in range(3):
        found, right = (torch.func.jacrev(f, argument)(*QKV) for f in (attention, plain))
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [1, 3], ids=["one sequence", "three axes"])
def test_a_batch_of_one(layout: int) -> None:
    """The kernels broadcast masks of a batch of 1, and nothing else."""
    q, k, v = (x[:1] for x in given().values())
    used = torch.tensor([37], dtype=torch.int32)
    options = {"seqused_k": used, "bias": tensor(1, 4, 30, 50), "alibi_slopes": tensor(1, 4)}
    compare(lambda q: attention(q, k, v, **options, return_lse=True), [several(q)], (0,))
    compare(lambda k: attention(q, k, v, **options, return_lse=True), [several(k)], (0,))
    compare(
        torch.func.grad(lambda q, k: attention(q, k, v, seqused_k=used).square().sum(), (0, 1)),
        [several(q), k],
        (0, None),
    )
    if layout == 1:
        arguments = [x[:1] for x in QKV]
        functions = (attention, plain)
    else:  # as existing code calls it
        arguments = [x[0].transpose(0, 1) for x in QKV]
        theirs = torch.nn.functional.scaled_dot_product_attention

        def routed(*x: torch.Tensor) -> torch.Tensor:
            with sdpa_routing():
                return torch.nn.functional.scaled_dot_product_attention(*x)

        functions = (routed, theirs)
    for argument in range(3):
        found, right = (torch.func.jacrev(f, argument)(*arguments) for f in functions)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients() -> None:
    """grad of grad, and a Hessian by reverse mode twice."""

    def penalty(f: Any) -> Any:
        first = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))
        return lambda *x: sum(g.square().sum() for g in first(*x))

    found, right = (torch.func.grad(penalty(f), (0, 1, 2))(*QKV) for f in (attention, plain))
    torch.testing.assert_close(found, right)

    def hessian(f: Any) -> Any:
        return torch.func.jacrev(torch.func.jacrev(lambda q: f(q, *QKV[1:]).square().sum()))

    torch.testing.assert_close(hessian(attention)(QKV[0]), hessian(plain)(QKV[0]))


def test_gradients_of_each_sample() -> None:
    """As for differential privacy: one weight, a gradient for each sample."""
    weight, xs = small(2, 2), small(SIZE, 4, 1, 2)

    def loss(f: Any) -> Any:
        return lambda w, x: f(*((x @ w)[None] * i for i in (1, 2, 3))).square().sum()

    found, right = (
        torch.vmap(torch.func.grad(loss(f)), (None, 0))(weight, xs) for f in (attention, plain)
    )
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_functional_call() -> None:
    """An ensemble: parameters are mapped, the module is one."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 12)

        def forward(self, x: Any) -> Any:
            return attention(*self.linear(x).unflatten(-1, (1, 12)).chunk(3, -1), causal=True)

    torch.manual_seed(0)
    models = [Model() for _ in range(SIZE)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 5, 4)
    found = torch.vmap(lambda *state: torch.func.functional_call(models[0], state, (x,)), (0, 0))(
        parameters, buffers
    )
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]))
