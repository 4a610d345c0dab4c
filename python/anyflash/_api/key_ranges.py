"""Which queries see each key, as intervals, of the masks that come up most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

from anyflash._api import device_key_ranges
from anyflash._call import parsing
from anyflash._call.operands import as_like
from anyflash._call.results import ArrayT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NAME = "anyflash.create_key_ranges"


@overload
def create_key_ranges(
    *,
    documents: Any = ...,
    tree: tuple[Any, Any] | None = ...,
    prefix: Any = ...,
    seqlen_q: int | None = ...,
    seqlen_k: int | None = ...,
    like: None = ...,
) -> npt.NDArray[np.int32]: ...
@overload
def create_key_ranges(
    *,
    documents: Any = ...,
    tree: tuple[Any, Any] | None = ...,
    prefix: Any = ...,
    seqlen_q: int | None = ...,
    seqlen_k: int | None = ...,
    like: ArrayT,
) -> ArrayT: ...
def create_key_ranges(
    *,
    documents: Any = None,
    tree: tuple[Any, Any] | None = None,
    prefix: Any = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    like: Any = None,
) -> Any:
    """The queries that see each key, for ``attention(key_ranges=...)``: of documents, of a tree, or
    of a prefix, one of the three.

    Arrays of PyTorch, JAX or CuPy on a GPU, and JAX's traced ones, stay where they are. Their
    framework makes the result there, nothing is waited for, and their numbers are not checked.
    Others are read on the host. Of packed sequences, make those of each, and join them:
    ``np.concatenate([ranges[0], ...], axis=-2)``.

    Parameters
    ----------
    documents : (seqlen,) or (batch, seqlen) integers, optional
        The number of each token's document. A document's tokens follow one another, and are seen by
        its queries alone. Tokens with negative numbers are seen by none. For causal documents pass
        ``causal=True`` to attention as well.
    tree : (entry, exit), each (seqlen,) or (batch, seqlen) integers, optional
        Of each token's node: token j is seen by the tokens i with ``entry[j] <= entry[i] <
        exit[j]``, its own node and those below it. Tokens lie in the order of a depth-first walk,
        so that ``entry`` never decreases. ``causal=True`` orders the tokens within a node.
    prefix : int or (batch,) integers, optional
        So many first keys are seen by all queries; key j behind them by the queries ``i >= j -
        (seqlen_k - seqlen_q)``, as a causal mask has it. Do not pass ``causal`` with it.
    seqlen_q, seqlen_k : int
        With ``prefix``, which says no length; seqlen_q is seqlen_k if not given.
    like : array, optional
        The result belongs to its framework and lies on its device; default: a NumPy array, or
        where arrays that stay on their device lie.

    Returns
    -------
    (batch or 1, 1, seqlen_k, 2) int32

    Raises
    ------
    TypeError, ValueError
        Arguments that are not as above.

    Examples
    --------
    >>> import anyflash
    >>> anyflash.create_key_ranges(documents=[4, 4, 4, 7, 7])[0, 0].tolist()
    [[0, 3], [0, 3], [0, 3], [3, 5], [3, 5]]

    A prompt of two tokens, and two answers to it:

    >>> entry, exit = [0, 0, 1, 1, 2], [3, 3, 2, 2, 3]
    >>> anyflash.create_key_ranges(tree=(entry, exit))[0, 0].tolist()
    [[0, 5], [0, 5], [2, 4], [2, 4], [4, 5]]

    A prefix of two tokens, before text:

    >>> anyflash.create_key_ranges(prefix=2, seqlen_k=4)[0, 0].tolist()
    [[0, 4], [0, 4], [2, 4], [3, 4]]
    """
    import numpy as np

    given = {"documents": documents, "tree": tree, "prefix": prefix}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            f"{_NAME}: {' and '.join(names) or 'nothing'} is given; one of documents, tree and "
            "prefix is expected"
        )
    if prefix is None and (seqlen_q is not None or seqlen_k is not None):
        name = "seqlen_q" if seqlen_q is not None else "seqlen_k"
        raise ValueError(f"{_NAME}: {name} is given with {names[0]}; it belongs to prefix")
    mask = _Mask(documents, tree, prefix, seqlen_q, seqlen_k)
    library = device_key_ranges.library_of(*mask.arrays())
    if library is not None:
        return _on_device(library, mask, like)
    if prefix is not None:
        begin, end = _of_prefix(prefix, seqlen_q, seqlen_k)
    elif tree is not None:
        begin, end = _of_tree(tree)
    else:
        begin, end = _of_documents(documents)
    result = np.stack(np.broadcast_arrays(begin, end), axis=-1).astype(np.int32)[:, None]
    if like is None:
        return result
    return as_like(_NAME, result, like)


class _Mask(NamedTuple):
    documents: Any
    tree: Any
    prefix: Any
    seqlen_q: Any
    seqlen_k: Any

    def arrays(self) -> tuple[Any, ...]:
        if self.documents is not None:
            return (self.documents,)
        if self.tree is None:
            return (self.prefix,)
        if not isinstance(self.tree, (tuple, list)) or len(self.tree) != 2:
            raise TypeError(
                f"{_NAME}: tree is {type(self.tree).__name__}; (entry, exit) is allowed"
            )
        return tuple(self.tree)


def _on_device(library: device_key_ranges.Library, mask: _Mask, like: Any) -> Any:
    if like is not None and not library.owns(like):
        raise TypeError(
            f"{_NAME}: like is {type(like).__name__}; the result is made where the other arrays "
            f"lie, by {library.name}"
        )
    if mask.documents is not None:
        numbers = _device_integers(library, "documents", mask.documents)
        begin, end = device_key_ranges.of_documents(library, numbers)
    elif mask.tree is not None:
        entry, leave = (
            _device_integers(library, f"tree[{i}]", numbers) for i, numbers in enumerate(mask.tree)
        )
        _check_same_shape(entry, leave)
        begin, end = device_key_ranges.of_tree(library, entry, leave)
    else:
        rows, keys = _lengths(mask.seqlen_q, mask.seqlen_k)
        lengths = _device_integers(library, "prefix", mask.prefix, ndims=(0, 1))
        begin, end = device_key_ranges.of_prefix(library, lengths, rows, keys)
    return device_key_ranges.stacked(library, begin, end)


def _device_integers(
    library: device_key_ranges.Library, argument: str, x: Any, ndims: tuple[int, ...] = (1, 2)
) -> Any:
    """(batch or 1, seqlen), or (batch or 1,) where a scalar is allowed."""
    if not hasattr(x, "ndim"):
        raise TypeError(
            f"{_NAME}: {argument} is {type(x).__name__}; an array of {library.name} is expected, "
            "as the other one is"
        )
    if "int" not in str(x.dtype):
        raise TypeError(f"{_NAME}: {argument} is {x.dtype}; integers are allowed")
    if x.ndim not in ndims:
        _refuse_shape(argument, x.shape, ndims)
    return x[None] if x.ndim == ndims[0] else x


def _refuse_shape(argument: str, shape: Any, ndims: tuple[int, ...]) -> NoReturn:
    allowed = "an int or (batch,) is allowed"
    if 2 in ndims:
        allowed = "(seqlen,) or (batch, seqlen) is expected"
    raise ValueError(f"{_NAME}: {argument} has shape {tuple(shape)}; {allowed}")


def _check_same_shape(entry: Any, leave: Any) -> None:
    if entry.shape != leave.shape:
        raise ValueError(
            f"{_NAME}: tree has arrays of shapes {tuple(entry.shape)} and {tuple(leave.shape)}; "
            "the same shape is expected"
        )


_Intervals = tuple["npt.NDArray[np.int64]", "npt.NDArray[np.int64]"]  # (batch or 1, seqlen) each


def _of_documents(documents: Any) -> _Intervals:
    import numpy as np

    numbers = _integers("documents", documents)
    begin, end = np.zeros_like(numbers), np.zeros_like(numbers)
    for b, row in enumerate(numbers):
        borders = np.flatnonzero(np.diff(row)) + 1
        first = np.unique(np.concatenate([[0], borders, [len(row)]]))
        of_runs = row[first[:-1]]
        found, counts = np.unique(of_runs[of_runs >= 0], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"{_NAME}: documents has {found[counts > 1][0]} in two places; a document's tokens "
                "are expected to follow one another"
            )
        lengths = np.diff(first)
        begin[b] = np.repeat(first[:-1], lengths)
        end[b] = np.repeat(np.where(of_runs < 0, first[:-1], first[1:]), lengths)
    return begin, end


def _of_tree(tree: Any) -> _Intervals:
    import numpy as np

    entry, leave = _integers("tree[0]", tree[0]), _integers("tree[1]", tree[1])
    _check_same_shape(entry, leave)
    if (np.diff(entry) < 0).any():
        raise ValueError(
            f"{_NAME}: tree[0] decreases; tokens in the order of a depth-first walk are expected"
        )
    pairs = list(zip(entry, leave, strict=True))
    begin = [np.searchsorted(enters, enters) for enters, _ in pairs]
    end = [np.searchsorted(enters, leaves) for enters, leaves in pairs]
    return np.array(begin).reshape(entry.shape), np.array(end).reshape(entry.shape)


def _of_prefix(prefix: Any, seqlen_q: Any, seqlen_k: Any) -> _Intervals:
    import numpy as np

    rows, keys = _lengths(seqlen_q, seqlen_k)
    lengths = _on_host("prefix", prefix)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{_NAME}: prefix is {lengths.dtype}; integers are allowed")
    if lengths.ndim > 1:
        _refuse_shape("prefix", lengths.shape, (0, 1))
    key = np.arange(keys)
    causal = np.clip(key - (keys - rows), 0, rows)
    begin = np.where(key < lengths.reshape(-1, 1), 0, causal)
    return begin, np.full_like(begin, rows)


def _integers(argument: str, value: Any) -> npt.NDArray[np.int64]:
    """(batch or 1, seqlen)"""
    import numpy as np

    x = _on_host(argument, value)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{_NAME}: {argument} is {x.dtype}; integers are allowed")
    if x.ndim not in (1, 2):
        _refuse_shape(argument, x.shape, (1, 2))
    rows: npt.NDArray[np.int64] = np.atleast_2d(x.astype(np.int64))
    return rows


def _on_host(argument: str, value: Any) -> npt.NDArray[Any]:
    """NumPy's array of the same numbers."""
    import numpy as np

    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of a GPU's arrays, too
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{_NAME}: {argument} cannot be read as an array of NumPy: {error}") from None


def _lengths(seqlen_q: Any, seqlen_k: Any) -> tuple[int, int]:
    if seqlen_k is None:
        raise ValueError(f"{_NAME}: prefix is given without seqlen_k")
    keys = _length("seqlen_k", seqlen_k)
    return keys if seqlen_q is None else _length("seqlen_q", seqlen_q), keys


def _length(argument: str, value: Any) -> int:
    return parsing.named(_NAME, argument, parsing.length, value)
