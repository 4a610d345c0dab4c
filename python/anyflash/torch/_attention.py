"""anyflash.torch.attention and attention_varlen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflash import _options
from anyflash._forward import AttentionResult
from anyflash._options import BLOCK_SIZE, NO_DROPOUT, NO_SOFTCAP, UNBOUNDED
from anyflash.torch import _direct, _problem
from anyflash.torch._autograd import Attention, TransformedAttention, apply
from anyflash.torch._problem import (
    DIFFERENTIABLE,
    Asked,
    Problem,
    differentiable,
)
from anyflash.torch._random import RandomState, random_state
from anyflash.torch._watched import is_in_functorch, is_recorded, is_traced

_NAME = "anyflash.torch.attention"
_DENSE = (None, None, 0, 0, False)
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
    sinks: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    rng_state: Tensor | tuple[int, int] | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Any:
    """:func:`anyflash.attention` for PyTorch, differentiable.

    Gradients flow to q, k, v, a bias of numbers, sinks and alibi_slopes, from the output and from
    ``lse``. Within ``torch.compile``, ``torch.export`` and ``torch.func`` it is the operator
    ``torch.ops.anyflash.forward``. Gradients of gradients (``create_graph=True``) recompute
    attention in plain PyTorch: memory is then quadratic in the sequence lengths. There is no
    forward-mode derivative.

    Under ``torch.autocast``, q, k and v of 16 and 32 bits are taken in the autocast dtype.

    Parameters that are not listed are those of :func:`anyflash.attention`. There, tensors that
    require grad come here.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        CPU: float64, float32, float16, bfloat16. CUDA: float16, bfloat16.
    seed, rng_state
        As in :func:`anyflash.attention`. Where dropout is given neither, a state is drawn on q's
        device from its default generator: ``torch.manual_seed``, activation checkpointing and
        replayed CUDA graphs then do what they do for torch's own dropout.
    deterministic : bool, optional
        Of the gradients, as in :func:`anyflash.attention_backward`. Default:
        ``torch.are_deterministic_algorithms_enabled()``.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for; ``rng_state`` is a tensor (2,) of int64 where the
        random state was drawn.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention`.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> q = torch.randn(1, 4, 2, 8, requires_grad=True)
    >>> bias = torch.zeros(4, 4, requires_grad=True)
    >>> out, lse = anyflash.torch.attention(q, q, q, bias=bias, causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> q.grad.shape, bias.grad.shape
    (torch.Size([1, 4, 2, 8]), torch.Size([4, 4]))
    """
    if (
        window_size is UNBOUNDED
        and softcap is NO_SOFTCAP
        and dropout_p is NO_DROPOUT
        and alibi_slopes is bias is block_mask is sinks is seqused_k is None
        and seed is None
        and rng_state is None
        and out_dtype is None
        and (deterministic is None or isinstance(deterministic, bool))
        and return_max_logits is return_dropout_mask is return_result is False
    ):  # to read all options takes longer
        result = _direct.attend(_NAME, q, k, v, softmax_scale, causal, return_lse)
        if result is not None:
            return result
    return _attend(
        _NAME,
        (q, k, v),
        _DENSE,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        block_mask=block_mask,
        block_size=block_size,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        rng_state=rng_state,
        seqused_k=seqused_k,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        return_dropout_mask=return_dropout_mask,
        return_result=return_result,
        out_dtype=out_dtype,
    )


def attention_varlen(  # noqa: PLR0917 (in the order that flash-attn has)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    validate: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
    sinks: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    rng_state: Tensor | tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Any:
    """:func:`anyflash.attention_varlen` for PyTorch, differentiable as :func:`attention` is.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
    max_seqlen_q, max_seqlen_k : int
        As in :func:`anyflash.attention_varlen`; all others as in :func:`attention`.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention_varlen`.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> q = torch.randn(5, 2, 8, requires_grad=True)
    >>> ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    >>> anyflash.torch.attention_varlen(q, q, q, ends, ends, 3, 3, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([5, 2, 8])
    """
    return _attend(
        "anyflash.torch.attention_varlen",
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        block_mask=block_mask,
        block_size=block_size,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        rng_state=rng_state,
        seqused_k=seqused_k,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        return_dropout_mask=return_dropout_mask,
        return_result=return_result,
        out_dtype=out_dtype,
    )


def _attend(
    operation: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    packing: tuple[Tensor | None, Tensor | None, int, int, bool],
    *,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    bias: Any,
    block_mask: Any,
    block_size: Any,
    sinks: Any,
    dropout_p: Any,
    seed: Any,
    rng_state: Any,
    seqused_k: Any,
    deterministic: Any,
    return_lse: Any,
    return_max_logits: Any,
    return_dropout_mask: Any,
    return_result: Any,
    out_dtype: Any,
) -> Any:
    check_tensor(operation, tensors[0])
    q, k, v = _autocast(tensors)

    def parse(argument: str, function: Callable[[Any], Any], value: Any) -> Any:
        try:
            return function(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{operation}: {argument} {error}") from None

    if torch.compiler.is_compiling():  # bounds may be symbols; the operator looks at numbers
        window_size = tuple(-1 if bound is None else bound for bound in window_size)
    elif window_size is not UNBOUNDED:
        window_size = parse("window_size", _options.window, window_size)
    if block_mask is not None:
        block_size = parse("block_size", _options.block_size, block_size)
    random = RandomState()
    if dropout_p != 0 or seed is not None or rng_state is not None:
        dropout_p = parse("dropout_p", _options.probability, dropout_p)
        if seed is not None and rng_state is not None:
            raise ValueError(
                f"{operation}: seed and rng_state are both given; one of them is allowed"
            )
        random = random_state(parse, dropout_p > 0, seed, rng_state, q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate = packing
    validate, causal, deterministic = _options.flags(
        operation, validate=validate, causal=causal, deterministic=deterministic
    )
    return_lse, return_max_logits, return_dropout_mask, return_result = _options.flags(
        operation,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
        return_dropout_mask=return_dropout_mask,
        return_result=return_result,
    )
    p = Problem(
        q,
        k,
        v,
        bias,
        sinks,
        alibi_slopes,
        block_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        random.tensor,
        max_seqlen_q,
        max_seqlen_k,
        validate,
        softmax_scale,
        causal,
        window_size[0],
        window_size[1],
        softcap,
        block_size[0],
        block_size[1],
        dropout_p,
        _problem.to_int64(random.words[0]),
        _problem.to_int64(random.words[1]),
        deterministic,
    )
    whole = return_result or return_max_logits or return_dropout_mask
    asked = Asked(
        return_lse or whole,
        return_max_logits,
        return_dropout_mask,
        as_dtype(out_dtype),
    )
    out, lse, max_logits, dropout_mask = _run(p, asked)
    if whole:
        return AttentionResult(
            out,
            lse,
            max_logits if return_max_logits else None,
            random.returned if dropout_p > 0 else None,
            dropout_mask if return_dropout_mask else None,
        )
    return (out, lse) if return_lse else out


def check_tensor(operation: str, q: Any) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"{operation}: q is {type(q).__name__}; a torch.Tensor is allowed")


def as_dtype(dtype: Any) -> Any:
    """A dtype that may be given by its name."""
    return getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype


def _autocast(tensors: tuple[Tensor, ...]) -> Any:
    """q, k and v as ``torch.autocast`` wants them."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors  # the question that costs least
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in _AUTOCAST else x for x in tensors
    )


def _with_lse(asked: Asked) -> Asked:
    return Asked(True, *asked[1:])  # not _replace, which torch.compile of 2.4 cannot follow


def _run(p: Problem, asked: Asked) -> Any:
    in_functorch = not torch.compiler.is_compiling() and is_in_functorch()
    if is_traced(p.q) and not in_functorch:
        # With the LSE, which the gradients need.
        return torch.ops.anyflash.forward(*p, *_with_lse(asked))
    # A Function refuses dual tensors of forward mode.
    if in_functorch or is_recorded(*differentiable(p)):
        asked = _with_lse(asked)
        if in_functorch:
            return apply(TransformedAttention, *p, *asked)
        return apply(Attention, *differentiable(p), p[DIFFERENTIABLE:], asked)
    return _problem.forward(p, asked)
