"""One call of attention with a KV cache: its arguments are read, then it runs or is measured."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from anyflash import _core
from anyflash._arrays.base import BOOL, BYTES, CACHES, FLOATS, INT32, Instead
from anyflash._call import parsing
from anyflash._call.call import Given
from anyflash._call.forward import Forward
from anyflash._call.operands import Operands
from anyflash._call.options import AttentionOptions, KvCacheOptions, OutputRequest
from anyflash._call.results import ArrayT

_LAYOUTS = {
    "q": "(batch, seqlen_q, heads, head_dim)",
    "k_cache": "(batch, capacity, heads_k, head_dim), or with a block_table (pages, page_size, "
    "heads_k, head_dim)",
    "v_cache": "(batch, capacity, heads_k, head_dim_v), or with a block_table (pages, page_size, "
    "heads_k, head_dim_v)",
}
_PACKED_LAYOUT = "(total_q, heads, head_dim) with cu_seqlens_q"
_INSTEAD = Instead(
    "attention with a KV cache has no backward",
    "use anyflash.jax inside jax.jit; attention with a KV cache has no backward",
)
_ARGUMENTS = {"k_new": "k", "v_new": "v"}  # where the core has other names
_FLAGS = ("causal", "return_lse")


def check_values(operation: str, v_cache: Any, cache: KvCacheOptions) -> None:
    """Whether it is said where the values are: in v_cache, or, by head_dim_v, in k_cache. Then
    nothing is given that k_cache, k and k_scale stand for."""
    if cache.head_dim_v is None:
        if v_cache is None:
            raise ValueError(
                f"{operation}: v_cache is missing; it, or head_dim_v, so many columns of k_cache "
                "that are the values, is needed"
            )
        return
    for name, x in (("v_cache", v_cache), ("v", cache.v), ("v_scale", cache.v_scale)):
        if x is not None:
            raise ValueError(
                f"{operation}: {name} is given with head_dim_v, with which the values are "
                "k_cache's columns; only one of both is allowed"
            )


def check_packed(operation: str, cu_seqlens_q: Any) -> None:
    """None would mean that no sequences are packed."""
    if cu_seqlens_q is None:
        raise TypeError(f"{operation}: cu_seqlens_q is None; an array of int32 is allowed")


class KvCacheCall(Forward[ArrayT]):
    """Reads everything that is given; then `attend` or `workspace_size`."""

    __slots__ = (
        "_allocate",
        "_arguments",
        "_cache_arrays",
        "_cache_options",
        "_cache_shapes",
        "_caches",
        "_given_out",
        "_lse",
        "_owner",
        "_result",
        "_seqlens",
        "_workspace",
        "_writes",
    )

    def __init__(
        self,
        operation: str,
        tensors: tuple[ArrayT, Any, Any],
        cache: KvCacheOptions,
        options: AttentionOptions,
        outputs: OutputRequest,
        *,
        workspace: Any = None,
    ) -> None:
        q, k_cache, v_cache = tensors
        self._operands = operands = Operands(operation, "q", q, _INSTEAD)
        check_values(operation, v_cache, cache)
        given = {"q": q, "k_cache": k_cache}
        if v_cache is not None:
            given["v_cache"] = v_cache
        read = {
            name: operands.read(name, x, FLOATS if name == "q" else CACHES)
            for name, x in given.items()
        }
        packed = cache.cu_seqlens_q is not None
        for name, (shape, _) in read.items():
            layout = _PACKED_LAYOUT if packed and name == "q" else _LAYOUTS[name]
            rank = 3 if layout is _PACKED_LAYOUT else 4
            if len(shape) != rank:
                self._refuse_rank(layout, rank, **{name: shape})
        shape, k_shape, *others = (shape for shape, _ in read.values())
        columns = others[0][3] if others else self._read_columns(cache.head_dim_v, k_shape[3])
        self._begin(q, read["q"][1], (shape, k_shape, (*k_shape[:3], columns)), options)
        self._caches: Given = {name: (given[name], dtype) for name, (_, dtype) in read.items()}
        self._cache_arrays: Given = {}
        self._cache_shapes: dict[str, tuple[int, ...]] = {}
        self._cache_options: dict[str, Any] = {} if others else {"head_dim_v": columns}
        self._seqlens: int | None = None  # the same for all sequences
        self._owner: Any = None  # of the memory that they are written to
        if packed:
            self._pack_queries(cache)
        self._read_options(options)
        self._read_cache(cache)
        self._read_appended(cache)
        self._export(outputs, workspace)

    @classmethod
    def of(cls, operation: str, given: Mapping[str, Any]) -> KvCacheCall[Any]:
        """Of the arguments of anyflash.attention_with_kvcache, by name."""

        def made(kind: Any) -> Any:
            return kind(**{name: x for name, x in given.items() if name in kind._fields})

        return cls(
            operation,
            (given["q"], given["k_cache"], given["v_cache"]),
            made(KvCacheOptions),
            made(AttentionOptions),
            made(OutputRequest),
            workspace=given.get("workspace"),
        )

    def _pack_queries(self, cache: KvCacheOptions) -> None:
        """Sequences have different numbers of queries."""
        shape = self._array("cu_seqlens_q", cache.cu_seqlens_q, INT32)
        operation = self._operands.operation
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{operation}: cu_seqlens_q has shape {shape}; expected (batch + 1,)")
        self._batch = shape[0] - 1
        if cache.max_seqlen_q is not None:
            longest = self._operands.parse("max_seqlen_q", parsing.length, cache.max_seqlen_q)
            self._options["max_seqlen"] = (longest, 0)
        (self._options["validate"],) = parsing.flags(operation, validate=cache.validate)

    def _read_columns(self, head_dim_v: Any, most: int) -> int:
        return self._operands.parse("head_dim_v", parsing.columns, head_dim_v, most)

    def _read_cache(self, cache: KvCacheOptions) -> None:
        parse = self._operands.parse
        cache_seqlens = cache.cache_seqlens
        if type(cache_seqlens) is int or isinstance(cache_seqlens, numbers.Integral):
            self._seqlens = parse("cache_seqlens", parsing.length, cache_seqlens)
            cache_seqlens = None
        self._operands.refuse_no_array("cache_seqlens", cache_seqlens)
        for name, x, allowed in (
            ("cache_seqlens", cache_seqlens, INT32),
            ("cache_batch_idx", cache.cache_batch_idx, INT32),
            ("cache_leftpad", cache.cache_leftpad, INT32),
            ("block_table", cache.block_table, INT32),
            ("tree_mask", cache.tree_mask, BOOL),
            ("k_scale", cache.k_scale, ("float32",)),
            ("v_scale", cache.v_scale, ("float32",)),
        ):
            if x is not None:
                self._cache_array(name, name, x, allowed)
        self._cache_options["num_splits"] = parse("num_splits", parsing.integer, cache.num_splits)
        if cache.split_size is not None:
            split_size = parse("split_size", parsing.integer, cache.split_size)
            self._cache_options["split_size"] = split_size

    def _read_appended(self, cache: KvCacheOptions) -> None:
        for name, argument, x, allowed in (
            ("k_new", "k", cache.k, FLOATS),
            ("v_new", "v", cache.v, FLOATS),
            ("rotary_cos", "rotary_cos", cache.rotary_cos, FLOATS),
            ("rotary_sin", "rotary_sin", cache.rotary_sin, FLOATS),
            ("rotary_seqlens", "rotary_seqlens", cache.rotary_seqlens, INT32),
            ("cu_seqlens_k_new", "cu_seqlens_k_new", cache.cu_seqlens_k_new, INT32),
        ):
            if x is not None:
                self._cache_array(name, argument, x, allowed)
        (interleaved,) = parsing.flag_values(
            self._operands.operation, ("rotary_interleaved",), (cache.rotary_interleaved,)
        )
        self._cache_options["rotary_interleaved"] = interleaved
        self._writes = cache.k is not None or cache.v is not None
        if self._writes:
            for name in ("k_cache", "v_cache"):
                if name in self._caches:
                    self._operands.cache(name, self._caches[name][0])

    def _cache_array(self, name: str, argument: str, x: Any, allowed: tuple[str, ...]) -> None:
        self._cache_shapes[name], dtype = self._operands.read(argument, x, allowed)
        self._cache_arrays[name] = (x, dtype)

    def _export(self, outputs: OutputRequest, workspace: Any) -> None:
        """Makes what the binding is given."""
        operands = self._operands
        framework, device = operands.framework, operands.device
        causal, return_lse = parsing.flag_values(
            operands.operation, _FLAGS, (self._given.causal, outputs.return_lse)
        )
        softmax_scale, stream = self._numbers(outputs.stream)
        self._workspace = None
        if workspace is not None:
            operands.output("workspace", workspace, BYTES)
            self._workspace = framework.export_out(workspace, device)
        self._given_out = outputs.out
        self._result = self._out(outputs.out, outputs.out_dtype)
        self._lse = self._new_lse() if return_lse else None
        if outputs.out is not None:
            # Not the caches: a pool of pages may hold those of keys and of values.
            arrays = (self._caches | self._cache_arrays).items()
            inputs = {_ARGUMENTS.get(name, name): x for name, (x, _) in arrays}
            self._check_apart(inputs, out=outputs.out, workspace=workspace)

        self._export_options(stream)
        cache_options = self._cache_options | self._exported(self._cache_arrays, stream)
        if self._seqlens is not None:
            new = None if "cu_seqlens_q" in self._arrays else self._cache_shapes.get("k_new")
            room = (self._seqlens, self._shapes[1], self._cache_shapes.get("block_table"), new)
            operands.parse("cache_seqlens", parsing.check_room, *room)
            self._owner, lengths = operands.parse(
                "cache_seqlens",
                framework.lengths,
                *(self._batch, self._seqlens, self._q, device, stream),
            )
            cache_options["cache_seqlens"] = (lengths, False)
        written = (
            (framework.export_out(self._result, device), operands.as_bits(self._dtype)),
            None if self._lse is None else (framework.export_out(self._lse, device), False),
        )
        caches = self._exported(self._caches, stream)
        queue, self._allocate = self._launch(stream)
        self._arguments = (
            operands.operation,
            (*(caches.get(name) for name in _LAYOUTS), *written),
            softmax_scale,
            causal,
            queue,
            self._options or None,
            cache_options,
            self._writes,
        )

    def attend(self) -> ArrayT | tuple[ArrayT, ArrayT]:
        _core.forward_with_kvcache(*self._arguments, self._workspace, self._allocate)
        finish = self._operands.framework.finish
        result = self._result if self._given_out is not None else finish(self._result)
        return result if self._lse is None else (result, finish(self._lse))

    def workspace_size(self) -> int:
        return _core.kvcache_workspace_size(*self._arguments)
