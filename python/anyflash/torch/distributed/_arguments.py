"""The arguments of ContextParallel, read and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anyflash._call import parsing
from anyflash._call.options import AttentionOptions, OutputRequest, Packing, Part
from anyflash.torch._dispatch_state import is_deterministic
from anyflash.torch.distributed._layout import Layout
from anyflash.torch.distributed._pieces import NAME
from anyflash.torch.distributed._problem import Given, Packed, Whole
from anyflash.torch.distributed._transport import Group

_T = TypeVar("_T")


def group_of(name: str, group: Any) -> Group:
    if not dist.is_initialized():
        raise RuntimeError(f"{name}: torch.distributed.init_process_group() comes first")
    if group is None or isinstance(group, dist.ProcessGroup):
        return Group.of(group)
    if not (hasattr(group, "get_group") and hasattr(group, "ndim")):
        raise TypeError(
            f"{name}: group is {type(group).__name__}; a DeviceMesh of one or two axes or a "
            "ProcessGroup is allowed"
        )
    if group.ndim == 1:
        return Group.of(group.get_group())
    if group.ndim != 2:
        raise ValueError(
            f"{name}: group is a mesh of {group.ndim} axes; one or two of its axes, mesh[name] or "
            "mesh[ring, ulysses], are allowed"
        )
    if not hasattr(group, "_flatten"):
        raise NotImplementedError(
            f"{name}: group is a mesh of two axes, which this version of PyTorch cannot join"
        )
    ranks = group.mesh.flatten().tolist()
    if ranks != sorted(ranks):  # the joined group's ranks are numbered in ascending order
        raise ValueError(
            f"{name}: group is a mesh of the ranks {group.mesh.tolist()}; along both of its axes "
            "in turn they must be ascending"
        )
    axes = Group.of(group.get_group(0)), Group.of(group.get_group(1))
    return Group.of(group._flatten().get_group())._replace(axes=axes)


def parse(argument: str, function: Callable[[Any], _T], value: Any) -> _T:
    try:
        return function(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{NAME}: {argument} {error}") from None


def four_axes(name: str, x: Tensor | None) -> Tensor | None:
    """With missing leading axes, which are broadcast."""
    if x is None:
        return None
    if x.ndim > 4:
        raise ValueError(f"{NAME}: {name} has {x.ndim} dimensions; at most 4 are allowed")
    return x[(None,) * (4 - x.ndim)]


def check(layout: Layout, whole: Whole, given: Given, rows: int) -> None:
    """Shapes that only the whole tells; ``rows`` are this rank's."""
    bias = given.bias
    if bias is not None and (
        bias.shape[2] not in (1, rows) or bias.shape[3] not in (1, whole.seqlen_k)
    ):
        raise ValueError(
            f"{NAME}: bias has shape {tuple(bias.shape)}; expected (batch or 1, heads or 1, "
            f"{rows} or 1, {whole.seqlen_k} or 1): this rank's rows, and all keys"
        )
    ranges = given.key_ranges
    if ranges is not None and ranges.shape[2] != whole.seqlen_k:
        raise ValueError(
            f"{NAME}: key_ranges has shape {tuple(ranges.shape)}; expected (batch or 1, heads_k or "
            f"1, {whole.seqlen_k}, 2 or 4), of all keys"
        )
    if given.block_mask is None:
        return
    expected = tuple(
        -(-n // size)
        for n, size in zip((whole.seqlen_q, whole.seqlen_k), whole.block_size, strict=True)
    )
    if tuple(given.block_mask.shape[2:]) != expected:
        raise ValueError(
            f"{NAME}: block_mask has shape {tuple(given.block_mask.shape)}; expected (batch or "
            f"1, heads or 1, {expected[0]}, {expected[1]}), the blocks of the whole"
        )
    multiple = layout.multiple
    if any(multiple % size for size in whole.block_size):
        raise ValueError(
            f"{NAME}: block_size is {whole.block_size}, and chunks have a multiple of "
            f"{multiple} rows; ContextParallel(multiple=...) must be a multiple of both sizes"
        )


def check_ranks(q: Any, k: Any, v: Any, rank: int) -> None:
    """Whether all are tensors of so many axes."""
    layout = "(batch, rows, heads, head_dim)" if rank == 4 else "(rows, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{NAME}: {name} is {type(x).__name__}; a torch.Tensor is allowed")
        if x.ndim != rank:
            raise ValueError(f"{NAME}: {name} has shape {tuple(x.shape)}; expected {layout}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """(batch, rows, heads, head_dim) each. What the kernels would refuse is refused before anything
    travels: an error would leave messages under way."""
    batch, _, heads, columns = q.shape
    _, keys, heads_k, columns_v = *k.shape[:3], v.shape[3]
    shapes = (
        ("k", k, (batch, keys, heads_k, columns)),
        ("v", v, (batch, keys, heads_k, columns_v)),
    )
    for name, x, expected in shapes:
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{NAME}: {name} has shape {tuple(x.shape)}; expected {expected}, with q of shape "
                f"{tuple(q.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"{NAME}: {name} is {str(x.dtype)[6:]} on {x.device}; expected "
                f"{str(q.dtype)[6:]} on {q.device}, as q"
            )
    if not q.dtype.is_floating_point:
        raise TypeError(f"{NAME}: q is {str(q.dtype)[6:]}; floating-point numbers are allowed")
    if heads != 0 if heads_k == 0 else heads % heads_k != 0:
        raise ValueError(
            f"{NAME}: q has {heads} heads, and k {heads_k}; a multiple of k's heads is allowed"
        )


def refuse_outputs(outputs: OutputRequest) -> None:
    if outputs.return_dropout_mask:
        raise NotImplementedError(
            f"{NAME}: return_dropout_mask is set; it would be quadratic in the whole's length, and "
            "is not supported"
        )


def read_part(part: Part, heads: int) -> Part:
    """Which batch entries and heads the ranks of the group have, of a larger attention."""
    numbers = {name: parse(name, parsing.length, getattr(part, name)) for name in Part._fields[3:]}
    part = Part(**numbers)
    if part.total_heads and part.head_start + heads > part.total_heads:
        raise ValueError(
            f"{NAME}: total_heads is {part.total_heads}, and q has heads {part.head_start} to "
            f"{part.head_start + heads - 1}; it must be larger than these"
        )
    if part.head_start and not part.total_heads:
        raise ValueError(
            f"{NAME}: head_start is {part.head_start}, and total_heads is not given; both or none "
            "is allowed"
        )
    return part


def read_whole(
    options: AttentionOptions, lengths: tuple[int, int], deterministic: bool | None
) -> Whole:
    if deterministic is None:
        deterministic = is_deterministic()
    flags = {"causal": options.causal, "deterministic": deterministic}
    causal, deterministic = parsing.flags(NAME, **flags)
    scale = options.softmax_scale
    return Whole(
        None if scale is None else parse("softmax_scale", parsing.scale, scale),
        causal,
        parse("window_size", parsing.window, options.window_size),
        parse("softcap", parsing.softcap, options.softcap),
        parse("block_size", parsing.block_size, options.block_size),
        parse("dropout_p", parsing.probability, options.dropout_p),
        deterministic,
        *lengths,
    )


def read_packing(packing: Packing, options: AttentionOptions) -> Packed:
    for name in ("bias", "block_mask"):
        if getattr(options, name) is not None:
            raise NotImplementedError(
                f"{NAME}_varlen: {name} is given, which is not supported with packed sequences"
            )
    ends = packing.cu_seqlens_q, packing.cu_seqlens_k
    for name, x in zip(Packing._fields, ends, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{NAME}_varlen: {name} is {type(x).__name__}; a torch.Tensor is allowed"
            )
        if x.dtype != torch.int32 or x.ndim != 1 or not len(x):
            raise ValueError(
                f"{NAME}_varlen: {name} is {str(x.dtype)[6:]} of shape {tuple(x.shape)}; int32 of "
                "shape (batch + 1,) is allowed"
            )
    lengths = (
        parse("max_seqlen_q", parsing.length, packing.max_seqlen_q),
        parse("max_seqlen_k", parsing.length, packing.max_seqlen_k),
    )
    on_host = all(x.device.type == "cpu" for x in ends)
    return Packed(*ends, *lengths, (ends[0].tolist(), ends[1].tolist()) if on_host else None)
