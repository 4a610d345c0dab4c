"""The types of anyflash.h and dlpack.h for ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from backends.tensors import Tensor
from oracle.attention import DTYPES

Struct = TypeVar("Struct", bound=ctypes.Structure)


class DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Options(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("softmax_scale", ctypes.c_double),
        ("has_softmax_scale", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("cpu_isa", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("has_window_left", ctypes.c_int32),
        ("has_window_right", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("alibi_slopes", ctypes.POINTER(DLTensor)),
        ("bias", ctypes.POINTER(DLTensor)),
        ("block_mask", ctypes.POINTER(DLTensor)),
        ("block_size", ctypes.c_int64 * 2),
        ("sinks", ctypes.POINTER(DLTensor)),
        ("dropout_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("rng_state", ctypes.POINTER(DLTensor)),
        ("dropout_mask", ctypes.POINTER(DLTensor)),
        ("max_logits", ctypes.POINTER(DLTensor)),
        ("cu_seqlens_q", ctypes.POINTER(DLTensor)),
        ("cu_seqlens_k", ctypes.POINTER(DLTensor)),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("seqused_k", ctypes.POINTER(DLTensor)),
        ("validate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("has_query_start", ctypes.c_int32),
        ("has_key_start", ctypes.c_int32),
        ("has_diagonal", ctypes.c_int32),
        ("reserved2", ctypes.c_int32),
        ("query_start", ctypes.c_int64),
        ("key_start", ctypes.c_int64),
        ("diagonal", ctypes.c_int64),
        ("query_starts", ctypes.POINTER(DLTensor)),
        ("key_starts", ctypes.POINTER(DLTensor)),
        ("diagonals", ctypes.POINTER(DLTensor)),
        ("batch_start", ctypes.c_int64),
        ("head_start", ctypes.c_int64),
        ("total_heads", ctypes.c_int64),
        ("prior_out", ctypes.POINTER(DLTensor)),
        ("prior_lse", ctypes.POINTER(DLTensor)),
        ("key_ranges", ctypes.POINTER(DLTensor)),
    )


class BackwardOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("deterministic", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("dlse", ctypes.POINTER(DLTensor)),
        ("dbias", ctypes.POINTER(DLTensor)),
        ("dsinks", ctypes.POINTER(DLTensor)),
        ("dalibi_slopes", ctypes.POINTER(DLTensor)),
        ("accumulate_dq", ctypes.c_int32),
        ("accumulate_dkv", ctypes.c_int32),
        ("dq_sums", ctypes.POINTER(DLTensor)),
        ("dq_sums_first", ctypes.c_int64),
        ("dq_sums_rows", ctypes.c_int64),
        ("dq_sums_begin", ctypes.c_int32),
        ("dq_sums_end", ctypes.c_int32),
    )


class KvCacheOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("cache_seqlens", ctypes.POINTER(DLTensor)),
        ("cache_batch_idx", ctypes.POINTER(DLTensor)),
        ("cache_leftpad", ctypes.POINTER(DLTensor)),
        ("block_table", ctypes.POINTER(DLTensor)),
        ("k_new", ctypes.POINTER(DLTensor)),
        ("v_new", ctypes.POINTER(DLTensor)),
        ("rotary_cos", ctypes.POINTER(DLTensor)),
        ("rotary_sin", ctypes.POINTER(DLTensor)),
        ("rotary_neox", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tree_mask", ctypes.POINTER(DLTensor)),
        ("k_scale", ctypes.POINTER(DLTensor)),
        ("v_scale", ctypes.POINTER(DLTensor)),
        ("num_splits", ctypes.c_int64),
        ("split_size", ctypes.c_int64),
        ("rotary_seqlens", ctypes.POINTER(DLTensor)),
        ("head_dim_v", ctypes.c_int64),
        ("cu_seqlens_k_new", ctypes.POINTER(DLTensor)),
    )


class MergeOptions(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


DL_DTYPES = {
    DTYPES["fp64"]: (2, 64),
    DTYPES["fp32"]: (2, 32),
    DTYPES["fp16"]: (2, 16),
    DTYPES["bf16"]: (4, 16),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int64): (0, 64),
    np.dtype(np.int8): (0, 8),
    np.dtype(ml_dtypes.float8_e4m3fn): (10, 8),
    np.dtype(ml_dtypes.float8_e5m2): (12, 8),
    np.dtype(np.uint8): (1, 8),
    np.dtype(np.uint64): (1, 64),
    np.dtype(np.bool_): (6, 8),
}


def structure(kind: type[Struct], fields: dict[str, Any]) -> Struct:
    """Options of the C ABI; None: not set."""
    options = kind(size=ctypes.sizeof(kind))
    for name, value in fields.items():
        if value is None:
            continue
        setattr(options, name, int64_array(value) if name == "block_size" else value)
        if hasattr(options, f"has_{name}"):
            setattr(options, f"has_{name}", 1)
    return options


def int64_array(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def dl_tensor(tensor: Tensor, address: int, device: tuple[int, int]) -> DLTensor:
    """`address` is where the tensor's storage begins on the device."""
    offset = tensor.offset * tensor.storage.itemsize
    return DLTensor(
        data=address + (0 if tensor.byte_offset else offset),
        device=DLDevice(*device),
        ndim=len(tensor.shape),
        dtype=DLDataType(*DL_DTYPES[tensor.storage.dtype], lanes=1),
        shape=int64_array(tensor.shape),
        strides=int64_array(tensor.strides),
        byte_offset=offset if tensor.byte_offset else 0,
    )
