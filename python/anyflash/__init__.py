"""FlashAttention for every framework: exact attention on the arrays you already have."""

from typing import Any

from anyflash import _core
from anyflash._arrays import Array
from anyflash._attention import attention

__all__ = ["Array", "__version__", "attention", "build_info"]


def build_info() -> dict[str, Any]:
    """What this build holds and what this machine can run.

    Keys: ``version``; ``cuda`` (None, or ``runtime_version`` and ``archs``); ``cpu`` (``isa`` in
    use, ``compiled`` ones, default ``threads``); ``kernels`` (one dict each, with the number of
    ``launches`` in this process); ``devices`` (CUDA devices); ``device_error`` (why there are
    none).
    """
    return _core.build_info()


__version__ = _core.version
