"""Attention for JAX: under jit, grad, vmap, scan, checkpoint and shard_map, on CPUs and GPUs.

The work is done by handlers of XLA's foreign function interface, which this module registers.
"""

from anyflash.jax._attention import attention
from anyflash.jax._context_parallel import zigzag_order
from anyflash.jax._dot_product_attention import dot_product_attention
from anyflash.jax._kvcache import attention_with_kvcache
from anyflash.jax._varlen import attention_varlen
from anyflash.jax._varlen_kvcache import attention_varlen_with_kvcache

__all__ = [
    "attention",
    "attention_varlen",
    "attention_varlen_with_kvcache",
    "attention_with_kvcache",
    "dot_product_attention",
    "zigzag_order",
]
