"""What the forward and the backward have in common: reading a call's arguments."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Generic

from anyflash._arrays.base import BOOL, FLOATS, INT32, INT64, Instead
from anyflash._call import parsing
from anyflash._call.operands import Operands
from anyflash._call.options import (
    CAUSAL,
    NO_DROPOUT,
    NO_SOFTCAP,
    PLAIN,
    UNBOUNDED,
    AttentionOptions,
    Packing,
    Part,
)
from anyflash._call.results import ArrayT

LAYOUTS = {3: "(total_tokens, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}
Given = dict[str, tuple[Any, str]]  # name: (array, dtype)
Allocate = Callable[[int], tuple[Any, int]]


class Call(Generic[ArrayT]):
    """Reads everything that is given, but for what `run` takes."""

    _instead = Instead()

    __slots__ = (
        "_arrays",
        "_batch",
        "_dtype",
        "_given",
        "_lengths",
        "_operands",
        "_options",
        "_out_shape",
        "_q",
        "_rng_state",
        "_shapes",
        "_tensors",
    )

    def __init__(
        self,
        operation: str,
        tensors: tuple[ArrayT, Any, Any],
        options: AttentionOptions,
        packing: Packing | None = None,
    ) -> None:
        q, k, v = tensors
        self._operands = operands = Operands(operation, "q", q, self._instead)
        shape, dtype = operands.read("q", q)
        k_shape, k_dtype = operands.read("k", k)
        v_shape, v_dtype = operands.read("v", v)
        rank = 4 if packing is None else 3
        if not len(shape) == len(k_shape) == len(v_shape) == rank:
            self._refuse_rank(LAYOUTS[rank], rank, q=shape, k=k_shape, v=v_shape)
        if not dtype == k_dtype == v_dtype:
            name, other = ("v", v_dtype) if dtype == k_dtype else ("k", k_dtype)
            raise TypeError(
                f"{operation}: {name} is {other}, but q is {dtype}; q, k and v must have one dtype"
            )
        self._tensors = tensors
        self._begin(q, dtype, (shape, k_shape, v_shape), options)
        if packing is not None:
            self._pack(packing)
        if options is not PLAIN and options is not CAUSAL:
            self._read_options(options)

    def _begin(
        self,
        q: Any,
        dtype: str,
        shapes: tuple[tuple[int, ...], ...],
        options: AttentionOptions,
    ) -> None:
        """``shapes`` are those of q, k and v."""
        shape, k_shape, v_shape = shapes
        self._given = options
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

    def _pack(self, packing: Packing) -> None:
        """The tensors hold packed sequences."""
        shape = self._array("cu_seqlens_q", packing.cu_seqlens_q, INT32)
        self._array("cu_seqlens_k", packing.cu_seqlens_k, INT32)
        operation, parse = self._operands.operation, self._operands.parse
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{operation}: cu_seqlens_q has shape {shape}; expected (batch + 1,)")
        self._batch = shape[0] - 1
        self._lengths = (
            parse("max_seqlen_q", parsing.length, packing.max_seqlen_q),
            parse("max_seqlen_k", parsing.length, packing.max_seqlen_k),
        )
        self._options["max_seqlen"] = self._lengths
        (self._options["validate"],) = parsing.flags(operation, validate=packing.validate)

    def _read_options(self, options: AttentionOptions) -> None:
        parse = self._operands.parse
        _, _, window, softcap, slopes, bias, blocks, size, ranges, *others = options
        sinks, p, seed, state, used, part = others
        if window is not UNBOUNDED:
            self._options["window"] = parse("window_size", parsing.window, window)
        if softcap is not NO_SOFTCAP:
            self._options["softcap"] = parse("softcap", parsing.softcap, softcap)
        if slopes is not None:
            self._array("alibi_slopes", slopes, FLOATS)
        if bias is not None:
            self._array("bias", bias, FLOATS + BOOL)
        if blocks is not None:
            self._array("block_mask", blocks, BOOL)
            self._options["block_size"] = parse("block_size", parsing.block_size, size)
        if ranges is not None:
            self._array("key_ranges", ranges, INT32)
        if sinks is not None:
            self._array("sinks", sinks, FLOATS)
        if used is not None:
            self._array("seqused_k", used, INT32)
        if p is not NO_DROPOUT or seed is not None or state is not None:
            self._read_dropout(p, seed, state)
        if part is not None:
            self._read_part(part)

    def _read_part(self, part: Any) -> None:
        operands = self._operands
        if not isinstance(part, Part):
            raise TypeError(
                f"{operands.operation}: part is {type(part).__name__}; an anyflash.Part is allowed"
            )
        values: dict[str, int | None] = {}
        for name, value in zip(Part._fields, part, strict=True):
            argument = f"part.{name}"
            if value is None:
                values[name] = None
            elif name in Part._fields[:3] and not isinstance(value, numbers.Integral):
                values[name] = None
                operands.refuse_no_array(argument, value)
                _, dtype = operands.read(argument, value, INT32)
                self._arrays[name] = (value, dtype)
            else:
                values[name] = operands.parse(argument, parsing.integer, value)
        self._options["part"] = tuple(values.values())

    def _read_dropout(self, dropout_p: Any, seed: Any, rng_state: Any) -> None:
        operands = self._operands
        p = operands.parse("dropout_p", parsing.probability, dropout_p)
        if seed is not None and rng_state is not None:
            raise ValueError(
                f"{operands.operation}: seed and rng_state are both given; one of them is allowed"
            )
        if rng_state is not None and not isinstance(rng_state, (tuple, list)):
            self._array("rng_state", rng_state, INT64)
            state: Any = rng_state
            words = (0, 0)
        elif rng_state is not None:
            state = words = operands.parse("rng_state", parsing.rng_pair, rng_state)
        elif seed is not None:
            state = words = operands.parse("seed", parsing.seed, seed), 0
        elif p > 0:
            state = words = operands.parse("dropout_p", self._draw_seed), 0
        else:
            return
        self._options["dropout"] = (p, *words)
        self._rng_state = state if p > 0 else None

    def _draw_seed(self) -> int:
        """A seed where the caller gave none."""
        return self._operands.framework.draw_seed()

    def _numbers(self, stream: Any) -> tuple[float | None, int | None]:
        """softmax_scale and the stream, read."""
        softmax_scale = self._given.softmax_scale
        if softmax_scale is None and stream is None:
            return None, None
        parse = self._operands.parse
        if softmax_scale is not None:
            softmax_scale = parse("softmax_scale", parsing.scale, softmax_scale)
        if stream is not None:
            stream = self._operands.stream(stream)
        return softmax_scale, stream

    def _export_options(self, stream: int | None) -> None:
        """Shows the options' arrays to the binding."""
        if self._arrays:
            self._options.update(self._exported(self._arrays, stream))

    def _exported(self, arrays: Given, stream: int | None) -> dict[str, tuple[Any, int]]:
        operands = self._operands
        return {
            name: (operands.framework.export(x, operands.device, stream), operands.as_bits(dtype))
            for name, (x, dtype) in arrays.items()
        }

    def _launch(self, stream: int | None) -> tuple[int, Allocate | None]:
        """The stream that the work goes to, and what gives the binding workspace on a GPU."""
        framework, q, device = self._operands.framework, self._q, self._operands.device
        if device.kind == "cpu":
            return 0, None
        return (
            framework.stream(q, device) if stream is None else stream,
            lambda size: framework.workspace(size, q, device, stream),
        )
