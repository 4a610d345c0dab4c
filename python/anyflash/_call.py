"""What the forward and the backward have in common: reading a call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyflash import _options
from anyflash._arrays import BOOL, CPU, FLOATS, INT32, INT64
from anyflash._operands import Operands

_LAYOUTS = {3: "(total_tokens, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}
Given = dict[str, tuple[Any, str]]  # name: (array, dtype)
Allocate = Callable[[int], tuple[Any, int]]


class Call:
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
        "_shapes",
        "_tensors",
    )

    def __init__(self, operation: str, q: Any, k: Any, v: Any, rank: int) -> None:
        self._operands = operands = Operands(operation, "q", q)
        shape, dtype = operands.read("q", q)
        k_shape, k_dtype = operands.read("k", k)
        v_shape, v_dtype = operands.read("v", v)
        if not len(shape) == len(k_shape) == len(v_shape) == rank:
            self._refuse_rank(_LAYOUTS[rank], rank, q=shape, k=k_shape, v=v_shape)
        if not dtype == k_dtype == v_dtype:
            name, other = ("v", v_dtype) if dtype == k_dtype else ("k", k_dtype)
            raise TypeError(
                f"{operation}: {name} is {other}, but q is {dtype}; q, k and v must have one dtype"
            )
        self._tensors = (q, k, v)
        self._begin(q, dtype, (shape, k_shape, v_shape))

    def _begin(self, q: Any, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        """``shapes`` are those of q, k and v."""
        shape, k_shape, v_shape = shapes
        self._q, self._dtype = q, dtype
        self._shapes = shapes
        self._out_shape = (*shape[:-1], v_shape[-1])
        self._batch = shape[0]
        self._lengths = (shape[1], k_shape[1])
        self._arrays: Given = {}
        self._options: dict[str, Any] = {}
        self._rng_state: Any = None

    def _refuse_rank(self, layout: str, rank: int, **shapes: tuple[int, ...]) -> None:
        name, shape = next(item for item in shapes.items() if len(item[1]) != rank)
        raise ValueError(
            f"{self._operands.operation}: {name} has {len(shape)} dimensions, shape {shape}; "
            f"expected {rank}: {layout}"
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
        validate: Any,
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
        (self._options["validate"],) = _options.flags(self._operands.operation, validate=validate)

    def score(
        self,
        *,
        window_size: Any,
        softcap: Any,
        alibi_slopes: Any,
        sinks: Any,
        bias: Any = None,
        block_mask: Any = None,
        block_size: Any = _options.BLOCK_SIZE,
        seqused_k: Any = None,
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
        if dropout_p is _options.NO_DROPOUT and seed is None and rng_state is None:
            return
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
            state = words = operands.parse("dropout_p", self._draw_seed), 0
        else:
            return
        self._options["dropout"] = (p, *words)
        self._rng_state = state if p > 0 else None

    def _draw_seed(self) -> int:
        """A seed where the caller gave none."""
        return self._operands.framework.draw_seed()

    def _numbers(self, softmax_scale: Any, stream: Any) -> tuple[float | None, int | None]:
        """These two, read."""
        if softmax_scale is None and stream is None:
            return None, None
        parse = self._operands.parse
        if softmax_scale is not None:
            softmax_scale = parse("softmax_scale", _options.scale, softmax_scale)
        if stream is not None:
            stream = parse("stream", _options.stream, stream)
        return softmax_scale, stream

    def _export_options(self, stream: int | None) -> None:
        """Shows the options' arrays to the binding."""
        if self._arrays:
            self._options.update(self._exported(self._arrays, stream))

    def _exported(self, arrays: Given, stream: int | None) -> dict[str, tuple[Any, bool]]:
        operands = self._operands
        return {
            name: (operands.framework.export(x, operands.device, stream), operands.as_bits(dtype))
            for name, (x, dtype) in arrays.items()
        }

    def _launch(self, stream: int | None) -> tuple[int, Allocate | None]:
        """The stream that the work goes to, and what gives the binding workspace on a GPU."""
        framework, q, device = self._operands.framework, self._q, self._operands.device
        if device is CPU:
            return 0, None
        return (
            framework.stream(q, device) if stream is None else stream,
            lambda size: framework.workspace(size, q, device, stream),
        )
