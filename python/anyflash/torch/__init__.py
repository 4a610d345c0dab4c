"""anyflash for PyTorch: differentiable, and at home in torch.compile, torch.export and torch.func.

Nothing is compiled against PyTorch: it works with every version from 2.4 on.
"""

from anyflash.torch._attention import attention
from anyflash.torch._flash_impl import register
from anyflash.torch._kvcache import attention_with_kvcache
from anyflash.torch._routing import sdpa_routing
from anyflash.torch._sdpa import scaled_dot_product_attention
from anyflash.torch._varlen import attention_varlen
from anyflash.torch._varlen_kvcache import attention_varlen_with_kvcache

__all__ = [
    "attention",
    "attention_varlen",
    "attention_varlen_with_kvcache",
    "attention_with_kvcache",
    "register",
    "scaled_dot_product_attention",
    "sdpa_routing",
]
