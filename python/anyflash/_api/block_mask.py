"""Maps of the blocks of scores that block-sparse attention keeps; made with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from anyflash._arrays.base import BOOL, listed
from anyflash._arrays.registry import framework_of
from anyflash._call import parsing
from anyflash._call.operands import as_like
from anyflash._call.options import BLOCK_SIZE
from anyflash._call.results import ArrayT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Elements that a predicate is asked for at a time: its arrays of int64 then take 8 MiB each.
_PIECE = 1 << 20


@overload
def create_block_mask(
    predicate: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int] = ...,
    like: None = ...,
) -> npt.NDArray[np.bool_]: ...
@overload
def create_block_mask(
    predicate: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int] = ...,
    *,
    like: ArrayT,
) -> ArrayT: ...
@overload
def create_block_mask(
    predicate: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int],
    like: ArrayT,
) -> ArrayT: ...
def create_block_mask(  # noqa: PLR0917
    predicate: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int] = BLOCK_SIZE,
    like: Any = None,
) -> Any:
    """The blocks in which a predicate keeps anything, for ``attention(block_mask=...)``.

    Kept blocks are kept whole, also where the predicate hides some of their elements: for a mask
    that is exact to the element, add ``causal``, ``window_size`` or a boolean ``bias``.

    Parameters
    ----------
    predicate : callable
        ``predicate(b, h, i, j)`` says whether query i of head h in sequence b sees key j. It is
        called for a piece of the scores at a time. Its arguments are arrays of integers, (1, 1),
        (1, 1), (rows, 1) and (1, columns), and its result is one of bool that broadcasts to
        (rows, columns). It should use what works on arrays: ``&`` and ``|``, not
        ``and`` and ``or``.
    batch, heads : int or None
        None or 1 where the predicate does not depend on it; the mask is then broadcast.
    seqlen_q, seqlen_k : int
    block_size : (queries, keys)
        Multiples of 64. The last blocks may be cut off by the lengths.
    like : array, optional
        The result belongs to its framework and lies on its device; default: a NumPy array.

    Returns
    -------
    (batch or 1, heads or 1, query blocks, key blocks) bool

    Raises
    ------
    TypeError, ValueError
        Arguments, or a predicate's result, that are not as above.

    Examples
    --------
    Keys in the query's own segment of 256, or in the first block:

    >>> import anyflash
    >>> mask = anyflash.create_block_mask(
    ...     lambda b, h, i, j: (i // 256 == j // 256) | (j < 64), None, None, 512, 512
    ... )
    >>> mask[0, 0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 0, 1, 1],
           [1, 0, 1, 1]])
    """
    import numpy as np

    name = "anyflash.create_block_mask"
    if not callable(predicate):
        raise TypeError(
            f"{name}: predicate is {type(predicate).__name__}; a function of b, h, i, j is allowed"
        )
    batch = 1 if batch is None else parsing.named(name, "batch", parsing.length, batch)
    heads = 1 if heads is None else parsing.named(name, "heads", parsing.length, heads)
    seqlen_q = parsing.named(name, "seqlen_q", parsing.length, seqlen_q)
    seqlen_k = parsing.named(name, "seqlen_k", parsing.length, seqlen_k)
    size_q, size_k = parsing.named(name, "block_size", parsing.block_size, block_size)
    result = np.zeros((batch, heads, -(-seqlen_q // size_q), -(-seqlen_k // size_k)), bool)
    columns = max(1, _PIECE // (size_q * size_k))  # blocks of one piece
    rows = max(1, _PIECE // (columns * size_k))
    for b, h, block in np.ndindex(result.shape[:3]):
        end = min(seqlen_q, (block + 1) * size_q)
        for row in range(block * size_q, end, rows):
            queries = np.arange(row, min(end, row + rows))
            for column in range(0, result.shape[3], columns):
                keys = np.arange(column * size_k, min(seqlen_k, (column + columns) * size_k))
                kept = _kept(predicate, b, h, queries, keys)
                begins = np.arange(0, len(keys), size_k)
                target = result[b, h, block, column : column + columns]
                target |= np.logical_or.reduceat(kept, begins)
    if like is None:
        return result
    return as_like(name, result, like)


def _kept(
    predicate: Callable[..., Any],
    b: int,
    h: int,
    queries: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Which of the keys any of the queries sees."""
    import numpy as np

    shape = (len(queries), len(keys))
    sees = np.asarray(
        predicate(np.full((1, 1), b), np.full((1, 1), h), queries[:, None], keys[None, :])
    )
    if sees.dtype != bool:
        raise TypeError(
            f"anyflash.create_block_mask: predicate gave an array of {sees.dtype}; bool is allowed"
        )
    try:
        sees = np.broadcast_to(sees, shape)
    except ValueError:
        raise ValueError(
            f"anyflash.create_block_mask: predicate gave an array of shape {sees.shape} for "
            f"{shape[0]} queries and {shape[1]} keys; one that broadcasts to {shape} is allowed"
        ) from None
    any_query: npt.NDArray[np.bool_] = np.logical_or.reduce(sees, axis=0)
    return any_query


def _on_cpu(block_mask: Any) -> Any:
    import numpy as np

    if hasattr(block_mask, "__dlpack_device__"):
        device = framework_of(block_mask).device(block_mask)
        if device.kind != "cpu":
            kind = type(block_mask).__name__
            raise TypeError(f"is a {kind} on a GPU; an array on the CPU is allowed")
    return np.asarray(block_mask)


def expand_block_mask(
    block_mask: Any,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int] = BLOCK_SIZE,
) -> npt.NDArray[np.bool_]:
    """The elements that a block mask keeps: to look at, or to test with.

    As ``bias`` it means what the map means as ``block_mask``, but it is as large as the scores.

    Parameters
    ----------
    block_mask : (..., query blocks, key blocks) bool
        A NumPy array, or another array on the CPU.
    seqlen_q, seqlen_k : int
    block_size : (queries, keys)

    Returns
    -------
    (..., seqlen_q, seqlen_k) bool, a NumPy array

    Raises
    ------
    TypeError, ValueError
        Arguments that are not as above.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> keep = anyflash.expand_block_mask(np.eye(2, dtype=bool), 100, 100, (64, 64))
    >>> keep.shape, int(keep.sum())
    ((100, 100), 5392)
    """

    name = "anyflash.expand_block_mask"
    seqlen_q = parsing.named(name, "seqlen_q", parsing.length, seqlen_q)
    seqlen_k = parsing.named(name, "seqlen_k", parsing.length, seqlen_k)
    size_q, size_k = parsing.named(name, "block_size", parsing.block_size, block_size)
    mask = parsing.named(name, "block_mask", _on_cpu, block_mask)
    if mask.dtype != bool:
        raise TypeError(f"{name}: block_mask is {mask.dtype}; {listed(BOOL)}")
    blocks = (-(-seqlen_q // size_q), -(-seqlen_k // size_k))
    if mask.shape[-2:] != blocks:
        raise ValueError(
            f"{name}: block_mask has shape {mask.shape}; expected (..., {blocks[0]}, {blocks[1]}) "
            f"for seqlen_q {seqlen_q} and seqlen_k {seqlen_k} in blocks of {size_q} x {size_k}"
        )
    rows: npt.NDArray[np.bool_] = mask.repeat(size_q, -2)[..., :seqlen_q, :]
    return rows.repeat(size_k, -1)[..., :seqlen_k]
