"""PyTorch's own attention: its four backends, packed and compiled functions, and standard code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import Unsupported
from anyflash.bench._problem import BLOCK, SOFTCAP, WINDOW, Problem

Context = Callable[[], AbstractContextManager[Any]]


def _same(x: Any) -> Any:
    return x


def torch_call(
    problem: Problem,
    attend: Callable[..., Any],
    into: Callable[[Any], Any] = _same,
    back: Callable[[Any], Any] = _same,
    context: Context = nullcontext,
) -> Call:
    """A case done by `attend(q, k, v)` and PyTorch's autograd.

    `into` brings a tensor from anyflash's layout to that of `attend`, before anything is timed;
    `back` is its inverse.
    """
    torch = importlib.import_module("torch")
    op = problem.case.op
    q, k, v = (into(x) for x in (problem.q, problem.k, problem.v))
    if op == "forward":
        return Call(lambda turn: attend(q, k, v), lambda out: (back(out),), context)
    dout, leaves = into(problem.dout), [x.detach().requires_grad_() for x in (q, k, v)]
    if op == "backward":
        with context():
            out = attend(*leaves)

        def gradients(turn: int) -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)
    else:

        def gradients(turn: int) -> Any:
            return torch.autograd.grad(attend(*leaves), leaves, dout)

    return Call(gradients, lambda grads: tuple(back(x) for x in grads), context)


def _heads_first(problem: Problem) -> Callable[[Any], Any]:
    """(batch, heads, seqlen, d): a view on a GPU; contiguous on the CPU, where that is faster."""
    if problem.arrays.device == "cpu":
        return lambda x: x.transpose(1, 2).contiguous()
    return lambda x: x.transpose(1, 2)


def _seqlen_first(x: Any) -> Any:
    return x.transpose(1, 2)


def needs_scores(problem: Problem) -> None:
    """Refuse where a matrix of scores, and what is made of it, would not fit."""
    wanted, free = 4 * problem.case.scores_bytes, problem.arrays.free_bytes()
    if wanted > free:
        raise Unsupported(f"its scores would take about {wanted / 1e9:.0f} of {free / 1e9:.0f} GB")


def sdpa(backend: str) -> Callable[[Problem], Call]:
    """scaled_dot_product_attention of one backend."""

    def build(problem: Problem) -> Call:
        case, options = problem.case, dict[str, Any]()
        attention = importlib.import_module("torch.nn.attention")
        function = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
        kernel = getattr(attention.SDPBackend, backend)
        if case.lengths:
            raise Unsupported("no packed sequences")
        if backend == "MATH":
            needs_scores(problem)
        group = case.heads // case.kv_heads
        if group > 1 and backend != "EFFICIENT_ATTENTION":
            options["enable_gqa"] = True

        def context() -> AbstractContextManager[Any]:
            manager: AbstractContextManager[Any] = attention.sdpa_kernel(kernel)
            return manager

        if case.op == "decode":
            return _sdpa_decode(problem, function, options, context)
        for name, value in problem.options.items():
            if name == "bias":
                options["attn_mask"] = value.expand(case.batch, case.heads, -1, -1)
            elif name == "dropout_p":
                options[name] = value
            elif name != "seed":
                raise Unsupported(f"no {name}")
        if case.causal:
            if case.keys != case.seqlen:
                raise Unsupported("its causal mask is aligned at the top left")
            options["is_causal"] = True

        def attend(q: Any, k: Any, v: Any) -> Any:
            if group > 1 and backend == "EFFICIENT_ATTENTION":  # it takes no groups
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return function(q, k, v, **options)

        return torch_call(problem, attend, _heads_first(problem), _seqlen_first, context)

    return build


def _sdpa_decode(
    problem: Problem, function: Any, options: dict[str, Any], context: Context
) -> Call:
    if problem.case.page_size:
        raise Unsupported("no pages")
    q = problem.q.transpose(1, 2)
    k, v = (x.transpose(2, 3) for x in problem.caches)
    return Call(
        lambda turn: function(q, k[turn], v[turn], **options),
        lambda out: (out.transpose(1, 2),),
        context,
        problem.turns,
        # Several queries without a mask: its causal one is aligned at the top left.
        comparable=problem.case.seqlen == 1,
    )


def varlen(problem: Problem) -> Call:
    """torch.nn.attention.varlen, in either of the forms that its releases have."""
    case = problem.case
    if not case.lengths or case.feature not in {"", "packed"}:
        raise Unsupported("only packed sequences without features")
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    if case.causal:
        options = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    return torch_call(problem, lambda q, k, v: function(q, k, v, *problem.packing, **options))


def flex(problem: Problem) -> Call:
    """flex_attention, compiled: the features that are functions of a score and its place."""
    torch = importlib.import_module("torch")
    module = importlib.import_module("torch.nn.attention.flex_attention")
    case, slopes = problem.case, problem.slopes

    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - slopes[h] * torch.abs(i - j)

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= WINDOW) & (i >= j)

    def block(b: Any, h: Any, i: Any, j: Any) -> Any:
        return problem.blocks[0, 0][i // BLOCK, j // BLOCK]

    scores = {"softcap": softcap, "alibi": alibi}
    masks = {"window 512": window, "block mask, half": block}
    if case.feature not in {**scores, **masks}:
        raise Unsupported("other features are measured beside other peers")
    options: dict[str, Any] = {"score_mod": scores.get(case.feature)}
    if case.feature in masks:
        options["block_mask"] = module.create_block_mask(
            masks[case.feature], None, None, case.seqlen, case.keys, device=problem.arrays.device
        )
    torch.compiler.reset()  # beyond a few variants it would no longer compile, and not say so
    compiled = torch.compile(module.flex_attention, dynamic=False)
    return torch_call(
        problem,
        lambda q, k, v: compiled(q, k, v, **options),
        _heads_first(problem),
        _seqlen_first,
    )


def context_parallel(problem: Problem) -> Call:
    """See _torch_context_parallel.py, which runs it on ranks."""
    raise Unsupported("only sequences that several devices share")


def standard(problem: Problem) -> Call:
    """softmax(scale * Q K^T) V with whole matrices, in PyTorch or NumPy."""
    case = problem.case
    if case.lengths or case.op == "decode" or case.feature not in {"", "plain", "causal"}:
        raise Unsupported("only dense problems without features")
    if case.kv_heads != case.heads:
        raise Unsupported("no grouped heads")
    needs_scores(problem)
    if problem.arrays.name == "numpy":
        return _standard_numpy(problem)
    torch = importlib.import_module("torch")
    scale = case.d**-0.5

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = (q * scale) @ k.transpose(-1, -2)
        if case.causal:
            shape, shift = scores.shape[-2:], case.keys - case.seqlen + 1
            hidden = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(shift)
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return torch_call(problem, attend, _heads_first(problem), _seqlen_first)


def _standard_numpy(problem: Problem) -> Call:
    case = problem.case
    np: Any = importlib.import_module("numpy")
    q, k, v, dout = (
        x.swapaxes(1, 2).astype(np.float32) for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    scale = np.float32(case.d**-0.5)

    def probabilities() -> Any:
        scores = (q * scale) @ k.swapaxes(-1, -2)
        if case.causal:
            scores[..., ~np.tri(case.seqlen, case.keys, case.keys - case.seqlen, bool)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def forward(turn: int) -> Any:
        return (probabilities() @ v,)

    def gradients(turn: int) -> Any:
        p = probabilities()
        out = p @ v
        delta = (dout * out).sum(-1, keepdims=True)
        ds = p * (dout @ v.swapaxes(-1, -2) - delta) * scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout

    def seqlen_first(results: Any) -> tuple[Any, ...]:
        return tuple(x.swapaxes(1, 2) for x in results)

    if case.op == "backward":
        raise Unsupported("its backward needs its forward: see both")
    return Call(forward if case.op == "forward" else gradients, seqlen_first)
