"""One call of attention with a KV cache: its arguments are read, then it runs or is measured."""

from __future__ import annotations

import numbers
from typing import Any

from anyflash import _core, _options
from anyflash._arrays import BOOL, BYTES, CACHES, FLOATS, INT32
from anyflash._call import Given
from anyflash._forward import Forward
from anyflash._operands import Operands

_LAYOUTS = {
    "q": "(batch, seqlen_q, heads, head_dim)",
    "k_cache": "(batch, capacity, heads_k, head_dim), or with a block_table (pages, page_size, "
    "heads_k, head_dim)",
    "v_cache": "(batch, capacity, heads_k, head_dim_v), or with a block_table (pages, page_size, "
    "heads_k, head_dim_v)",
}
_NO_GRADIENTS = "attention with a KV cache has no backward"


class KvCacheCall(Forward):
    """`score`, `cache`, `append` and `results`, then `attend` or `workspace_size`."""

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

    def __init__(self, operation: str, q: Any, k_cache: Any, v_cache: Any) -> None:
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        self._operands = operands = Operands(operation, "q", q, _NO_GRADIENTS)
        read = {
            name: operands.read(name, x, FLOATS if name == "q" else CACHES)
            for name, x in given.items()
        }
        for name, (shape, _) in read.items():
            if len(shape) != 4:
                self._refuse_rank(_LAYOUTS[name], 4, **{name: shape})
        shape, k_shape, v_shape = (shape for shape, _ in read.values())
        self._begin(q, read["q"][1], (shape, k_shape, v_shape))
        self._caches: Given = {name: (given[name], dtype) for name, (_, dtype) in read.items()}
        self._cache_arrays: Given = {}
        self._cache_shapes: dict[str, tuple[int, ...]] = {}
        self._cache_options: dict[str, Any] = {}
        self._seqlens: int | None = None  # the same for all sequences
        self._owner: Any = None  # of the memory that they are written to
        self._writes = False

    def cache(
        self,
        *,
        cache_seqlens: Any,
        cache_batch_idx: Any,
        cache_leftpad: Any,
        block_table: Any,
        tree_mask: Any,
        k_scale: Any,
        v_scale: Any,
        num_splits: Any,
        split_size: Any,
    ) -> None:
        """Where the keys lie, what they are, and how they are divided."""
        parse = self._operands.parse
        if isinstance(cache_seqlens, numbers.Integral):
            self._seqlens = parse("cache_seqlens", _options.length, cache_seqlens)
            cache_seqlens = None
        for name, x, allowed in (
            ("cache_seqlens", cache_seqlens, INT32),
            ("cache_batch_idx", cache_batch_idx, INT32),
            ("cache_leftpad", cache_leftpad, INT32),
            ("block_table", block_table, INT32),
            ("tree_mask", tree_mask, BOOL),
            ("k_scale", k_scale, ("float32",)),
            ("v_scale", v_scale, ("float32",)),
        ):
            if x is not None:
                self._cache_array(name, name, x, allowed)
        self._cache_options["num_splits"] = parse("num_splits", _options.integer, num_splits)
        if split_size is not None:
            self._cache_options["split_size"] = parse("split_size", _options.integer, split_size)

    def append(
        self,
        *,
        k: Any,
        v: Any,
        rotary_cos: Any,
        rotary_sin: Any,
        rotary_seqlens: Any,
        rotary_interleaved: Any,
    ) -> None:
        """New keys and values are written to the caches."""
        for name, argument, x, allowed in (
            ("k_new", "k", k, FLOATS),
            ("v_new", "v", v, FLOATS),
            ("rotary_cos", "rotary_cos", rotary_cos, FLOATS),
            ("rotary_sin", "rotary_sin", rotary_sin, FLOATS),
            ("rotary_seqlens", "rotary_seqlens", rotary_seqlens, INT32),
        ):
            if x is not None:
                self._cache_array(name, argument, x, allowed)
        (interleaved,) = _options.flags(
            self._operands.operation, rotary_interleaved=rotary_interleaved
        )
        self._cache_options["rotary_interleaved"] = interleaved
        self._writes = k is not None or v is not None
        if self._writes:
            for name in ("k_cache", "v_cache"):
                self._operands.cache(name, self._caches[name][0])

    def _cache_array(self, name: str, argument: str, x: Any, allowed: tuple[str, ...]) -> None:
        self._cache_shapes[name], dtype = self._operands.read(argument, x, allowed)
        self._cache_arrays[name] = (x, dtype)

    def results(
        self,
        *,
        softmax_scale: Any,
        causal: Any,
        return_lse: Any,
        out: Any,
        out_dtype: Any,
        workspace: Any,
        stream: Any,
    ) -> None:
        """Where the results go, and with what they are computed."""
        operands = self._operands
        framework, device = operands.framework, operands.device
        causal, return_lse = _options.flags(
            operands.operation, causal=causal, return_lse=return_lse
        )
        softmax_scale, stream = self._numbers(softmax_scale, stream)
        self._workspace = None
        if workspace is not None:
            operands.output("workspace", workspace, BYTES)
            self._workspace = framework.export_out(workspace, device)
        self._given_out = out
        self._result = self._out(out, out_dtype)
        self._lse = self._new_lse() if return_lse else None

        self._export_options(stream)
        cache_options = self._cache_options | self._exported(self._cache_arrays, stream)
        if self._seqlens is not None:
            shapes = (self._cache_shapes.get(name) for name in ("block_table", "k_new"))
            room = (self._seqlens, self._shapes[1], *shapes)
            operands.parse("cache_seqlens", _options.check_room, *room)
            self._owner, lengths = operands.parse(
                "cache_seqlens",
                framework.lengths,
                *(self._batch, self._seqlens, self._q, device, stream),
            )
            cache_options["cache_seqlens"] = (lengths, False)
        outputs = (
            (framework.export_out(self._result, device), operands.as_bits(self._dtype)),
            None if self._lse is None else (framework.export_out(self._lse, device), False),
        )
        queue, self._allocate = self._launch(stream)
        self._arguments = (
            operands.operation,
            (*self._exported(self._caches, stream).values(), *outputs),
            softmax_scale,
            causal,
            queue,
            self._options or None,
            cache_options,
            self._writes,
        )

    def attend(self) -> Any:
        _core.forward_with_kvcache(*self._arguments, self._workspace, self._allocate)
        finish = self._operands.framework.finish
        result = self._result if self._given_out is not None else finish(self._result)
        return result if self._lse is None else (result, finish(self._lse))

    def workspace_size(self) -> int:
        return _core.kvcache_workspace_size(*self._arguments)


def attend(  # noqa: PLR0917 (the order of flash-attn)
    operation: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_seqlens: Any,
    rotary_interleaved: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    softmax_scale: Any,
    causal: Any,
    return_lse: Any,
    out_dtype: Any,
    out: Any = None,
    workspace: Any = None,
    stream: Any = None,
    **options: Any,
) -> Any:
    """The whole call, whoever asks for it; ``options`` are those of `KvCacheCall.cache`."""
    call = KvCacheCall(operation, q, k_cache, v_cache)
    call.score(window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    call.cache(**options)
    call.append(
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        rotary_interleaved=rotary_interleaved,
    )
    call.results(
        softmax_scale=softmax_scale,
        causal=causal,
        return_lse=return_lse,
        out=out,
        out_dtype=out_dtype,
        workspace=workspace,
        stream=stream,
    )
    return call.attend()
