"""What anyflash's own functions hand to PyTorch (anyflash._call.dispatch.Adapter), and when."""

from anyflash.torch._attend import attend
from anyflash.torch._dispatch_state import needs_adapter
from anyflash.torch._kvcache import attend_with_kvcache

__all__ = ["attend", "attend_with_kvcache", "needs_adapter"]
