"""Other people's attention, and which of it is on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyflash._install import is_replaced
from anyflash.bench import _anyflash_calls, _torch_peers
from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import ArrayLibrary, Unsupported
from anyflash.bench._problem import Problem
from anyflash.bench._torch_peers import sdpa, torch_call

FLASHINFER_WORKSPACE = 512 * 2**20


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _genuine(name: str) -> Any:
    """A module, unless it is anyflash under that name (`anyflash.flash_attn.install`)."""
    module = importlib.import_module(name)
    if is_replaced(module):
        raise Unsupported(f"{name} is anyflash's stand-in")
    return module


def flash_attn(module_name: str, features: frozenset[str]) -> Callable[[Problem], Call]:
    """FlashAttention 2, 3 or 4: the same functions, of which newer ones take fewer features."""

    def build(problem: Problem) -> Call:
        case, module = problem.case, _genuine(module_name)
        options: dict[str, Any] = {"causal": case.causal}
        if case.op == "decode":
            return _flash_attn_decode(problem, module)
        for name, value in problem.options.items():
            if name == "seed":
                continue
            if name not in features:
                raise Unsupported(f"no {name}")
            options[name] = value
        function = module.flash_attn_func
        if case.lengths:
            function = module.flash_attn_varlen_func
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            known = inspect.signature(function).parameters
            packing = zip(names, problem.packing, strict=True)
            options |= {name: value for name, value in packing if name in known}
        return torch_call(problem, lambda q, k, v: _first(function(q, k, v, **options)))

    return build


def _flash_attn_decode(problem: Problem, module: Any) -> Call:
    case = problem.case
    if not hasattr(module, "flash_attn_with_kvcache"):
        raise Unsupported("no function for a KV cache")
    function = module.flash_attn_with_kvcache
    options: dict[str, Any] = {"causal": True, "cache_seqlens": problem.filled}
    if case.page_size:
        known = inspect.signature(function).parameters
        options["page_table" if "page_table" in known else "block_table"] = problem.page_table
    q = problem.q
    k, v = problem.pages if case.page_size else problem.caches
    return Call(lambda turn: _first(function(q, k[turn], v[turn], **options)), turns=problem.turns)


def flashinfer(problem: Problem) -> Call:
    """Its wrappers for packed prompts and for paged caches; there is no backward."""
    case, module = problem.case, importlib.import_module("flashinfer")
    torch = importlib.import_module("torch")
    dtype = getattr(torch, case.dtype)
    space = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")
    if case.op == "decode":
        return _flashinfer_decode(problem, module, space, dtype)
    if case.op != "forward":
        raise Unsupported("no backward")
    options: dict[str, Any] = {"causal": case.causal}
    for name, value in problem.options.items():
        if name == "window_size":
            options |= {"window_left": value[0], "causal": value[1] == 0}
        elif name == "softcap":
            options["logits_soft_cap"] = value
        else:
            raise Unsupported(f"no {name}")
    starts = problem.starts
    if not case.lengths:
        starts = problem.arrays.integers(range(0, case.batch * case.seqlen + 1, case.seqlen))
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (problem.q, problem.k, problem.v))
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
    wrapper.plan(starts, starts, case.heads, case.kv_heads, case.d, q_data_type=dtype, **options)
    return Call(lambda turn: wrapper.run(q, k, v), lambda out: (out.reshape(problem.q.shape),))


def _flashinfer_decode(problem: Problem, module: Any, space: Any, dtype: Any) -> Call:
    case = problem.case
    if not case.page_size:
        raise Unsupported("only paged caches")
    if case.seqlen > 1:
        raise Unsupported("its function for decoding takes one query")
    pages_each = case.keys // case.page_size
    starts = problem.arrays.integers(range(0, case.batch * pages_each + 1, pages_each))
    last = problem.arrays.integers([case.page_size] * case.batch)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        space, "NHD", use_tensor_cores=case.heads >= 4 * case.kv_heads
    )
    wrapper.plan(
        starts, problem.page_table.reshape(-1), last, case.heads, case.kv_heads, case.d,
        case.page_size, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    q, (k, v) = problem.q[:, 0], problem.pages
    return Call(
        lambda turn: wrapper.run(q, (k[turn], v[turn])),
        lambda out: (out[:, None],),
        turns=problem.turns,
    )


def xformers(problem: Problem) -> Call:
    """memory_efficient_attention; grouped heads are an axis of their own there."""
    case, ops = problem.case, importlib.import_module("xformers.ops")
    if case.op == "decode":
        raise Unsupported("no KV cache in the plain function")
    dropout = 0.0
    for name, value in problem.options.items():
        if name == "dropout_p":
            dropout = value
        elif name != "seed":
            raise Unsupported(f"no {name}")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    bias = biases.LowerTriangularMask() if case.causal else None
    if case.lengths:
        bias = biases.BlockDiagonalMask.from_seqlens(list(case.lengths))
        bias = bias.make_causal() if case.causal else bias
    group, rows = case.heads // case.kv_heads, (1 if case.lengths else case.batch, -1)

    def into(x: Any) -> Any:
        shape = (case.kv_heads, x.shape[-2] // case.kv_heads) if group > 1 else (x.shape[-2],)
        return x.reshape(*rows, *shape, case.d)

    def back(x: Any) -> Any:
        heads = case.heads if group == 1 or x.shape[-2] > 1 else case.kv_heads
        lead = (-1,) if case.lengths else rows
        return x.reshape(*lead, heads, case.d)

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.expand(q.shape) if group > 1 else x for x in (k, v))
        return ops.memory_efficient_attention(q, k, v, attn_bias=bias, p=dropout)

    return torch_call(problem, attend, into, back)


@dataclass(frozen=True)
class Peer:
    """A contender beside anyflash; `wanted`: also when not asked for by name."""

    about: str
    module: str
    build: Callable[[Problem], Call]
    backends: tuple[str, ...] = ("cuda",)
    wanted: bool = True
    slow_to_start: bool = False


FA2 = frozenset({"window_size", "softcap", "alibi_slopes", "dropout_p"})
FA3 = frozenset({"window_size", "softcap"})
BOTH = ("cuda", "cpu")
OF_NUMPY = ("anyflash", "numpy")  # modules of peers that work on NumPy's arrays, too
PEERS = {
    "plain": Peer(
        "anyflash without the feature, unpacked, or with a cache of 16 bits",
        "anyflash",
        _anyflash_calls.plain,
        BOTH,
    ),
    "deterministic": Peer(
        "anyflash's deterministic backward",
        "anyflash",
        _anyflash_calls.deterministic,
        BOTH,
        wanted=False,
    ),
    "flash": Peer("PyTorch's flash backend", "torch", sdpa("FLASH_ATTENTION"), BOTH),
    "cudnn": Peer("PyTorch's cuDNN backend", "torch", sdpa("CUDNN_ATTENTION")),
    "efficient": Peer("PyTorch's memory-efficient one", "torch", sdpa("EFFICIENT_ATTENTION")),
    "math": Peer("PyTorch's with whole matrices", "torch", sdpa("MATH"), BOTH),
    "varlen": Peer("torch.nn.attention.varlen", "torch.nn.attention.varlen", _torch_peers.varlen),
    "flex": Peer("torch.compile of flex_attention", "torch", _torch_peers.flex, slow_to_start=True),
    "torch-cp": Peer(
        "PyTorch's context_parallel, flash backend",
        "torch",
        _torch_peers.context_parallel,
        wanted=False,
    ),
    "torch-cp-cudnn": Peer(
        "the same, cuDNN backend", "torch", _torch_peers.context_parallel, wanted=False
    ),
    "standard": Peer(
        "softmax(Q K^T) V with whole matrices", "numpy", _torch_peers.standard, BOTH, wanted=False
    ),
    "fa2": Peer("flash-attn 2", "flash_attn.flash_attn_interface", flash_attn("flash_attn", FA2)),
    "fa3": Peer("flash-attn 3", "flash_attn_interface", flash_attn("flash_attn_interface", FA3)),
    "fa4": Peer(
        "flash-attn 4", "flash_attn.cute", flash_attn("flash_attn.cute", FA3), slow_to_start=True
    ),
    "flashinfer": Peer("FlashInfer", "flashinfer", flashinfer, slow_to_start=True),
    "xformers": Peer("xformers", "xformers", xformers),
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is missing, broken or a stand-in
        return False


def chosen_peers(
    text: str, arrays: ArrayLibrary, by_default: tuple[str, ...], quick: bool
) -> list[str]:
    """The peers of `--peers`: names; "all"; "none"; "" for those that are found, or the preset's;
    or those and others after a "+". ValueError where a name is unknown, or its package, its backend
    or PyTorch's tensors are not there."""
    here = [name for name, peer in PEERS.items() if arrays.device in peer.backends]
    usable = [name for name in here if arrays.name == "torch" or PEERS[name].module in OF_NUMPY]
    found = [name for name in usable if is_installed(PEERS[name].module)]
    if text == "none":
        return []
    if text == "all":
        return found
    names = [] if not text else list(dict.fromkeys(text.removeprefix("+").split(",")))
    if not text or text.startswith("+"):
        late = [name for name in found if quick and PEERS[name].slow_to_start]
        by_default = by_default or tuple(name for name in found if PEERS[name].wanted)
        first = [name for name in by_default if name in found and name not in late]
        names = list(dict.fromkeys(first + names))
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers: there is no {name!r}, but {', '.join(PEERS)}; all; none")
        if name not in here:
            raise ValueError(f"--peers: {name} does not run on the backend {arrays.device}")
        if name not in usable:
            raise ValueError(f"--peers: {name} takes PyTorch's tensors; these are NumPy's")
        if name not in found:
            raise ValueError(f"--peers: {name} needs {PEERS[name].module}, which is not installed")
    return names
