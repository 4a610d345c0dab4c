"""Right calls of the public Python functions, from which python_calls.py makes others."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from devices import HAS_JAX, Kind, modules

import anyflash

# What other modules take from here as well.
__all__ = ["HAS_JAX", "MODULES", "Call", "calls"]

Function = Callable[..., Any]
B, S, H, D = 1, 4, 2, 8


@dataclass(frozen=True, repr=False)
class Call:
    name: str
    function: Function
    arguments: dict[str, Any]
    parameters: tuple[str, ...]
    array: Callable[[Any], Any]  # how its arrays are made
    device: str = "cpu"

    def __repr__(self) -> str:
        return self.name


def numbers(kind: Kind) -> Any:
    return kind.array(np.linspace(-2, 2, B * S * H * D).reshape(B, S, H, D).astype(kind.floats))


def bases(kind: Kind, module: Any) -> dict[str, dict[str, Any]]:
    """Right arguments of a module's functions, by name."""
    array, x = kind.array, numbers(kind)
    lse = array(np.zeros((B, H, S), np.float32))
    ends = array(np.array([0, S], np.int32))
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": S, "max_seqlen_k": S}
    dense = {"q": x, "k": x, "v": x}
    varlen = {name: t[0] for name, t in dense.items()} | packed
    cache = {"q": x, "k_cache": x, "v_cache": x}
    new = {"q": x[:, :1], "k": x[:, :1], "v": x[:, :1], "cache_seqlens": array(np.array([2], "i4"))}
    one = {name: t[0] for name, t in new.items() if name != "cache_seqlens"}
    single = {"cu_seqlens_q": array(np.array([0, 1], "i4")), "cache_seqlens": new["cache_seqlens"]}
    appends = module is anyflash or module.__name__ == "anyflash.jax"
    parts = {"out_a": x, "lse_a": lse, "out_b": x, "lse_b": lse}
    whole = {"dout": x, "out": x, "lse": lse}
    first = {"dout": x[0], "out": x[0], "lse": lse[0]}
    blocks = np.ones((1, 1, 1, 1), np.bool_)
    return {
        "attention": dense,
        "attention_varlen": varlen,
        "attention_backward": dense | whole,
        "attention_varlen_backward": varlen | first,
        "attention_with_kvcache": cache | new if appends else cache,
        "attention_varlen_with_kvcache": cache | one | single,
        "kvcache_workspace_size": cache | new,
        "merge_states": parts,
        "create_block_mask": {
            "predicate": lambda b, h, i, j: i >= j,
            "batch": B,
            "heads": H,
            "seqlen_q": S,
            "seqlen_k": S,
        },
        "expand_block_mask": {"block_mask": blocks, "seqlen_q": S, "seqlen_k": S},
        "create_key_ranges": {"prefix": 1, "seqlen_q": S, "seqlen_k": S},
        "scaled_dot_product_attention": {"query": x, "key": x, "value": x},
        **of_flash_attn(kind),
        **of_flash_attns_helpers(array),
        "dot_product_attention": {"query": x, "key": x, "value": x},
        "zigzag_order": {"length": 8, "devices": 2},
    }


def of_flash_attn(kind: Kind) -> dict[str, dict[str, Any]]:
    """Of flash-attn's names, versions 2 and 3."""
    array, x = kind.array, numbers(kind)
    two, three = (array(np.ones((B, S, n, H, D), kind.floats)) for n in (2, 3))
    ends = array(np.array([0, S], np.int32))
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": S, "max_seqlen_k": S}
    sizes = {"batch_size": B, "num_heads_q": H, "num_heads_kv": H, "headdim": D}
    return {
        "flash_attn_func": {"q": x, "k": x, "v": x},
        "flash_attn_varlen_func": {"q": x[0], "k": x[0], "v": x[0]} | packed,
        "flash_attn_with_kvcache": {"q": x, "k_cache": x, "v_cache": x},
        "flash_attn_qkvpacked_func": {"qkv": three},
        "flash_attn_kvpacked_func": {"q": x, "kv": two},
        "flash_attn_varlen_qkvpacked_func": {"qkv": three[0], "cu_seqlens": ends, "max_seqlen": S},
        "flash_attn_varlen_kvpacked_func": {"q": x[0], "kv": two[0]} | packed,
        "flash_attn_combine": {
            "out_partial": array(np.ones((2, B, S, H, D), np.float32)),
            "lse_partial": array(np.zeros((2, B, S, H), np.float32)),
        },
        "get_scheduler_metadata": sizes
        | {"max_seqlen_q": S, "max_seqlen_k": S, "cache_seqlens": array(np.array([2], np.int32))},
    }


def of_flash_attns_helpers(array: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """Of what flash-attn has around its functions: padding and rotation."""
    x = array(np.ones((B, S, H, D), np.float32))
    table = array(np.ones((S, D // 2), np.float32))
    rows = array(np.arange(S))
    mask = array(np.ones((B, S), np.int64))
    tables = {"cos": table, "sin": table}
    return {
        "index_first_axis": {"input": x[0], "indices": rows},
        "index_put_first_axis": {"values": x[0], "indices": rows, "first_axis_dim": S},
        "pad_input": {"hidden_states": x[0], "indices": rows, "batch": B, "seqlen": S},
        "unpad_input": {"hidden_states": x, "attention_mask": mask},
        "unpad_input_for_concatenated_sequences": {
            "hidden_states": x,
            "attention_mask_in_length": mask,
        },
        "apply_rotary": {"x": x} | tables,
        "apply_rotary_emb": {"x": x} | tables,
        "apply_rotary_emb_torch": {"x": x} | tables,
        "apply_rotary_emb_qkv_": {"qkv": array(np.ones((B, S, 3, H, D), np.float32))} | tables,
        "apply_rotary_emb_kv_": {"kv": array(np.ones((B, S, 2, H, D), np.float32))} | tables,
    }


def on_a_mesh(function: Function) -> Function:
    """Within a jax.shard_map of one device, whose axis is called cp."""
    jax = importlib.import_module("jax")
    mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        rows = jax.sharding.PartitionSpec()
        shared = functools.partial(function, **arguments)
        return jax.shard_map(shared, mesh=mesh, in_specs=(), out_specs=rows, check_vma=False)()

    return call


def awaited(function: Function) -> Function:
    """Errors of what runs later come from the call itself."""
    jax = importlib.import_module("jax")

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return jax.block_until_ready(function(**arguments))

    return call


def differentiated(function: Function) -> Function:
    """And its gradients: what the forward takes, the backward takes."""
    jax = importlib.import_module("jax")

    @functools.wraps(function)
    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        def total(*x: Any) -> Any:
            named = dict(zip(("q", "k", "v"), x, strict=True))
            return jax.tree_util.tree_leaves(function(**named, **options))[0].sum()

        result = function(q=q, k=k, v=v, **options)
        return result, jax.grad(total, argnums=(0, 1, 2))(*map(jax.numpy.asarray, (q, k, v)))

    return call


def parameters_of(function: Function) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters
    return tuple(name for name, parameter in found.items() if parameter.kind not in kinds)


def fits(function: Function, arguments: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


MODULES = {name: (kind.module, kind.array) for name, kind in modules().items()}


def calls(kinds: tuple[str, ...] = tuple(MODULES), device: str = "cpu") -> list[Call]:
    """Those of some modules; of jax with gradients, too."""
    found = []
    for label, kind in modules(device).items():
        if label not in kinds:
            continue
        module = importlib.import_module(kind.module)
        for name, arguments in bases(kind, module).items():
            function = getattr(module, name, None)
            if function is None:
                continue
            if not fits(function, arguments):
                raise TypeError(f"{label}.{name} has no longer the arguments {list(arguments)}")
            call = Call(
                f"{label}.{name}",
                function,
                arguments,
                tuple(dict.fromkeys((*parameters_of(function), *arguments))),
                kind.array,
                device,
            )
            found += of_jax(call) if label == "jax" else [call]
    return found


def of_jax(call: Call) -> list[Call]:
    function, name = call.function, call.name.removeprefix("jax.")
    found = [replace(call, function=awaited(function))]
    if name == "attention":  # also of a sequence that devices share
        arguments = call.arguments | {"context_axis": "cp"}
        shared = awaited(on_a_mesh(function))
        found.append(
            replace(call, name="jax.shared_attention", function=shared, arguments=arguments)
        )
    if name in ("attention", "attention_varlen"):
        with_gradients = awaited(differentiated(function))
        found.insert(0, replace(call, name=f"jax.grad_of_{name}", function=with_gradients))
    return found
