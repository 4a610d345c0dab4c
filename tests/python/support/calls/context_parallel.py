"""Attention over ranks beside attention of the whole, which each rank makes alone on the CPU. In
float64, or float32 where the ranks have 16-bit tensors, as on GPUs. The program of the ranks is
context_parallel_program.py.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import anyflash.torch
from anyflash.torch.distributed import ContextParallel
from calls.ranges import key_ranges
from cases.case import FULL
from run import ranks

METHODS = ("ring", "gather", "ulysses")
LAYOUTS = ("zigzag", "contiguous")
MESH = "mesh"  # in place of a method: a ring along one axis, Ulysses along the other
DEVICE = ranks.device()
Options = dict[str, Any]


def heads_of_size(size: int) -> int:
    """Which as many ranks divide, as far as there are cases of theirs."""
    if not FULL:
        return 4
    return 6 if size == 3 else 8


HEADS = heads_of_size(int(sys.argv[3]))


class Shape(NamedTuple):
    batch: int = 2
    rows: int = 150
    keys: int = 150
    heads: int = HEADS
    heads_k: int = HEADS
    columns: int = 8
    columns_v: int = 8


def randn(*shape: int) -> torch.Tensor:
    seed = sum(n * 7**i for i, n in enumerate(shape))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def some(*shape: int) -> torch.Tensor:
    """True in three of four places."""
    return randn(*shape) > -0.67


def bias(axes: str) -> Any:
    """Of a bias that is broadcast along the axes that are not named."""

    def make(s: Shape) -> Options:
        full = (s.batch, s.heads, s.rows, s.keys)
        shape = [n if axis in axes else 1 for n, axis in zip(full, "bhqk", strict=True)]
        return {"bias": randn(*shape)}

    return make


def keep(s: Shape) -> Options:
    return {"bias": some(s.batch, 1, s.rows, s.keys)}


def blocks(s: Shape) -> Options:
    counts = (-(-s.rows // 64), -(-s.keys // 64))
    return {"block_mask": some(1, s.heads, *counts), "block_size": (64, 64)}


# Changes of the shape, and options that may depend on it.
FEATURES: dict[str, tuple[Options, Any]] = {
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window_size": (20, 9)}),
    "left": ({}, {"window_size": (31, None)}),
    "softcap": ({}, {"softcap": 2.0}),
    "alibi": ({}, lambda s: {"alibi_slopes": randn(s.batch, s.heads).abs()}),
    "bias": ({}, bias("bhqk")),
    "bias of rows": ({}, bias("q")),
    "bias of heads": ({}, bias("hqk")),
    "bias of keys": ({}, bias("bhk")),
    "keep": ({}, keep),
    "blocks": ({"rows": 330, "keys": 330}, blocks),
    "sinks": ({}, lambda s: {"sinks": randn(s.heads)}),
    "dropout": ({}, {"dropout_p": 0.3, "seed": 12345}),
    "seqused": ({}, lambda s: {"seqused_k": torch.tensor([s.keys // 2, s.keys]).int()}),
    "ranges": ({}, lambda s: {"key_ranges": key_ranges(s.heads_k, s.keys, s.rows)[None]}),
    "gqa": ({"heads_k": HEADS // 2}, {}),
    "mqa": ({"heads_k": 1}, {}),
    "dv": ({"columns_v": 20}, {}),
    "cross": ({"rows": 90, "keys": 201}, {}),
    "more rows": ({"rows": 170, "keys": 99}, {}),
    "tiny": ({"rows": 3, "keys": 5}, {}),
}
KINDS = {name: "bias" if "bias" in name or name == "keep" else "" for name in FEATURES}


def combined(*names: str) -> tuple[Shape, Options]:
    shape = Shape()
    for name in names:
        shape = shape._replace(**FEATURES[name][0])
    options: Options = {}
    for name in names:
        given = FEATURES[name][1]
        options |= given(shape) if callable(given) else given
    return shape, options


class Case(NamedTuple):
    method: str
    layout: str
    features: tuple[str, ...]
    dtype: torch.dtype = torch.float64

    @property
    def id(self) -> str:
        return f"{self.method}, {self.layout}: {', '.join(self.features) or 'plain'}, {self.dtype}"


def ways() -> list[tuple[str, str]]:
    """Methods and layouts; Ulysses only where the ranks divide the heads."""
    methods = [m for m in METHODS if m != "ulysses" or Shape().heads % dist.get_world_size() == 0]
    return [*itertools.product(methods, LAYOUTS), *((MESH, x) for x in LAYOUTS[: 2 if FULL else 1])]


def pairs() -> Iterator[tuple[str, str]]:
    for one, two in itertools.combinations(FEATURES, 2):
        clash = FEATURES[one][0].keys() & FEATURES[two][0].keys()
        if not clash and not (KINDS[one] and KINDS[one] == KINDS[two]):
            yield one, two


def cases() -> Iterator[Case]:
    """Each feature with each method and layout; every two features with one of these; all. With
    `FULL` every two with each, and also in float32."""
    singles = [(), *((x,) for x in FEATURES)]
    if FULL:
        dtypes = (torch.float64, torch.float32)
        for way, names, dtype in itertools.product(ways(), [*singles, *pairs()], dtypes):
            yield Case(*way, names, dtype)
    else:
        for way, names in itertools.product(ways(), singles):
            yield Case(*way, names)
        for way, names in zip(itertools.cycle(ways()), pairs()):
            yield Case(*way, names)
    many = ("causal", "left", "softcap", "alibi", "bias", "blocks", "sinks", "dropout", "seqused")
    for way in ways():
        yield Case(*way, (*many, "ranges", "gqa", "dv"))
        yield Case(*way, ("causal", "sinks", "dropout", "bias"), torch.float32)
        yield Case(*way, ("window", "alibi", "gqa"), torch.bfloat16)


@functools.cache
def mesh() -> Any:
    size = dist.get_world_size()
    inner = 2 if size % 2 == 0 else 1
    return init_device_mesh(DEVICE, (size // inner, inner), mesh_dim_names=("ring", "ulysses"))


def context_parallel(method: str, layout: str, multiple: int) -> ContextParallel:
    if method == MESH:
        return ContextParallel(mesh()["ring", "ulysses"], layout=layout, multiple=multiple)
    return ContextParallel(method=method, layout=layout, multiple=multiple)


Leaves = dict[str, torch.Tensor]


def leaves_of(shape: Shape, options: Options, dtype: torch.dtype) -> Leaves:
    """All of the whole; those that have gradients want them."""
    q = randn(shape.batch, shape.rows, shape.heads, shape.columns)
    k = randn(shape.batch, shape.keys, shape.heads_k, shape.columns)
    v = randn(shape.batch, shape.keys, shape.heads_k, shape.columns_v)
    tensors = {"q": q, "k": k + 0.1, "v": v - 0.2} | {
        name: x for name, x in options.items() if isinstance(x, torch.Tensor)
    }
    return {
        name: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in tensors.items()
    }


def local_of(cp: ContextParallel, leaves: Leaves) -> Leaves:
    local = {}
    for name, x in leaves.items():
        mine = x.detach()
        if is_of_rows(name, x):
            mine = cp.shard(mine, 2 if name == "bias" else 1)
        local[name] = mine.to(DEVICE, copy=True).requires_grad_(x.requires_grad)
    return local


def unrounded(whole: Leaves) -> Leaves:
    """What 16-bit results of the ranks are compared to has no 16-bit results itself."""
    wide = {name: x.detach().float() for name, x in whole.items() if x.dtype == torch.bfloat16}
    return whole | {name: x.requires_grad_() for name, x in wide.items()}


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(DEVICE) for x in tensors]


def differentiate(leaves: Leaves, out: Any, lse: Any, dout: Any, dlse: Any) -> dict[str, Any]:
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    finite = torch.where(torch.isinf(lse), 0.0, lse)
    loss = (out.double() * dout).sum() + (finite.double() * dlse).sum()
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, grads, strict=True))


def compare(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    of_one: torch.Tensor | None = None,
) -> None:
    """Relative to the largest element; or twice the error of one GPU, where that is more."""
    actual = actual.cpu()
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max().item()
    allowed = tolerance * max(expected.double().abs().max().item(), 1e-3)
    if of_one is not None:
        error_of_one = (of_one.cpu().double() - expected.double()).abs().max().item()
        allowed = max(allowed, 2 * error_of_one)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


# Of out, and of gradients.
TOLERANCES = {
    torch.float64: (1e-12, 1e-6),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2**-7, 2**-6),
}


def check(case: Case) -> None:
    shape, options = combined(*case.features)
    whole = leaves_of(shape, options, case.dtype)
    numbers = {name: x for name, x in options.items() if not isinstance(x, torch.Tensor)}
    dout = randn(shape.batch, shape.rows, shape.heads, shape.columns_v)
    dlse = randn(shape.batch, shape.heads, shape.rows)
    reference = unrounded(whole)
    out, lse = anyflash.torch.attention(**reference, **numbers, return_lse=True)
    grads = differentiate(reference, out, lse, dout, dlse)

    one = grads_of_one_gpu(whole, numbers, (dout, dlse))
    multiple = 64 if "block_size" in numbers else 8
    cp = context_parallel(case.method, case.layout, multiple)
    local = local_of(cp, whole)
    seqlen = (shape.rows, shape.keys)
    mine, my_lse = cp.attention(**local, **numbers, seqlen=seqlen, return_lse=True)
    found = differentiate(local, mine, my_lse, *on_device(cp.shard(dout), cp.shard(dlse, 2)))
    shared = [name for name in found if not is_of_rows(name, grads[name])]
    for name in shared:
        dist.all_reduce(found[name])

    # Only now: a rank that fails before leaves the others waiting.
    assert mine.dtype == case.dtype
    tolerance, of_gradients = TOLERANCES[case.dtype]
    compare("out", mine, cp.shard(out.detach()), tolerance)
    check_lse(my_lse, cp.shard(lse.detach(), 2), case.dtype)
    for name, grad in grads.items():

        def mine_of(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return x if name in shared else cp.shard(x, 2 if name == "bias" else 1)

        of_one = mine_of(one[name]) if name in one else None
        compare(f"d{name}", found[name], mine_of(grad), of_gradients, of_one)


def grads_of_one_gpu(
    whole: Leaves, numbers: Options, gradients: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """Gradients with respect to the whole; none on the CPU."""
    if DEVICE == "cpu":
        return {}
    leaves = {
        name: x.detach().to(DEVICE).requires_grad_(x.requires_grad) for name, x in whole.items()
    }
    out, lse = anyflash.torch.attention(**leaves, **numbers, return_lse=True)
    return differentiate(leaves, out, lse, *on_device(*gradients))


def is_of_rows(name: str, x: torch.Tensor) -> bool:
    """Whether each rank has its rows of a tensor, and of its gradient."""
    return name in ("q", "k", "v") or (name == "bias" and x.shape[2] != 1)


def check_lse(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == torch.float32
    actual = actual.cpu()
    same = torch.isinf(actual) == torch.isinf(expected)
    assert same.all(), "lse: rows that see keys differ"
    finite = torch.isfinite(expected)
    tolerance = {torch.float64: 2**-23, torch.float32: 2**-21, torch.bfloat16: 1e-3}[dtype]
    compare("lse", actual[finite], expected[finite], tolerance)
