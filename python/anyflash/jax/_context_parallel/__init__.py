"""Attention over a mesh axis that shares sequences, within jax.shard_map."""

from anyflash.jax._context_parallel._arguments import NO_CONTEXT, Context, check_unused
from anyflash.jax._context_parallel._attend import attend_shared
from anyflash.jax._context_parallel._layout import zigzag_order

__all__ = ["NO_CONTEXT", "Context", "attend_shared", "check_unused", "zigzag_order"]
