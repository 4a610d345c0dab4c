"""anyflash's own part in a case, and other ways to do it with anyflash."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import anyflash
from anyflash.bench._array_libraries import Unsupported
from anyflash.bench._problem import Problem


def _as_it_is(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Call:
    """What is timed: `run(turn)`, within `context()`. `outputs` makes its result comparable: the
    output, or the gradients of q, k and v, in anyflash's layout."""

    run: Callable[[int], Any]
    outputs: Callable[[Any], tuple[Any, ...]] = _as_it_is
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    turns: int = 1
    comparable: bool = True  # with anyflash's result of the same case


def anyflash_call(problem: Problem) -> Call:
    """anyflash's functions, which allocate their results as the peers' do."""
    case = problem.case
    if case.op == "decode":
        return _decode(problem)
    if case.op == "both":
        return _both(problem)
    if case.op == "backward":
        return _backward(problem, deterministic=False)
    q, k, v = problem.q, problem.k, problem.v
    options = {**problem.options, "causal": case.causal}
    packing = problem.packing if case.lengths else ()
    function: Any = anyflash.attention_varlen if case.lengths else anyflash.attention
    return Call(
        lambda turn: function(q, k, v, *packing, **options), lambda result: (_first(result),)
    )


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _backward(problem: Problem, deterministic: bool) -> Call:
    case = problem.case
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    out, lse = problem.forward_results
    options = {**problem.options, "causal": case.causal, "deterministic": deterministic}
    packing = problem.packing if case.lengths else ()
    function: Any = (
        anyflash.attention_varlen_backward if case.lengths else anyflash.attention_backward
    )
    return Call(
        lambda turn: function(dout, q, k, v, out, lse, *packing, **options),
        lambda grads: (grads.dq, grads.dk, grads.dv),
    )


def _both(problem: Problem) -> Call:
    """PyTorch's autograd through anyflash.torch, or the two functions on NumPy's arrays."""
    case = problem.case
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    options = {**problem.options, "causal": case.causal}
    if case.lengths:
        raise Unsupported("forward and backward together are timed for unpacked problems")
    if problem.arrays.name == "torch":
        torch = importlib.import_module("torch")
        attention = importlib.import_module("anyflash.torch").attention
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return Call(lambda turn: torch.autograd.grad(attention(*leaves, **options), leaves, dout))

    def both(turn: int) -> tuple[Any, ...]:
        out, lse = anyflash.attention(q, k, v, return_lse=True, **options)
        grads = anyflash.attention_backward(dout, q, k, v, out, lse, **options)
        return grads.dq, grads.dk, grads.dv

    return Call(both)


def _decode(problem: Problem) -> Call:
    case = problem.case
    q, filled = problem.q, problem.filled
    k, v = problem.pages if case.page_size else problem.caches
    options: dict[str, Any] = {"causal": True, **problem.scales}
    if case.page_size:
        options["block_table"] = problem.page_table
    if case.latent:
        options["head_dim_v"] = case.d_v
    return Call(
        lambda turn: anyflash.attention_with_kvcache(
            q, k[turn], None if case.latent else v[turn], cache_seqlens=filled, **options
        ),
        turns=problem.turns,
    )


def deterministic(problem: Problem) -> Call:
    """The backward with the same bits in every run."""
    if problem.case.op != "backward":
        raise Unsupported("only the backward has another way to be deterministic")
    return _backward(problem, deterministic=True)


def plain(problem: Problem) -> Call:
    """The same sizes without the feature, with a cache of the queries' dtype, or the dense problem
    where packed lengths are equal."""
    case = problem.case
    if case.feature in {"", "plain"} and not case.lengths and not case.cache_dtype:
        raise Unsupported("there is no feature to leave away")
    if len(set(case.lengths)) > 1:
        raise Unsupported("the lengths differ, so that there is no dense problem like it")
    causal = case.causal and case.feature != "causal"
    dense = replace(case, feature="", lengths=(), cache_dtype="", causal=causal)
    return replace(anyflash_call(Problem(dense, problem.arrays)), comparable=False)
