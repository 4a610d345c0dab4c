"""anyflash.torch and autograd: gradients of gradients, checkpoints, modes, threads, modules."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import anyflash
from anyflash.torch import attention, attention_varlen
from calls.backward import OPTIONS as CALLS
from calls.torch_calls import BLOCKS, LEAVES, PARTS, TORCH, VARLEN, Call
from models.torch_model import Block, train

# -- numerical differentiation, in float64. Through the float32 LSE it is off by 2e-7 / eps

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "scored": {"window_size": (2, 1), "softcap": 0.8, "softmax_scale": -0.4},
    "tensors": {"bias": (1, 2, 3, 1), "alibi_slopes": (2,), "sinks": (2,)},
    "dropout": {"dropout_p": 0.3, "seed": 4, "bias": (3, 4)},
    "used": {"seqused_k": torch.tensor([3], dtype=torch.int32), "alibi_slopes": (1, 2)},
}
PACKED = {"cu_seqlens_q": (0, 2, 2, 3), "cu_seqlens_k": (0, 1, 1, 4)}
SHAPES = {"q": (3, 2, 4), "k": (4, 1, 4), "v": (4, 1, 3)}


def function(name: str, varlen: bool, output: int) -> tuple[Any, tuple[Any, ...]]:
    """Attention of its differentiable tensors, and these."""
    torch.manual_seed(0)
    options = OPTIONS[name]
    shapes = SHAPES if varlen else {key: (1, *shape) for key, shape in SHAPES.items()}
    shapes = shapes | {key: x for key, x in options.items() if key in ("bias", "sinks")}
    if "alibi_slopes" in options:
        shapes["alibi_slopes"] = (2,) if varlen else options["alibi_slopes"]
    fixed = {key: x for key, x in options.items() if key not in shapes}
    if varlen:
        fixed |= {key: torch.tensor(x, dtype=torch.int32) for key, x in PACKED.items()}
        fixed |= {"max_seqlen_q": 3, "max_seqlen_k": 4}
        if "seqused_k" in fixed:
            fixed["seqused_k"] = torch.tensor([1, 0, 2], dtype=torch.int32)
    leaves = {
        key: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for key, shape in shapes.items()
    }

    def attend(*tensors: Any) -> Any:
        given = dict(zip(leaves, tensors, strict=True))
        call = attention_varlen if varlen else attention
        result = call(**given, **fixed, return_lse=True)[output]
        return result.double().nan_to_num(neginf=0.0)  # the LSE of rows without keys

    return attend, tuple(leaves.values())


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name: str, varlen: bool) -> None:
    for output, eps, atol in ((0, 1e-4, 1e-5), (1, 3e-3, 1e-3)):
        attend, tensors = function(name, varlen, output)
        torch.autograd.gradcheck(attend, tensors, eps=eps, atol=atol, rtol=0, fast_mode=True)


@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize(
    ("name", "varlen"), [*((name, False) for name in OPTIONS), ("tensors", True), ("used", True)]
)
def test_gradgradcheck(name: str, varlen: bool, output: int) -> None:
    eps, atol = ((1e-5, 1e-6), (3e-3, 1e-3))[output]
    attend, tensors = function(name, varlen, output)
    torch.autograd.gradgradcheck(
        attend,
        tensors,
        eps=eps,
        atol=atol,
        rtol=0,
        check_undefined_grad=name == "causal",
        fast_mode=True,
    )


def test_third_derivatives() -> None:
    attend, tensors = function("causal", False, 0)

    def first(q: Any) -> Any:
        return torch.autograd.grad(attend(q, *tensors[1:]).square().sum(), q, create_graph=True)

    torch.autograd.gradgradcheck(
        first, tensors[:1], atol=1e-5, check_undefined_grad=False, fast_mode=True
    )


def plain(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(batch, seqlen, heads, head_dim), one head of k for each of q."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_of_other_dtypes(dtype: torch.dtype) -> None:
    """A gradient penalty; as right as plain PyTorch's, three times."""
    tensors = [torch.randn(2, 7, 2, 8, dtype=torch.float64) for _ in range(3)]
    errors, truth = [], []

    def penalty(attend: Any, kind: torch.dtype) -> list[Any]:
        given = [x.to(dtype).to(kind).requires_grad_() for x in tensors]
        out, lse = attend(*given)
        first = torch.autograd.grad((out**2).sum() + lse.sum(), given, create_graph=True)
        assert all(x.dtype == kind for x in first)
        return [*torch.autograd.grad(sum((x**2).sum() for x in first), given)]

    truth = penalty(plain, torch.float64)
    for attend in (plain, lambda *x: attention(*x, return_lse=True)):
        found = penalty(attend, dtype)
        errors.append([(a.double() - b).abs().max() for a, b in zip(found, truth, strict=True)])
    for naive, ours, right in zip(*errors, truth, strict=True):
        assert ours <= 3 * naive + torch.finfo(dtype).eps * right.abs().max()


WHOLE: dict[str, tuple[dict[str, Any], bool]] = {
    **{name: (options, False) for name, options in CALLS.items()},
    "dropout-most": ({"dropout_p": 0.99, "seed": 3}, False),  # rounded to 655 of 65536
    **{f"packed-{name}": (options, True) for name, options in VARLEN.items()},
    **{f"blocks-{name}": (x | BLOCKS, name == "packed") for name, x in PARTS.items()},
}


@pytest.mark.parametrize("name", WHOLE)
def test_create_graph_computes_the_same(name: str) -> None:
    """In float64 by the formula that is differentiated then: it knows all options."""
    options, varlen = WHOLE[name]
    call = Call(options, "float64", varlen)
    call.arrays |= {key: call.arrays[key].astype("float64") for key in "qkv"}
    if name == "seqused":  # what is not seen
        call.arrays["k"][0, 37:], call.arrays["v"][1] = torch.nan, torch.inf
    given = call.tensors()
    leaves = [given[x] for x in LEAVES if x in given and given[x].requires_grad]
    results = call.attend(given, return_lse=True)
    cotangents = [TORCH.give(x) for x in (call.dout, call.dlse)]
    right, found = (
        torch.autograd.grad(results, leaves, cotangents, retain_graph=True, create_graph=flag)
        for flag in (False, True)
    )
    for one, other in zip(found, right, strict=True):
        assert one.requires_grad
        assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


def test_create_graph_changes_no_gradient() -> None:
    call = Call({"causal": True, "dropout_p": 0.2, "seed": 3}, "bfloat16")
    given = call.tensors()
    leaves = [given[x] for x in "qkv"]
    one, other = (
        torch.autograd.grad(call.attend(given).sum(), leaves, create_graph=flag)
        for flag in (False, True)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
        assert b.requires_grad


def test_attention_backward_has_no_gradient_of_its_own() -> None:
    """anyflash.attention_backward refuses what would be lost."""
    call = Call()
    given = call.tensors()
    out, lse = (x.detach() for x in call.attend(given, return_lse=True))
    tensors = [given[x] for x in "qkv"]
    with pytest.raises(NotImplementedError, match=r"attention_backward: q requires grad"):
        anyflash.attention_backward(out, *tensors, out, lse)


# -- checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_checkpoint_repeats_dropout(reentrant: bool, varlen: bool) -> None:
    call = Call({"dropout_p": 0.4}, varlen=varlen)

    def run(repeat: bool) -> tuple[Any, ...]:
        torch.manual_seed(5)
        given = call.tensors()
        others = {key: x for key, x in given.items() if key not in ("q", "k", "v")}

        def block(q: Any, k: Any, v: Any) -> Any:
            return call.attend({"q": q * 1, "k": k, "v": v, **others}) * 2

        tensors = [given[x] for x in "qkv"]
        out = checkpoint(block, *tensors, use_reentrant=reentrant) if repeat else block(*tensors)
        out.square().sum().backward()
        return out, *(x.grad for x in tensors)

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


# -- modes


def test_autocast() -> None:
    """As torch's own attention: out in the autocast dtype, gradients in that of the tensors."""
    call = Call({"causal": True})
    given = call.tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call.attend(given, return_lse=True)
        with torch.no_grad():
            assert torch.equal(call.attend(given), out)
            assert torch.equal(anyflash.attention(**given), out)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    dout = TORCH.give(call.dout).bfloat16()
    grads = torch.autograd.grad(
        (out, lse), [given[x] for x in "qkv"], (dout, TORCH.give(call.dlse))
    )
    low = {key: x.detach().bfloat16() for key, x in given.items() if key != "causal"}
    leaves = [x.requires_grad_() for x in low.values()]
    right = attention(**low, causal=True, return_lse=True)
    assert torch.equal(out, right[0])
    for one, other in zip(
        grads, torch.autograd.grad(right, leaves, (dout, TORCH.give(call.dlse))), strict=True
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())
    with torch.autocast("cpu", torch.bfloat16):
        double = Call(dtype="float64").tensors()
        assert attention(**double).dtype == torch.float64
        mixed = given | {"k": given["k"].bfloat16()}
        assert torch.equal(call.attend(mixed), out)
        target = torch.empty_like(out, dtype=torch.float32)
        with torch.no_grad():
            assert anyflash.attention(**given, out=target) is target


def test_autocast_around_a_gradient_penalty() -> None:
    """The formula of second derivatives keeps its float32."""
    call, results = Call({"causal": True}, "bfloat16"), []
    for enabled in (False, True):
        given = call.tensors()
        leaves = [given[x] for x in "qkv"]
        out = call.attend(given).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            penalty = sum(x.float().square().sum() for x in first)
            results.append(torch.autograd.grad(penalty, leaves))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_inference_mode() -> None:
    call = Call({"dropout_p": 0.5, "seed": 1})
    right = call.attend(call.tensors())
    with torch.inference_mode():
        given = {key: x + 0 if key in ("q", "k", "v") else x for key, x in call.tensors().items()}
        out = call.attend(given)
        assert out.is_inference()
        assert torch.equal(out, right)
    assert torch.equal(call.attend(given), right)


def test_saved_tensors_hooks() -> None:
    """Whoever packs what is saved finds all of it there."""
    call = Call({"causal": True})
    given = call.tensors()
    call.attend(given).sum().backward()
    sizes = []

    def pack(x: Any) -> Any:
        sizes.append(x.numel())
        return x.clone()

    other = call.tensors()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call.attend(other)
    out.sum().backward()
    expected = [*(other[x].numel() for x in "qkv"), out.numel(), 2 * 4 * 30]
    assert sorted(sizes) == sorted(expected)
    for name in "qkv":
        assert torch.equal(given[name].grad, other[name].grad)


def test_hooks_of_tensors() -> None:
    call = Call()
    given = call.tensors()
    out = call.attend(given)
    seen = []
    out.register_hook(lambda g: seen.append(g) or 2 * g)
    out.sum().backward()
    other = call.tensors()
    (2 * call.attend(other)).sum().backward()
    assert len(seen) == 1
    assert torch.equal(given["q"].grad, other["q"].grad)


# -- threads and modules


def test_threads() -> None:
    """One model, several threads, as DataParallel has them; each sees its own results."""
    call = Call({"causal": True, "dropout_p": 0.3, "seed": 2})
    right_given = call.tensors()
    call.attend(right_given).sum().backward()
    failed = []

    def work(scale: float) -> None:
        try:
            for _ in range(5):
                given = call.tensors()
                (call.attend(given) * scale).sum().backward()
                for name in "qkv":
                    right = right_given[name].grad * scale
                    torch.testing.assert_close(given[name].grad, right)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(2.0**i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def test_modules_are_copied_and_pickled() -> None:
    torch.manual_seed(0)
    model = Block()
    losses = train(copy.deepcopy(model), 20)
    assert losses[-1] < 0.8 * losses[0]
    other = pickle.loads(pickle.dumps(model))
    assert other.attend is attention
    assert train(other, 20) == losses


SHARDED = """
import sys, torch
import torch.distributed as dist
from models.torch_model import Block, train
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(0)
right = train(Block())
torch.manual_seed(0)
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    model = torch.nn.parallel.DistributedDataParallel(Block())
else:
    from torch.distributed.device_mesh import init_device_mesh
    model = fully_shard(Block(), mesh=init_device_mesh("cpu", (1,)))
losses = train(model)
print(losses == right)
dist.destroy_process_group()
"""


def test_a_sharded_model_trains(tmp_path: Any) -> None:
    """As the whole one does: FSDP's parameters are gathered before attention sees them."""
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "store")]
    paths = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["True"]


# -- forward mode


def test_forward_mode_is_refused(torch: ModuleType) -> None:
    """A tangent is never dropped silently."""
    from torch.autograd import forward_ad

    call = Call()
    given = {key: x.detach() for key, x in call.tensors().items()}
    tangent = torch.ones_like(given["k"])
    for attend in (attention, anyflash.attention):
        with forward_ad.dual_level():
            dual = given | {"k": forward_ad.make_dual(given["k"], tangent)}
            with pytest.raises(NotImplementedError, match="jvp function"):
                attend(**dual)
            with torch.no_grad(), pytest.raises(NotImplementedError, match="jvp function"):
                attend(**dual)
            plain = attend(**given)  # has no tangent
        assert torch.equal(plain, attend(**given))
        with pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
            torch.func.jvp(lambda k, f=attend: f(**given | {"k": k}), (given["k"],), (tangent,))
