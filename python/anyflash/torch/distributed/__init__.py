"""Sequences longer than one device: attention over the ranks of a process group."""

from anyflash.torch.distributed._context_parallel import ContextParallel

__all__ = ["ContextParallel"]
