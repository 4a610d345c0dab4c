"""anyflash.torch.distributed.ContextParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    OutputRequest,
    Packing,
    Part,
)
from anyflash.torch._sharding import is_distributed
from anyflash.torch.distributed._arguments import check_ranks, group_of, read_packing
from anyflash.torch.distributed._attend import METHODS, Others, Ranks, attend, check_rows, summed
from anyflash.torch.distributed._autograd import Unshard
from anyflash.torch.distributed._dtensors import Arguments, like, local_of, unwrapped
from anyflash.torch.distributed._layout import LAYOUTS, Layout
from anyflash.torch.distributed._transport import Axis
from anyflash.torch.distributed._uncompiled import uncompiled


class ContextParallel:
    """Attention over sequences that the ranks of a process group share: each has some of the rows,
    keys and values.

    Exact: partial results are float32 (float64 for float64 tensors) until the last one is joined,
    and dropout drops what it drops on one device. Communication is torch.distributed's, over NCCL
    or gloo.

    Parameters
    ----------
    group : DeviceMesh of one or two axes, or ProcessGroup, optional
        The ranks that share sequences; default: all. With two axes, ``mesh["ring", "ulysses"]``,
        there is a ring along the first and Ulysses along the second, whose ranks divide the heads.
    method : "ring", "gather", "ulysses" or "auto"
        Ring: keys and values come from each rank in turn, behind the computation; memory is linear
        in a rank's rows. Gather: every rank gets all keys and values. Ulysses: rows are exchanged
        for heads, which the ranks must divide. Auto: ulysses where the ranks divide heads and
        heads_k, else gather where all keys and values are at most 64 MiB, else ring.
    layout : "zigzag" or "contiguous"
        Which rows a rank has: with zigzag one chunk from the front and one from the back, so that
        all have the same work under a causal mask.
    multiple : int
        Chunks have a multiple of so many rows, but for the last one: a multiple of 8, for dropout.
        A block_mask needs chunks of whole blocks.

    Raises
    ------
    TypeError, ValueError
        Arguments that are not allowed.
    RuntimeError
        torch.distributed has no process group.

    Examples
    --------
    On one rank, where nothing is exchanged:

    >>> import tempfile, torch, anyflash.torch, torch.distributed as dist
    >>> from anyflash.torch.distributed import ContextParallel
    >>> store = tempfile.mkdtemp() + "/store"
    >>> dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    >>> cp = ContextParallel(method="ring")
    >>> q, k, v = (torch.randn(1, 100, 2, 8) for _ in range(3))
    >>> mine = [cp.shard(x) for x in (q, k, v)]
    >>> out = cp.unshard(cp.attention(*mine, causal=True))
    >>> bool(torch.allclose(out, anyflash.torch.attention(q, k, v, causal=True), atol=1e-6))
    True
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: Any = None,
        method: str = "auto",
        layout: str = "zigzag",
        multiple: int = 64,
    ) -> None:
        name = "anyflash.torch.distributed.ContextParallel"
        for argument, value, allowed in (
            ("method", method, (*METHODS, "auto")),
            ("layout", layout, LAYOUTS),
        ):
            if value not in allowed:
                raise ValueError(
                    f"{name}: {argument} is {value!r}; {', '.join(allowed)} are allowed"
                )
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"{name}: multiple is {multiple!r}; a multiple of 8 is allowed")
        if multiple % 8:
            raise ValueError(f"{name}: multiple is {multiple}; a multiple of 8 is allowed")
        ranks = group_of(name, group)
        inner_size = 1
        if ranks.axes is not None:
            if method != "auto":
                raise ValueError(
                    f"{name}: method is {method!r}; auto is allowed with a mesh of two axes, which "
                    "say what is done along them"
                )
            method, inner_size = "ulysses", ranks.axes[1].size
        self._ranks = Ranks(ranks, Layout(layout, ranks.size, multiple, inner_size), method)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank has whole, along axis ``dim``.

        Parameters
        ----------
        x : tensor of any shape and dtype
        dim : int
            The axis that counts the sequence's rows.

        Returns
        -------
        The rows in order; a copy, through which gradients flow.
        """
        runs = self._ranks.runs(x.shape[dim])
        parts = [x.narrow(dim, run.start, run.rows) for run in runs]
        return torch.cat(parts or [x.narrow(dim, 0, 0)], dim)

    @uncompiled
    def unshard(self, x: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """The whole of a tensor of which every rank has its rows; the reverse of :meth:`shard`.

        Parameters
        ----------
        x : tensor of any shape, the same on all ranks but for axis ``dim``
        dim : int
        length : int, optional
            Rows of the whole; default: the ranks tell one another, and the host waits for it.

        Returns
        -------
        tensor
            The whole, on every rank. The gradient of a rank's rows is the sum of what all ranks
            have for them.
        """
        dim %= x.ndim
        if is_distributed(x):
            return like(x, self.unshard(local_of(x), dim, length))
        if length is None:
            (length,) = summed(self._ranks.group, (x.shape[dim],), x.device)
        check_rows(self._ranks, "x", x.shape[dim], length)
        axis = Axis(self._ranks.layout, length, dim)
        whole: Tensor = Unshard.apply(x, self._ranks.group, axis)  # type: ignore[no-untyped-call]
        return whole

    def positions(self, length: int, device: Any = None) -> Tensor:
        """Where this rank's rows lie in the whole: (rows,) int64, as rotary embeddings want it.

        Parameters
        ----------
        length : int
            Rows of the whole.
        device : torch.device, optional
        """
        runs = self._ranks.runs(length)
        ranges = [torch.arange(run.start, run.stop, device=device) for run in runs]
        return torch.cat([torch.arange(0, device=device), *ranges])

    @uncompiled
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqlen: int | tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = UNBOUNDED,
        softcap: float = NO_SOFTCAP,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        block_size: tuple[int, int] = BLOCK_SIZE,
        key_ranges: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = NO_DROPOUT,
        seed: int | None = None,
        rng_state: Tensor | tuple[int, int] | None = None,
        seqused_k: Tensor | None = None,
        batch_start: int = 0,
        head_start: int = 0,
        total_heads: int = 0,
        deterministic: bool | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        return_dropout_mask: bool = False,
        return_result: bool = False,
        out_dtype: torch.dtype | str | None = None,
    ) -> Any:
        """:func:`anyflash.torch.attention` of the whole sequence, for this rank's rows.

        Options are those of :func:`anyflash.torch.attention`, and the same on every rank. Every
        rank of the group calls it, in the same order. Gradients flow to q, k, v, bias, sinks and
        alibi_slopes; there are none of gradients. Under ``torch.compile`` the graph breaks here.

        DTensors may be sharded on heads or batch, q, k and v alike, on a mesh without the ranks
        that share the sequence. Their rows are what :meth:`shard` gives; results are placed as q.

        Parameters
        ----------
        q : (batch, rows, heads, head_dim)
        k : (batch, keys, heads_k, head_dim)
        v : (batch, keys, heads_k, head_dim_v)
            What :meth:`shard` gives of the whole.
        seqlen : int or (seqlen_q, seqlen_k), optional
            Of the whole; default: the ranks tell one another, and the host waits for it.
        bias : (batch or 1, heads or 1, rows or 1, seqlen_k or 1), optional
            This rank's rows, and all keys in their order.
        block_mask, key_ranges, seqused_k, sinks, alibi_slopes : optional
            Of the whole, on every rank. A rank's gradient of sinks, of slopes and of a bias with
            one row is its share: their sum over the ranks is the gradient.
        dropout_p, seed, rng_state
            Where dropout is given neither seed nor state, the group's first rank draws one.
            DTensors need one of them, and so do ranks of tensor parallelism beside these.
        batch_start, head_start, total_heads : int
            As in :class:`anyflash.Part`: which batch entries and heads of the whole q has, where
            other ranks have others. For dropout; DTensors say it themselves.
        return_max_logits : bool
            Of all rows; the ranks tell one another.
        return_dropout_mask : bool
            Not supported.

        Returns
        -------
        out : (batch, rows, heads, head_dim_v)
        lse : (batch, heads, rows), float32, only with ``return_lse``
        AttentionResult
            Instead of both, with ``return_max_logits`` or ``return_result``.

        Raises
        ------
        TypeError, ValueError
            As :func:`anyflash.torch.attention`; lengths that the layout does not give; heads that
            method "ulysses" cannot divide; blocks that chunks cut; DTensors in other placements.
        NotImplementedError
            ``return_dropout_mask``.
        RuntimeError
            A rank did not send what this one waited for, within the group's timeout (gloo; over
            NCCL, PyTorch ends the process).
        """
        options = AttentionOptions(
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            bias,
            block_mask,
            block_size,
            key_ranges,
            sinks,
            dropout_p,
            seed,
            rng_state,
            seqused_k,
        )
        outputs = OutputRequest(
            return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
        )
        check_ranks(q, k, v, 4)
        part = Part(batch_start=batch_start, head_start=head_start, total_heads=total_heads)
        given, placed = unwrapped(self._ranks.group, Arguments((q, k, v), options, None, part))
        others = Others(seqlen, None, deterministic, given.part, placed)
        return attend(self._ranks, given.tensors, given.options, outputs, others)

    @uncompiled
    def attention_varlen(  # noqa: PLR0917 (in the order that flash-attn has)
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        seqlen: int | tuple[int, int] | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = UNBOUNDED,
        softcap: float = NO_SOFTCAP,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        block_size: tuple[int, int] = BLOCK_SIZE,
        key_ranges: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = NO_DROPOUT,
        seed: int | None = None,
        rng_state: Tensor | tuple[int, int] | None = None,
        batch_start: int = 0,
        head_start: int = 0,
        total_heads: int = 0,
        deterministic: bool | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        return_dropout_mask: bool = False,
        return_result: bool = False,
        out_dtype: torch.dtype | str | None = None,
    ) -> Any:
        """:func:`anyflash.torch.attention_varlen` of all packed rows, for this rank's.

        The packed rows as a whole are shared among the ranks: chunks may cut sequences. Lengths on
        a GPU are not read by the host, so that there no chunk is left out. Where one tensor is both
        ``cu_seqlens_q`` and ``cu_seqlens_k``, on all ranks, a mask leaves out what it leaves out of
        a single sequence. Parameters that are not listed are those of :meth:`attention`.

        Parameters
        ----------
        q : (rows, heads, head_dim)
        k : (keys, heads_k, head_dim)
        v : (keys, heads_k, head_dim_v)
            What :meth:`shard` gives of the whole, with ``dim=0``.
        cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
        max_seqlen_q, max_seqlen_k : int
        seqused_k : (batch,) int32, optional
        key_ranges : (heads_k or 1, total_k, 2 or 4) int32, optional
            Of the whole, on every rank, as in :func:`anyflash.torch.attention_varlen`.
        seqlen : int or (total_q, total_k), optional
            Rows of the whole; default: the ranks tell one another, and the host waits for it.
        dropout_p : float
            Not with method "ring" or a mesh of two axes, whose chunks would cut the draws of eight
            keys.
        bias, block_mask
            Not supported.

        Returns
        -------
        out : (rows, heads, head_dim_v)
        lse : (heads, rows), float32, only with ``return_lse``
        AttentionResult
            As of :meth:`attention`; ``max_logits`` is (batch, heads).

        Raises
        ------
        TypeError, ValueError, NotImplementedError, RuntimeError
            As :meth:`attention`.
        """
        options = AttentionOptions(
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            bias,
            block_mask,
            block_size,
            key_ranges,
            sinks,
            dropout_p,
            seed,
            rng_state,
            seqused_k,
        )
        outputs = OutputRequest(
            return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
        )
        check_ranks(q, k, v, 3)
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, False)
        part = Part(batch_start=batch_start, head_start=head_start, total_heads=total_heads)
        whole = Arguments((q, k, v), options, packing, part)
        given, placed = unwrapped(self._ranks.group, whole)
        packed = read_packing(given.packing or packing, given.options)
        others = Others(seqlen, packed, deterministic, given.part, placed)
        q, k, v = (x[None] for x in given.tensors)
        return attend(self._ranks, (q, k, v), given.options, outputs, others)
