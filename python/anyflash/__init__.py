"""FlashAttention for every framework: exact attention on the arrays you already have."""

from typing import Any

from anyflash import _core
from anyflash._api.attention import attention
from anyflash._api.backward import attention_backward, attention_varlen_backward
from anyflash._api.block_mask import create_block_mask, expand_block_mask
from anyflash._api.key_ranges import create_key_ranges
from anyflash._api.kvcache import attention_with_kvcache, kvcache_workspace_size
from anyflash._api.merge import merge_states
from anyflash._api.varlen import attention_varlen
from anyflash._api.varlen_kvcache import attention_varlen_with_kvcache
from anyflash._arrays.base import Array
from anyflash._call.options import Part
from anyflash._call.results import AttentionGrads, AttentionResult
from anyflash._embedding import get_cmake_dir, get_include, get_tvm_ffi_library

__all__ = [
    "Array",
    "AttentionGrads",
    "AttentionResult",
    "Part",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_with_kvcache",
    "attention_with_kvcache",
    "build_info",
    "create_block_mask",
    "create_key_ranges",
    "expand_block_mask",
    "get_cmake_dir",
    "get_include",
    "get_tvm_ffi_library",
    "kvcache_workspace_size",
    "merge_states",
]


def build_info() -> dict[str, Any]:
    """What this build holds and what this machine can run.

    Keys:

    * ``version``
    * ``cuda``: None, or ``runtime_version`` and ``archs``
    * ``cpu``: ``isa`` in use, ``compiled`` ones, default ``threads``
    * ``kernels``: one dict each, with what it can do and its ``launches`` in this process
    * ``tuned_tiles``: ``grid_tile`` and ``short_rows``, which tell small and short problems
    * ``devices``: CUDA devices
    * ``device_error``: why there are none
    """
    return _core.build_info()


__version__ = _core.version
