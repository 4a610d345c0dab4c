"""One call of the forward operation: its arguments are read, then it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from anyflash import _core, _options
from anyflash._arrays import BOOL, FLOATS, INT32, INT64
from anyflash._operands import Operands

_LAYOUTS = {3: "(total_tokens, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}


class AttentionResult(NamedTuple):
    """What :func:`attention` can give besides its output; None where it was not asked for.

    Attributes
    ----------
    out : (batch, seqlen_q, heads, head_dim_v), packed: (total_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), packed: (heads, total_q), float32
        Natural logarithm of the softmax's denominator.
    max_logits : (batch, heads), float32
        The largest score that no mask removed, -inf where there is none.
    rng_state : (seed, offset), or the array that was given
        What dropout was done with; give it as ``rng_state`` to repeat it.
    dropout_mask : (batch, heads, seqlen_q, seqlen_k), bool
        True where dropout kept the probability, whether or not a mask hides it.
    """

    out: Any
    lse: Any
    max_logits: Any
    rng_state: Any
    dropout_mask: Any


class Forward:
    """``rank`` 3: packed sequences; then `pack` is called before anything else."""

    __slots__ = (
        "_arrays",
        "_batch",
        "_dtype",
        "_lengths",
        "_operands",
        "_options",
        "_out_shape",
        "_q",
        "_rng_state",
        "_tensors",
    )

    def __init__(self, operation: str, q: Any, k: Any, v: Any, rank: int) -> None:
        self._operands = operands = Operands(operation, "q", q)
        shape, dtype = operands.read("q", q)
        k_shape, k_dtype = operands.read("k", k)
        v_shape, v_dtype = operands.read("v", v)
        if not len(shape) == len(k_shape) == len(v_shape) == rank:
            self._refuse_rank(rank, q=shape, k=k_shape, v=v_shape)
        if not dtype == k_dtype == v_dtype:
            name, other = ("v", v_dtype) if dtype == k_dtype else ("k", k_dtype)
            raise TypeError(
                f"{operation}: {name} is {other}, but q is {dtype}; q, k and v must have one dtype"
            )
        self._q, self._tensors, self._dtype = q, (q, k, v), dtype
        self._out_shape = (*shape[:-1], v_shape[-1])
        self._batch = shape[0]
        self._lengths = (shape[1], k_shape[1])
        self._arrays: dict[str, tuple[Any, str]] = {}  # name: (array, dtype)
        self._options: dict[str, Any] = {}
        self._rng_state: Any = None

    def _refuse_rank(self, rank: int, **shapes: tuple[int, ...]) -> None:
        name, shape = next(item for item in shapes.items() if len(item[1]) != rank)
        raise ValueError(
            f"{self._operands.operation}: {name} has {len(shape)} dimensions, shape {shape}; "
            f"expected {rank}: {_LAYOUTS[rank]}"
        )

    def _array(self, name: str, x: Any, allowed: tuple[str, ...]) -> tuple[int, ...]:
        shape, dtype = self._operands.read(name, x, allowed)
        self._arrays[name] = (x, dtype)
        return shape

    def pack(
        self,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        validate: bool,
    ) -> None:
        """The tensors hold packed sequences."""
        shape = self._array("cu_seqlens_q", cu_seqlens_q, INT32)
        self._array("cu_seqlens_k", cu_seqlens_k, INT32)
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"{self._operands.operation}: cu_seqlens_q has shape {shape}; expected (batch + 1,)"
            )
        self._batch = shape[0] - 1
        parse = self._operands.parse
        self._lengths = (
            parse("max_seqlen_q", _options.length, max_seqlen_q),
            parse("max_seqlen_k", _options.length, max_seqlen_k),
        )
        self._options["max_seqlen"] = self._lengths
        self._options["validate"] = bool(validate)

    def score(
        self,
        *,
        window_size: Any,
        softcap: Any,
        alibi_slopes: Any,
        bias: Any,
        block_mask: Any,
        block_size: Any,
        sinks: Any,
        seqused_k: Any,
    ) -> None:
        """What changes or hides scores."""
        parse = self._operands.parse
        if window_size is not _options.UNBOUNDED:
            self._options["window"] = parse("window_size", _options.window, window_size)
        if softcap is not _options.NO_SOFTCAP:
            self._options["softcap"] = parse("softcap", _options.softcap, softcap)
        if alibi_slopes is not None:
            self._array("alibi_slopes", alibi_slopes, FLOATS)
        if bias is not None:
            self._array("bias", bias, FLOATS + BOOL)
        if block_mask is not None:
            self._array("block_mask", block_mask, BOOL)
            self._options["block_size"] = parse("block_size", _options.block_size, block_size)
        if sinks is not None:
            self._array("sinks", sinks, FLOATS)
        if seqused_k is not None:
            self._array("seqused_k", seqused_k, INT32)

    def dropout(self, dropout_p: Any, seed: Any, rng_state: Any) -> None:
        operands = self._operands
        p = operands.parse("dropout_p", _options.probability, dropout_p)
        if seed is not None and rng_state is not None:
            raise ValueError(
                f"{operands.operation}: seed and rng_state are both given; one of them is allowed"
            )
        if rng_state is not None and not isinstance(rng_state, (tuple, list)):
            self._array("rng_state", rng_state, INT64)
            state: Any = rng_state
            words = (0, 0)
        elif rng_state is not None:
            state = words = operands.parse("rng_state", _options.rng_pair, rng_state)
        elif seed is not None:
            state = words = operands.parse("seed", _options.seed, seed), 0
        elif p > 0:
            state = words = operands.parse("dropout_p", operands.framework.draw_seed), 0
        else:
            return
        self._options["dropout"] = (p, *words)
        self._rng_state = state if p > 0 else None

    def run(
        self,
        *,
        softmax_scale: Any,
        causal: Any,
        return_lse: Any,
        return_max_logits: Any,
        return_dropout_mask: Any,
        return_result: Any,
        out: Any,
        out_dtype: Any,
        stream: Any,
    ) -> Any:
        operands, q = self._operands, self._q
        framework, device = operands.framework, operands.device
        if softmax_scale is not None:
            softmax_scale = operands.parse("softmax_scale", _options.scale, softmax_scale)
        if stream is not None:
            stream = operands.parse("stream", _options.stream, stream)
        for name, (x, dtype) in self._arrays.items():
            exported = framework.export(x, device, stream)
            self._options[name] = (exported, operands.bf16_bits(dtype))

        result = self._out(out, out_dtype)
        batch, heads, length = self._batch, self._out_shape[-2], self._out_shape[-3]
        max_logits = dropout_mask = lse = lse_target = None
        if return_max_logits:
            max_logits = self._output("max_logits", (batch, heads), "float32")
        if return_dropout_mask:
            dropout_mask = self._output("dropout_mask", (batch, heads, *self._lengths), "bool")
        whole = return_result or return_max_logits or return_dropout_mask
        if return_lse or whole:
            shape = (*self._out_shape[:-3], heads, length)
            lse = operands.empty(shape, "float32")
            lse_target = framework.export_out(lse, device)

        q_in, k_in, v_in = [framework.export(x, device, stream) for x in self._tensors]
        _core.forward(
            operands.operation,
            q_in,
            k_in,
            v_in,
            framework.export_out(result, device),
            lse_target,
            softmax_scale,
            bool(causal),
            framework.stream(q, device) if stream is None else stream,
            operands.bf16_bits(self._dtype),
            self._options or None,
            lambda size: framework.workspace(size, q, device, stream),
        )
        if out is None:
            result = framework.finish(result)
        if lse is not None:
            lse = framework.finish(lse)
        if whole:
            return AttentionResult(
                result,
                lse,
                None if max_logits is None else framework.finish(max_logits),
                self._rng_state,
                None if dropout_mask is None else framework.finish(dropout_mask),
            )
        return (result, lse) if return_lse else result

    def _out(self, out: Any, out_dtype: Any) -> Any:
        """The array for the result."""
        operands = self._operands
        if out is None and out_dtype is None:
            return operands.empty(self._out_shape, None)
        allowed = tuple(dict.fromkeys((self._dtype, "float32")))
        if out_dtype is not None:
            allowed = (operands.parse("out_dtype", _options.dtype, out_dtype, allowed),)
        if out is None:
            return operands.empty(self._out_shape, allowed[0])
        operands.output("out", out, allowed)
        return out

    def _output(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array that is written besides the result."""
        operands = self._operands
        array = operands.empty(shape, dtype)
        self._options[name] = (operands.framework.export_out(array, operands.device), False)
        return array
