"""Shapes for scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Shapes of query, key, value and, where there is one, of a mask of numbers."""

    query: Shape
    key: Shape
    value: Shape
    mask: Shape | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale}


def same(*shape: int, length_k: int | None = None, dim_v: int | None = None, **more: Any) -> Case:
    *leading, length, dim = shape
    length_k = length if length_k is None else length_k
    value = (*leading, length_k, dim if dim_v is None else dim_v)
    return Case(shape, (*leading, length_k, dim), value, **more)


def grouped(heads: int, heads_k: int, heads_v: int, *leading: int, **more: Any) -> Case:
    shapes = [(*leading, n, *rest) for n, rest in ((heads, (9, 8)), (heads_k, (11, 8)))]
    return Case(*shapes, (*leading, heads_v, 11, 6), enable_gqa=True, **more)


CASES = {
    "4d": same(2, 3, 9, 8),
    "longer-keys": same(2, 3, 9, 8, length_k=70, dim_v=5),
    "longer-queries": same(2, 3, 70, 8, length_k=9),
    "tiles": same(1, 2, 200, 40, length_k=300),
    "2d": same(9, 8, length_k=11, dim_v=4),
    "3d": same(3, 9, 8, length_k=11),
    "5d": same(2, 3, 4, 9, 8),
    "6d": same(2, 1, 3, 2, 9, 8, length_k=11),
    "batch-of-key": Case((2, 3, 9, 8), (1, 3, 11, 8), (1, 3, 11, 8)),
    "batch-of-query": Case((1, 3, 9, 8), (2, 3, 11, 8), (2, 3, 11, 8)),
    "batch-of-value": Case((1, 3, 9, 8), (1, 3, 11, 8), (4, 3, 11, 8)),
    "fewer-axes": Case((4, 2, 3, 9, 8), (3, 11, 8), (2, 3, 11, 8)),
    "one-key-for-all": Case((4, 2, 3, 9, 8), (11, 8), (11, 8)),
    "axes-cross": Case((4, 1, 3, 9, 8), (1, 2, 3, 11, 8), (2, 3, 11, 8)),
    "one-head-of-key": Case((2, 3, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8)),
    "one-head-of-key-alone": Case((2, 3, 9, 8), (2, 1, 11, 8), (2, 3, 11, 8)),
    "one-head-of-value": Case((2, 3, 9, 8), (2, 3, 11, 8), (2, 1, 11, 8)),
    "one-head-of-query": Case((2, 1, 9, 8), (2, 3, 11, 8), (2, 3, 11, 8)),
    "scale": same(2, 3, 9, 8, scale=0.3),
    "scale-0": same(2, 3, 9, 8, scale=0.0),
    "scale-negative": same(2, 3, 9, 8, scale=-1.5),
    "no-queries": same(2, 3, 0, 8, length_k=9),
    "no-keys": same(2, 3, 9, 8, length_k=0),
    "no-batch": same(0, 3, 9, 8),
    "no-batch-5d": same(2, 0, 3, 9, 8),
    "one": same(1, 1, 1, 1),
    "causal": same(2, 3, 70, 8, is_causal=True),
    "causal-longer-keys": same(2, 3, 9, 8, length_k=70, is_causal=True),
    "causal-longer-queries": same(2, 3, 70, 8, length_k=9, is_causal=True),
    "causal-one-query": same(2, 3, 1, 8, length_k=9, is_causal=True),
    "causal-one-key": same(2, 3, 9, 8, length_k=1, is_causal=True),
    "causal-3d": same(3, 9, 8, length_k=11, is_causal=True),
    "causal-2d": same(11, 8, length_k=9, is_causal=True),
    "causal-tiles": same(1, 2, 300, 40, length_k=200, is_causal=True),
    "mask": same(2, 3, 9, 8, length_k=11, mask=(2, 3, 9, 11)),
    "mask-heads": same(2, 3, 9, 8, length_k=11, mask=(3, 9, 11)),
    "mask-one-head": same(2, 3, 9, 8, length_k=11, mask=(2, 1, 9, 11)),
    "mask-2d": same(2, 3, 9, 8, length_k=11, mask=(9, 11)),
    "mask-keys": same(2, 3, 9, 8, length_k=11, mask=(2, 1, 1, 11)),
    "mask-queries": same(2, 3, 9, 8, length_k=11, mask=(2, 1, 9, 1)),
    "mask-one": same(2, 3, 9, 8, length_k=11, mask=(1, 1)),
    "mask-of-3d": same(3, 9, 8, length_k=11, mask=(3, 9, 11)),
    "mask-of-2d": same(9, 8, length_k=11, mask=(9, 11)),
    "mask-of-5d": same(4, 2, 3, 9, 8, length_k=11, mask=(4, 2, 3, 9, 11)),
    "mask-of-5d-inner": same(4, 2, 3, 9, 8, length_k=11, mask=(2, 3, 9, 11)),
    "mask-of-5d-outer": same(4, 2, 3, 9, 8, length_k=11, mask=(4, 1, 3, 9, 11)),
    "mask-of-5d-ones": same(4, 2, 3, 9, 8, length_k=11, mask=(1, 1, 3, 9, 11)),
    "gqa": grouped(6, 2, 2, 2),
    "gqa-mqa": grouped(6, 1, 1, 2),
    "gqa-equal": grouped(4, 4, 4, 2),
    "gqa-two-counts": grouped(6, 3, 2, 2),
    "gqa-value-more": grouped(6, 1, 6, 2),
    "gqa-3d": grouped(6, 2, 2),
    "gqa-5d": grouped(6, 2, 2, 3, 2),
    "gqa-batch": Case((3, 4, 9, 8), (1, 2, 11, 8), (3, 2, 11, 8), enable_gqa=True),
    "gqa-mask-causal": grouped(6, 2, 2, 2, is_causal=True),
    "gqa-mask": grouped(6, 2, 2, 2, mask=(2, 6, 9, 11)),
}


def draw(torch: ModuleType, *shape: int, dtype: str = "float64", seed: int = 0) -> Any:
    values = np.random.default_rng([len(shape), seed]).standard_normal(shape)
    return torch.from_numpy(values).to(getattr(torch, dtype)).requires_grad_()


def leaves(torch: ModuleType, case: Case, dtype: str = "float64") -> list[Any]:
    """query, key, value and the mask, if there is one."""
    shapes = (case.query, case.key, case.value, *([] if case.mask is None else [case.mask]))
    return [draw(torch, *x, dtype=dtype, seed=i) for i, x in enumerate(shapes)]
