"""torch.compile, torch.export, make_fx, fake tensors and the operators torch.ops.anyflash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import anyflash
import anyflash.torch
from anyflash.torch import attention, attention_varlen, attention_with_kvcache
from anyflash.torch._problem import Problem, RequestedOutputs
from calls.backward import OPTIONS
from calls.frameworks import random
from calls.kvcache import every_option
from calls.torch_calls import LEAVES, TORCH, Call

OPS = torch.ops.anyflash


class Compiled:
    """A function of one graph, which counts how often it is compiled."""

    def __init__(self, function: Any, **options: Any) -> None:
        torch._dynamo.reset()
        self._counter = CompileCounterWithBackend("aot_eager")
        self.run = torch.compile(function, fullgraph=True, backend=self._counter, **options)

    @property
    def graphs(self) -> int:
        count: int = self._counter.frame_count
        return count


def tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(random(*shape))


def same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


# -- torch.compile


def test_all_options() -> None:
    """The bits of eager mode, and its random numbers; other values need no other graph."""
    call = Call({**OPTIONS["all"], "causal": True, "window_size": (None, 3)})
    del call.arrays["seed"]
    names = [x for x in LEAVES if x in call.arrays]
    fixed = {key: x for key, x in call.tensors().items() if key not in names}

    def attend(*tensors: Any) -> Any:
        return attention(**dict(zip(names, tensors, strict=True)), **fixed, return_result=True)

    compiled = Compiled(attend)
    states = []
    for scale in (1.0, 0.5):
        results = []
        for function in (attend, compiled.run):
            given = call.tensors()
            leaves = [(given[x].detach() * scale).requires_grad_() for x in names]
            torch.manual_seed(5)
            result = [function(*leaves) for _ in range(2)][1]
            loss = (result.out * TORCH.give(call.dout)).sum() + result.lse.square().sum()
            results.append((*result[:2], result.rng_state, *torch.autograd.grad(loss, leaves)))
            states.append(result.rng_state)
        same(*results)
    assert compiled.graphs == 1
    other = compiled.run(*leaves).rng_state
    assert not torch.equal(other, states[-1])


@pytest.mark.parametrize("attend", [attention, anyflash.attention])
def test_dynamic_lengths(attend: Any) -> None:
    """One graph for all of them, in both passes."""
    compiled = Compiled(lambda q, k, v: attend(q, k, v, causal=True, return_lse=True))
    for length in (5, 9, 17, 70):
        shapes = (2, length, 2, 8), (2, length + 3, 1, 8), (2, length + 3, 1, 4)
        results = []
        for function in (
            compiled.run,
            lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
        ):
            leaves = [tensor(*shape).requires_grad_() for shape in shapes]
            for x in leaves:
                torch._dynamo.mark_dynamic(x, 1)
            out, lse = function(*leaves)
            grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
            results.append((out, lse, *grads))
        same(*results)
    assert compiled.graphs == 1


@pytest.mark.parametrize("attend", [attention_varlen, anyflash.attention_varlen])
def test_packed_sequences(attend: Any) -> None:
    """Their lengths are values; the largest becomes dynamic once it has changed."""
    compiled = Compiled(
        lambda x, cu, longest: attend(x, x, x, cu, cu, longest, longest, window_size=(4, 0))
    )
    for lengths in ((2, 4, 3), (3, 3, 3), (1, 1, 7), (0, 9, 0)):
        cu = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32)
        x = tensor(9, 2, 8).requires_grad_()
        longest = max(lengths)
        out = compiled.run(x, cu, longest)
        right = attention_varlen(x, x, x, cu, cu, longest, longest, window_size=(4, 0))
        assert torch.equal(out, right)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, right)))
    assert compiled.graphs == 2


@pytest.mark.parametrize("attend", [attention_with_kvcache, anyflash.attention_with_kvcache])
def test_decoding(attend: Any) -> None:
    """The caches are written in place; lengths in a tensor are values."""
    shapes = (2, 16, 1, 8), (2, 16, 1, 4)
    q, k, v = tensor(2, 1, 2, 8), tensor(2, 1, 1, 8), tensor(2, 1, 1, 4)

    def step(caches: Any, lengths: Any, k: Any, v: Any) -> Any:
        return attend(
            q, *caches, k, v, cache_seqlens=lengths, causal=True, sinks=sinks, return_lse=True
        )

    sinks = tensor(2)
    compiled = Compiled(step)
    one, other = ([tensor(*shape) for shape in shapes] for _ in range(2))
    for n in range(3):
        lengths = torch.tensor([n, 2 * n], dtype=torch.int32)
        found = compiled.run(one, lengths, k + n, v)
        same(found, step(other, lengths, k + n, v))
        same(one, other)
    assert compiled.graphs == 1
    for n in (9, 11):
        same(compiled.run(one, n, None, None), step(other, n, None, None))
    before = [x.clone() for x in one]
    same(one, before)


EVERY = every_option()


@pytest.mark.parametrize("name", EVERY)
def test_every_option_of_decoding(name: str) -> None:
    """The operator and the function have them as NumPy has."""
    arrays = {key: x for key, x in EVERY[name].items() if isinstance(x, np.ndarray)}
    numbers = {key: x for key, x in EVERY[name].items() if key not in arrays}

    def attend(given: Any) -> Any:
        return attention_with_kvcache(**given, **numbers, return_lse=True)

    def copied() -> dict[str, Any]:
        return {key: x.copy() for key, x in arrays.items()}

    right = copied()
    results = anyflash.attention_with_kvcache(**right, **numbers, return_lse=True)
    results = TORCH.give([*results, right["k_cache"], right["v_cache"]])
    for function in (attend, make_fx(attend)(TORCH.give(copied()))):
        given = TORCH.give(copied())
        found = (*function(given), given["k_cache"], given["v_cache"])
        same((x.nan_to_num() for x in found), (x.nan_to_num() for x in results))


def test_decoding_refuses_gradients() -> None:
    q, cache = tensor(2, 1, 2, 8), tensor(2, 16, 1, 8)
    message = r"anyflash\.torch\.attention_with_kvcache: q requires grad.*no backward"
    with pytest.raises(NotImplementedError, match=message):
        make_fx(
            lambda q: attention_with_kvcache(q.requires_grad_(), cache, cache, cache_seqlens=3)
        )(q)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "sinks"])
def test_fake_decoding_refuses_gradients(name: str) -> None:
    """No kernel runs that could."""
    shapes = {"k_cache": (2, 16, 1, 8), "v_cache": (2, 16, 1, 8), "sinks": (2,)}
    shapes |= {"q": (2, 1, 2, 8), "k": (2, 1, 1, 8), "v": (2, 1, 1, 8)}
    with FakeTensorMode():
        given = {key: torch.zeros(shape) for key, shape in shapes.items()}
        attention_with_kvcache(**given, cache_seqlens=3)
        given[name].requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"kvcache: {name} requires grad.*backward"):
            attention_with_kvcache(**given, cache_seqlens=3)


def test_checkpoint() -> None:
    """Dropout is repeated where the forward is."""
    call = Call({"dropout_p": 0.4})

    def block(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(
            lambda *x: attention(*x, dropout_p=0.4) * 2, q * 1, k, v, use_reentrant=False
        )

    compiled, results = Compiled(block), []
    for function in (block, compiled.run):
        leaves = [call.tensors()[x] for x in "qkv"]
        torch.manual_seed(1)
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    same(*results)


# -- graphs


class Model(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return anyflash.attention(q, k, v, causal=True, window_size=(20, None))


def test_export() -> None:
    """With lengths that are free, and strict or not."""
    q, k, v = tensor(2, 6, 2, 8), tensor(2, 7, 1, 8), tensor(2, 7, 1, 4)
    rows, keys = (torch.export.Dim(name, min=2, max=512) for name in ("rows", "keys"))
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}}
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=shapes)
    called = [str(x.target) for x in program.graph.nodes if x.op == "call_function"]
    assert called.count("anyflash.forward.default") == 1
    other = tensor(2, 60, 2, 8), tensor(2, 71, 1, 8), tensor(2, 71, 1, 4)
    assert torch.equal(program.module()(*other), Model()(*other))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx(mode: str) -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(anyflash.attention(*leaves, causal=True).sum(), leaves)

    given = [tensor(2, 6, 2, 8), tensor(2, 7, 1, 8), tensor(2, 7, 1, 4)]
    traced = make_fx(loss, tracing_mode=mode)(*given)
    for op in ("forward", "backward"):
        assert f"torch.ops.anyflash.{op}.default" in traced.code
    other = [x + 1 for x in given]
    same(traced(*other), loss(*other))


# -- fake tensors and the operators


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("asked", [{}, {"out_dtype": torch.float32, "return_max_logits": True}])
def test_fake_tensors_have_the_shapes_of_real_ones(varlen: bool, asked: Any) -> None:
    """So have those of device meta; also their gradients."""
    options = {"alibi_slopes": random(4), "sinks": random(4).astype(np.float64)}
    options |= {"bias": random(1, 9, 20) if varlen else random(30, 1)}
    options |= {"dropout_p": 0.5, "rng_state": (1, 2)}
    call = Call(options, "float16", varlen=varlen)

    def shapes(given: dict[str, Any]) -> list[Any]:
        result = call.attend(given, **asked, return_dropout_mask=True)
        leaves = [given[x] for x in LEAVES]
        grads = torch.autograd.grad(result.out.sum() + result.lse.sum(), leaves)
        tensors = [x for x in (*result, *grads) if isinstance(x, torch.Tensor)]
        return [(x.shape, x.dtype, x.stride()) for x in tensors]

    real = call.tensors()
    right = shapes(real)
    moved = {
        key: x.detach().to("meta").requires_grad_(x.requires_grad) if hasattr(x, "to") else x
        for key, x in real.items()
    }
    assert shapes(moved) == right
    with FakeTensorMode() as mode:
        fakes = {
            key: mode.from_tensor(x) if hasattr(x, "to") else x for key, x in call.tensors().items()
        }
        assert shapes(fakes) == right
    assert shapes(fakes) == right  # also outside of the mode


def problem(grad: bool, **options: Any) -> Problem:
    leaves = [tensor(2, 2, 3, 4).transpose(1, 2), tensor(2, 5, 1, 4), tensor(2, 5, 1, 4)]
    leaves += [tensor(2, 1, 1, 5), tensor(2).double(), tensor(2, 2)]
    leaves = [x.requires_grad_(grad) for x in leaves]
    defaults = Problem(
        *leaves,
        **dict.fromkeys(Problem._fields[6:12]),
        **{"max_seqlen_q": 0, "max_seqlen_k": 0, "validate": False, "softmax_scale": None},
        **{"causal": True, "window_left": 2, "window_right": -1, "softcap": 0.7},
        **{"block_m": 128, "block_n": 128, "dropout_p": 0.0, "seed": -3, "offset": 0},
        batch_start=0,
        head_start=0,
        total_heads=0,
        deterministic=False,
    )
    return defaults._replace(**options)


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
DROPOUT = {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}


def opcheck(op: Any, *arguments: Any, **more: Any) -> None:
    torch.library.opcheck(op, *arguments, **more)


def test_opcheck_forward() -> None:
    asked = RequestedOutputs(True, True, True, torch.float32)
    opcheck(OPS.forward.default, (*problem(True), *asked))
    opcheck(OPS.forward.default, (*problem(True, **DROPOUT), *asked), test_utils=QUICK)
    for asked in (
        RequestedOutputs(False, False, False, None),
        RequestedOutputs(False, True, False, None),
    ):
        opcheck(OPS.forward.default, (*problem(False), *asked), test_utils=QUICK)


def test_opcheck_backward() -> None:
    for wanted, options in (([True] * 6, {}), ([True, False] * 3, DROPOUT)):
        p = problem(False, **options)
        out, lse, *_ = OPS.forward(*p, *RequestedOutputs(True, False, False, None))
        dout, dlse = tensor(*out.shape), tensor(*lse.shape)
        for arguments in ((dout, dlse), (dout, None), (None, dlse)):
            opcheck(OPS.backward.default, (*p, out, lse, *arguments, wanted), test_utils=QUICK)


@pytest.mark.parametrize("write", [False, True])
def test_opcheck_of_decoding(write: bool) -> None:
    caches = tensor(2, 16, 1, 8).bfloat16(), tensor(2, 16, 1, 4).bfloat16()
    new = (tensor(2, 1, 1, 8).bfloat16(), tensor(2, 1, 1, 4).bfloat16())
    new = new if write else (None, None)
    names = ("rotary_cos", "rotary_sin", "rotary_seqlens", "cache_batch_idx", "cache_leftpad")
    names += ("block_table", "alibi_slopes", "sinks", "tree_mask", "k_scale", "v_scale")
    names += ("split_size", "filled")
    options = dict.fromkeys(names) | {"rotary_interleaved": True, "softmax_scale": None}
    options |= {"cache_seqlens": torch.tensor([3, 7], dtype=torch.int32), "causal": True}
    options |= {"window_left": -1, "window_right": -1, "softcap": 0.0, "num_splits": 0}
    op = OPS.attention_with_kvcache_ if write else OPS.attention_with_kvcache
    for asked in ({"return_lse": True, "out_dtype": torch.float32}, {"return_lse": False}):
        opcheck(
            op.default,
            (tensor(2, 1, 2, 8).bfloat16(), *caches, *new),
            options | {"out_dtype": None} | asked,
            test_utils=QUICK,
        )


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"),
    reason="torch.library.register_vmap is of torch 2.5",
)
def test_vmap_of_the_operators() -> None:
    p, asked = problem(False), RequestedOutputs(True, False, True, None)
    q = torch.stack([p.q, -p.q])
    found = torch.vmap(lambda q: OPS.forward(*p._replace(q=q), *asked))(q)
    each = [OPS.forward(*p._replace(q=x), *asked) for x in q]
    same(found, [torch.stack(x) for x in zip(*each, strict=True)])
    out, lse = found[:2]

    def backward(q: Any, out: Any, lse: Any) -> Any:
        return OPS.backward(*p._replace(q=q), out, lse, out, lse, [True] * 6)

    each = [backward(*x) for x in zip(q, out, lse, strict=True)]
    same(torch.vmap(backward)(q, out, lse), [torch.stack(x) for x in zip(*each, strict=True)])


def test_jit_trace() -> None:
    """The result is no constant."""
    given = [tensor(2, 5, 2, 8) for _ in range(3)]
    traced = torch.jit.trace(lambda q, k, v: attention(q, k, v, causal=True), given)
    other = [x + 1 for x in given]
    assert torch.equal(traced(*other), attention(*other, causal=True))
