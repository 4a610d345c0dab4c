"""flash-attn 2.8's functions on anyflash's kernels, with the same signatures and returns.

``from anyflash.flash_attn import flash_attn_func`` in place of ``from flash_attn import ...``; or
:func:`install`, after which programs that import ``flash_attn`` get this one.
"""

from anyflash.flash_attn._install import VERSION as __version__
from anyflash.flash_attn._install import install
from anyflash.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
