"""Between padded batches and packed sequences, in PyTorch's own operations; differentiable."""

from __future__ import annotations

from typing import Any

import torch

from anyflash.flash_attn._checks import Checks

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ALLOWED = "bool, uint8 or a signed integer"
# Which PyTorch has since 2.3, with few operations.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, for example those of its tokens that are no padding.

    Parameters
    ----------
    input : (n, ...)
    indices : (rows,) int64 or int32

    Returns
    -------
    (rows, ...)
    """
    checks = Checks("bert_padding.index_first_axis")
    checks.tensors(input=input, indices=indices)
    checks.shape("input", input, input.dim() > 0, "(n, ...)")
    checks.integers("indices", indices, "(rows,)")
    checks.below("indices", indices, input.shape[0], "the rows of input")
    return torch.index_select(input, 0, indices)


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`index_first_axis`, and the input itself, for a residual connection.

    Parameters
    ----------
    input : (n, ...)
    indices : (rows,) int64 or int32

    Returns
    -------
    rows : (rows, ...)
    residual : (n, ...)
        In the memory of ``input``. Gradients of both add up in input's.
    """
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """The inverse of :func:`index_first_axis`; rows that no index names are 0.

    Parameters
    ----------
    values : (rows, ...)
    indices : (rows,) int64 or int32
        Each at most once.
    first_axis_dim : int
        Rows of the result.

    Returns
    -------
    (first_axis_dim, ...)
    """
    checks = Checks("bert_padding.index_put_first_axis")
    checks.size("first_axis_dim", first_axis_dim)
    _check_rows(checks, "values", values, indices, places=first_axis_dim, limit="first_axis_dim")
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy_(0, indices.long(), values)


def _check_rows(
    checks: Checks, name: str, values: Any, indices: Any, *, places: int, limit: str
) -> None:
    checks.tensors(**{name: values, "indices": indices})
    checks.shape(name, values, values.dim() > 0, "(rows, ...)")
    checks.dtype(name, values, values.dtype not in _UNSIGNED, "another dtype")
    checks.integers("indices", indices, f"({values.shape[0]},), the rows of {name}", len(values))
    checks.below("indices", indices, places, limit)


def _check_batch(
    checks: Checks, hidden_states: Any, allow_floats: bool = False, **masks: Any
) -> None:
    checks.tensors(hidden_states=hidden_states, **masks)
    checks.shape("hidden_states", hidden_states, hidden_states.dim() > 1, "(batch, seqlen, ...)")
    shape = tuple(hidden_states.shape[:2])
    for name, mask in masks.items():
        checks.shape(name, mask, mask.shape == shape, f"{shape}, as hidden_states")
        is_right = mask.dtype in _MASKS or (allow_floats and mask.dtype.is_floating_point)
        allowed = "bool, uint8, a signed integer or a float" if allow_floats else _ALLOWED
        checks.dtype(name, mask, is_right, allowed)


def _longest(seqlens: torch.Tensor) -> int:
    return int(seqlens.max()) if seqlens.numel() else 0


def _cu_seqlens(seqlens: torch.Tensor) -> torch.Tensor:
    ends = torch.cumsum(seqlens, 0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch, one after the other.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...)
    attention_mask : (batch, seqlen), bool, int or float
        1 (True) for tokens.
    unused_mask : (batch, seqlen), bool, int or float, optional
        1 (True) for places that are kept too, but not used.

    Returns
    -------
    hidden_states : (total, ...)
        The rows that either mask names.
    indices : (total,) int64
        Where they were in the flattened batch.
    cu_seqlens : (batch + 1,) int32
        Where each sequence begins, and the last one ends.
    max_seqlen_in_batch : int
        Of the longest sequence; the device is waited for.
    seqused : (batch,) int32
        How many tokens of each sequence attention_mask names.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn.bert_padding import pad_input, unpad_input
    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> x = torch.arange(6.0).reshape(2, 3, 1)
    >>> tokens, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)
    >>> tokens.flatten().tolist(), cu_seqlens.tolist(), longest
    ([0.0, 1.0, 3.0, 4.0, 5.0], [0, 2, 5], 3)
    >>> pad_input(tokens, indices, 2, 3).flatten().tolist()
    [0.0, 1.0, 0.0, 3.0, 4.0, 5.0]
    """
    masks = {} if unused_mask is None else {"unused_mask": unused_mask}
    checks = Checks("bert_padding.unpad_input")
    _check_batch(checks, hidden_states, True, attention_mask=attention_mask, **masks)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(seqlens),
        _longest(seqlens),
        attention_mask.sum(-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As :func:`unpad_input`, where a row of the batch holds several sequences.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...)
    attention_mask_in_length : (batch, seqlen), int
        The lengths of a row's sequences, which lie one after the other from its first place on;
        0 means nothing.

    Returns
    -------
    hidden_states : (total, ...)
    indices : (total,) int64
    cu_seqlens : (sequences + 1,) int32
    max_seqlen_in_batch : int

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn.bert_padding import unpad_input_for_concatenated_sequences
    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> x = torch.arange(8.0).reshape(2, 4, 1)
    >>> tokens, _, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    >>> tokens.flatten().tolist(), cu_seqlens.tolist(), longest
    ([0.0, 1.0, 2.0, 4.0, 5.0, 6.0], [0, 2, 3, 6], 3)
    """
    mask = attention_mask_in_length
    checks = Checks("bert_padding.unpad_input_for_concatenated_sequences")
    _check_batch(checks, hidden_states, attention_mask_in_length=mask)
    checks.below(
        "attention_mask_in_length", mask.sum(-1), mask.shape[1] + 1, "has rows that sum to"
    )
    places = torch.arange(mask.shape[1], device=mask.device)
    used = places < mask.sum(-1, keepdim=True)
    indices = torch.nonzero(used.flatten()).flatten()
    lengths = mask[mask != 0]
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(lengths),
        _longest(lengths),
    )


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """The inverse of :func:`unpad_input`; padding is 0.

    Parameters
    ----------
    hidden_states : (total, ...)
    indices : (total,) int64 or int32
        As :func:`unpad_input` gives them.
    batch, seqlen : int

    Returns
    -------
    (batch, seqlen, ...)
    """
    checks = Checks("bert_padding.pad_input")
    checks.size("batch", batch)
    checks.size("seqlen", seqlen)
    _check_rows(
        checks,
        "hidden_states",
        hidden_states,
        indices,
        places=batch * seqlen,
        limit="batch * seqlen",
    )
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])
