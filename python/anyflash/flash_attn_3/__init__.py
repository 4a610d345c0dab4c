"""FlashAttention-3's functions on anyflash's kernels, with the same signatures and returns.

They are those of flash-attention's folder ``hopper``, version 3.0.0, whose module is called
``flash_attn_interface``. ``from anyflash.flash_attn_3 import flash_attn_func`` in place of ``from
flash_attn_interface import ...``; or :func:`install`, after which programs that import
``flash_attn_interface`` get this one. The first betas of FlashAttention-3 always returned
``(out, softmax_lse)``; here, as in version 3.0.0, the LSE comes where ``return_attn_probs`` asks.
"""

from anyflash.flash_attn_3._install import VERSION as __version__
from anyflash.flash_attn_3._install import install
from anyflash.flash_attn_3.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "__version__",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
]
