"""Checks one library built from forward.cu against float64, each group of cases in a process.

check.py LIBRARY HEAD_DIM [float16] [quick]
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from checker import MASKS, Checker, cumulative, run_checks, same_bits
from library import Library, Problem, output_like, reference

NAN = float("nan")


class ForwardChecker(Checker):
    def __init__(self, path: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.library = Library(path)
        self.generator = torch.Generator("cuda").manual_seed(1)

    def run(self, p: Problem, *, ctas: int = 0, float_out: bool = False) -> tuple[Any, Any, Any]:
        out = output_like(p, torch.float32 if float_out else None)
        packed = p.cu_q is not None
        shape = (
            (p.q.shape[1], p.q.shape[0]) if packed else (p.q.shape[0], p.q.shape[2], p.q.shape[1])
        )
        lse = torch.full(shape, NAN, device="cuda")
        self.library.call(p, out, lse, ctas=ctas)()
        torch.cuda.synchronize()
        return out, lse, None

    def compare(self, what: str, p: Problem, **options: Any) -> None:
        """Against float64: all that is to be written, and nothing else."""
        out, lse, _ = self.run(p, **options)
        expected, expected_lse, _ = reference(p)
        lse = lse.transpose(-1, -2)
        good = expected.isfinite()
        self.expect(bool((out.isfinite() == good).all()), f"{what}: NaN at other places")
        error = (out.double() - expected)[good]
        norm = expected[good].norm()
        error = error.nan_to_num(1e3)
        relative = float(error.norm() / norm) if norm > 0 else float(error.norm())
        self.worst = max(self.worst, relative)
        limit = 4e-3 if self.dtype == torch.bfloat16 else 8e-4
        self.expect(relative < limit, f"{what}: relative error {relative:.2e}")
        if error.numel():
            largest = float(error.abs().max())
            self.expect(largest < 0.05, f"{what}: absolute error {largest:.2e}")
        finite = expected_lse.isfinite()
        self.expect(bool((lse.isfinite() == finite).all()), f"{what}: LSE finite elsewhere")
        if finite.any():
            lse_error = float((lse.double() - expected_lse)[finite].abs().max())
            self.expect(lse_error < 2e-3, f"{what}: LSE error {lse_error:.2e}")

    def same_bits(self, what: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.expect(same_bits(a, b), f"{what}: other bits")


def check_lengths(c: ForwardChecker, d: int) -> None:
    lengths = (1, 2, 63, 64, 65, 80, 127, 128, 129, 191, 193, 300, 513)
    for i, (sq, sk) in enumerate(itertools.product(lengths, lengths)):
        mask = list(MASKS)[i % len(MASKS)]
        left, right = MASKS[mask]
        p = Problem(
            c.random(1, sq, 2, d), c.random(1, sk, 1, d), c.random(1, sk, 1, d), left, right
        )
        c.compare(f"{sq} x {sk} {mask}", p, ctas=(0, 1, 2)[i % 3])
    for sq, sk in ((5, 0), (0, 5), (200, 0)):
        p = Problem(c.random(1, sq, 2, d), c.random(1, sk, 2, d), c.random(1, sk, 2, d))
        c.compare(f"{sq} x {sk}", p)


def check_masks(c: ForwardChecker, d: int) -> None:
    for mask, (left, right) in MASKS.items():
        for sq, sk in ((700, 700), (300, 1000), (1000, 300), (1024, 1024)):
            for heads, heads_k, ctas in ((4, 4, 0), (6, 2, 5), (8, 1, 132)):
                p = Problem(
                    c.random(2, sq, heads, d),
                    c.random(2, sk, heads_k, d),
                    c.random(2, sk, heads_k, d),
                    left,
                    right,
                )
                c.compare(f"{mask} {sq} x {sk}, {heads}/{heads_k} heads", p, ctas=ctas)


def check_features(c: ForwardChecker, d: int) -> None:
    """Other head dims, scales, large scores, sinks, float32 outputs, layouts, max_logits."""
    half = d // 2
    for dk, dv in ((half + 8, half + 8), (d - 8, d), (d, d - 24), (d, 8), (8, 8), (half, d)):
        if dk <= d and dv <= d:
            p = Problem(
                c.random(2, 200, 2, dk), c.random(2, 200, 2, dk), c.random(2, 200, 2, dv), -1, 0
            )
            c.compare(f"head dims {dk}, {dv}", p)
    for scale in (1.0, 3.0, 1e-3):
        p = Problem(
            c.random(1, 400, 2, d), c.random(1, 400, 2, d), c.random(1, 400, 2, d), -1, 0, scale
        )
        c.compare(f"scale {scale}", p)
        p = Problem(p.q, p.k, p.v, scale=scale, sinks=torch.randn(2, device="cuda") * 5)
        c.compare(f"scale {scale}, sinks", p)
        c.compare(f"scale {scale}, sinks, float32", p, float_out=True)
    by_head = [c.random(2, 3, 333, d).transpose(1, 2) for _ in range(3)]
    c.compare("heads before rows", Problem(*by_head, -1, 0))
    qkv = c.random(2, 333, 3, 3, d)
    c.compare("one tensor", Problem(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]))
    p = Problem(c.random(2, 300, 4, d), c.random(2, 500, 2, d), c.random(2, 500, 2, d), -1, 0)
    out, maxima = output_like(p), torch.full((2, 4), -float("inf"), device="cuda")
    c.library.call(p, out, None, maxima)()
    torch.cuda.synchronize()
    expected = reference(p)[2]
    c.expect(bool((maxima - expected).abs().max() < 1e-2), "max_logits")


def check_packed(c: ForwardChecker, d: int) -> None:
    tables = (
        ([0, 200], [0, 300]),
        ([200, 0], [300, 0]),
        ([100, 27, 173, 3797, 129], [100, 27, 173, 3797, 129]),
        ([100, 27, 173, 64], [300, 0, 200, 1000]),
        ([1] * 20, list(range(1, 21))),
        ([500, 1, 500], [100, 700, 513]),
    )
    for (lq, lk), (mask, (left, right)) in itertools.product(tables, MASKS.items()):
        tq, tk = sum(lq) + 37, sum(lk) + 53  # rows that belong to no sequence
        p = Problem(
            c.random(tq, 4, d),
            c.random(tk, 2, d),
            c.random(tk, 2, d),
            left,
            right,
            cu_q=cumulative(lq),
            cu_k=cumulative(lk),
            max_q=max(lq),
            max_k=max(lk),
        )
        c.compare(f"packed {lq} {lk} {mask}", p, ctas=3 if len(lq) % 2 else 0)
    c.compare("packed float32", p, float_out=True)
    used = torch.tensor([0, 1, 700, 333], dtype=torch.int32, device="cuda")
    for left, right in MASKS.values():
        p = Problem(
            c.random(4, 300, 4, d),
            c.random(4, 700, 2, d),
            c.random(4, 700, 2, d),
            left,
            right,
            used_k=used,
        )
        c.compare(f"seqused {left} {right}", p)


def check_poison(c: ForwardChecker, d: int) -> None:
    """NaN and infinity in K and V reach the rows that see them, and no others."""
    for bad, (left, right), sk in itertools.product(
        (NAN, float("inf")), ((-1, 0), (70, 30), (100, -1)), (300, 389, 640)
    ):
        p = Problem(
            c.random(2, 300, 4, d), c.random(2, sk, 2, d), c.random(2, sk, 2, d), left, right
        )
        p.v[0, sk // 2, 0, 3] = bad
        p.v[1, sk - 1, 1, :] = bad
        p.v[1, 0, 0, d - 1] = bad
        c.compare(f"V has {bad}, {left} {right} {sk}", p)
        c.compare(f"V has {bad}, {left} {right} {sk}, float32", p, float_out=True, ctas=2)
        p.v.nan_to_num_(0, 0, 0)
        clean = c.run(p)[0]
        p.k[0, sk - 1, 0, :] = bad  # seen by the last rows alone under a causal mask
        rows = 300 if right < 0 else max(300 - 1 - right, 0)
        c.same_bits(
            f"K has {bad}, {left} {right} {sk}", c.run(p)[0][0, :rows, 2:], clean[0, :rows, 2:]
        )
        if right >= 0:
            c.same_bits(f"K has {bad} {right}", c.run(p)[0][0, :rows], clean[0, :rows])
    for length in range(1, 260, 7):  # every place of an end in a tile
        k, v = c.random(2, 300, 2, d), c.random(2, 300, 2, d)
        used = torch.full((2,), length, dtype=torch.int32, device="cuda")
        p = Problem(c.random(2, 64, 4, d), k, v, used_k=used)
        clean = c.run(p)[0]
        k[:, length:], v[:, length:] = NAN, NAN
        c.same_bits(f"tail of {length}", c.run(p)[0], clean)
        cu_q, cu_k = cumulative([64, 64]), cumulative([length, length])
        p = Problem(
            c.random(128, 4, d),
            c.random(600, 2, d),
            c.random(600, 2, d),
            cu_q=cu_q,
            cu_k=cu_k,
            max_q=64,
            max_k=length,
        )
        clean = c.run(p)[0]
        p.k[2 * length :], p.v[2 * length :] = NAN, NAN
        c.same_bits(f"packed tail of {length}", c.run(p)[0], clean)
        p.k[length:], p.v[length:] = NAN, NAN
        c.same_bits(f"packed neighbour of {length}", c.run(p)[0][:64], clean[:64])


def check_bits(c: ForwardChecker, d: int) -> None:
    """A sequence's bits do not depend on its batch, its packing, the grid or the run."""
    for mask, (left, right) in MASKS.items():
        lengths = [700, 300, 129, 1]
        q, k, v = (c.random(sum(lengths), h, d) for h in (4, 2, 2))
        cu = cumulative(lengths)
        packed = Problem(q, k, v, left, right, cu_q=cu, cu_k=cu, max_q=700, max_k=700)
        out, lse, _ = c.run(packed)
        for ctas in (1, 3, 132):
            again = c.run(packed, ctas=ctas)
            c.same_bits(f"{mask}, {ctas} CTAs", again[0], out)
            c.same_bits(f"{mask}, {ctas} CTAs, LSE", again[1], lse)
        for i, length in enumerate(lengths):
            part = slice(int(cu[i]), int(cu[i]) + length)
            alone = c.run(Problem(q[None, part], k[None, part], v[None, part], left, right))[0]
            c.same_bits(f"{mask}, sequence of {length} alone", alone[0], out[part])
    p = Problem(c.random(4, 2048, 8, d), c.random(4, 2048, 8, d), c.random(4, 2048, 8, d), -1, 0)
    first = c.run(p)[0]
    for i in range(30):
        c.same_bits(f"run {i}", c.run(p, ctas=(0, 132)[i % 2])[0], first)


CHECKS = (check_masks, check_bits, check_lengths, check_features, check_packed, check_poison)

if __name__ == "__main__":
    sys.exit(run_checks(ForwardChecker, CHECKS))
