"""What anyflash's own functions hand to JAX: anyflash._call.dispatch.Adapter."""

from anyflash.jax._attend import attend
from anyflash.jax._kvcache import attend_with_kvcache

__all__ = ["attend", "attend_with_kvcache"]
