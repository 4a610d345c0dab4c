"""Checks a library built from backward.cu on a GPU against float64.

check_backward.py LIBRARY HEAD_DIM [float16] [quick]
"""

from __future__ import annotations

import itertools
import math
import sys

import torch
from backward_library import BackwardLibrary, Gradients, gradients_like, reference_gradients
from checker import MASKS, Checker, cumulative, run_checks, same_bits
from library import Problem, visible


class BackwardChecker(Checker):
    failure_word = "WRONG"
    most_printed = 10

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.library = BackwardLibrary(path)

    def run(self, p: Problem, g: Gradients, deterministic: bool = False) -> None:
        self.library.call(p, g, deterministic)()
        torch.cuda.synchronize()

    def compare(self, what: str, p: Problem, float_grad: bool = False) -> None:
        dout = self.random(*p.q.shape)
        for deterministic in (False, True):
            g = gradients_like(p, dout, torch.float32 if float_grad else None)
            self.run(p, g, deterministic)
            self.verify(f"{what}{', deterministic' if deterministic else ''}", p, g)

    def verify(self, what: str, p: Problem, g: Gradients) -> None:
        expected = reference_gradients(p, g)
        limit = 1.5e-2 if self.dtype == torch.bfloat16 else 2e-3
        for name, result, exact in zip(
            ("dq", "dk", "dv"), (g.dq, g.dk, g.dv), expected, strict=True
        ):
            actual, wanted = result, exact
            if p.cu_q is not None:  # rows of no sequence are not written
                end = int((p.cu_q if name == "dq" else p.cu_k)[-1])
                untouched = bool(result[end:].isnan().all())
                self.expect(untouched, f"{what}: {name} is written beyond the last sequence")
                actual, wanted = result[:end], exact[:end]
            error = (actual.double() - wanted).nan_to_num(1e3)
            norm = float(wanted.norm())
            relative = float(error.norm()) / norm if norm > 0 else float(error.norm())
            self.worst = max(self.worst, relative)
            self.expect(relative < limit, f"{what}: {name}: relative error {relative:.2e}")


def check_masks(c: BackwardChecker, d: int) -> None:
    for (mask, (left, right)), (sq, sk) in itertools.product(
        MASKS.items(), ((512, 512), (700, 700), (300, 1000), (1000, 300))
    ):
        for heads, heads_k in ((4, 4), (6, 2), (8, 1)):
            p = Problem(
                c.random(2, sq, heads, d),
                c.random(2, sk, heads_k, d),
                c.random(2, sk, heads_k, d),
                left,
                right,
            )
            c.compare(f"{mask} {sq} x {sk}, {heads}/{heads_k} heads", p)


def check_lengths(c: BackwardChecker, d: int) -> None:
    lengths = (1, 2, 63, 64, 65, 127, 128, 129, 193, 300, 513)
    for i, (sq, sk) in enumerate(itertools.product(lengths, lengths)):
        mask = list(MASKS)[i % len(MASKS)]
        left, right = MASKS[mask]
        p = Problem(
            c.random(1, sq, 2, d), c.random(1, sk, 1, d), c.random(1, sk, 1, d), left, right
        )
        c.compare(f"{sq} x {sk} {mask}", p, float_grad=i % 2 == 0)


def check_packed(c: BackwardChecker, d: int) -> None:
    tables = (
        ([0, 200], [0, 300]),
        ([200, 0], [300, 0]),
        ([100, 27, 173, 797, 129], [100, 27, 173, 797, 129]),
        ([100, 27, 173, 64], [300, 0, 200, 1000]),
        ([1] * 20, list(range(1, 21))),
        ([500, 1, 500], [100, 700, 513]),
    )
    for (lq, lk), (mask, (left, right)) in itertools.product(tables, MASKS.items()):
        tq, tk = sum(lq) + 37, sum(lk) + 53  # rows that belong to no sequence
        q, k, v = c.random(tq, 4, d), c.random(tk, 2, d), c.random(tk, 2, d)
        q[sum(lq) :] = k[sum(lk) :] = v[sum(lk) :] = float("nan")
        cu_q, cu_k = cumulative(lq), cumulative(lk)
        p = Problem(q, k, v, left, right, cu_q=cu_q, cu_k=cu_k, max_q=max(lq), max_k=max(lk))
        c.compare(f"packed {lq} {lk} {mask}", p)
    used = torch.tensor([0, 1, 700, 333], dtype=torch.int32, device="cuda")
    for left, right in MASKS.values():
        k, v = c.random(4, 700, 2, d), c.random(4, 700, 2, d)
        for b, n in enumerate(used.tolist()):
            k[b, n:] = v[b, n:] = float("nan")
        p = Problem(c.random(4, 300, 4, d), k, v, left, right, used_k=used)
        c.compare(f"seqused {left} {right}", p)


def check_poison(c: BackwardChecker, d: int) -> None:
    """NaN and infinity reach what sees them, and nothing else."""
    bad_values = (float("nan"), float("inf"))
    for bad, (left, right), name in itertools.product(
        bad_values, ((-1, 0), (70, 30), (100, -1)), ("q", "k", "v", "dout")
    ):
        p = Problem(c.random(2, 300, 4, d), c.random(2, 389, 2, d), c.random(2, 389, 2, d),
                    left, right)  # fmt: skip
        dout = c.random(2, 300, 4, d)
        deterministic = left != 70
        target = dout if name == "dout" else getattr(p, name)
        target[1, 150, 1, 3] = bad
        target[0, 299, 0, :] = bad
        g = gradients_like(p, dout)
        c.run(p, g, deterministic)
        wanted = reference_gradients(p, g)
        for what, actual, exact in zip(("dq", "dk", "dv"), (g.dq, g.dk, g.dv), wanted, strict=True):
            rows_bad = ~exact.isfinite().all(-1)
            if what == "dq" and name == "k":  # a score of -inf gives 0, times infinity
                seen = visible(300, 389, left, right, exact.device)
                rows_bad[0] |= seen[:, 299, None]
                rows_bad[1] |= seen[:, 150, None]
            rows_nan = actual.isnan().any(-1)
            spread = bool((rows_nan & ~rows_bad).any())
            c.expect(not spread, f"{bad} in {name}, {left} {right}: {what} has NaN elsewhere")
            if math.isnan(bad) and name not in ("v", "k"):
                missing = bool((rows_bad & ~(~actual.isfinite()).any(-1)).any())
                c.expect(not missing, f"{bad} in {name}, {left} {right}: {what} lacks NaN")


def check_bits(c: BackwardChecker, d: int) -> None:
    """dK and dV, and dQ if deterministic, do not depend on the run, the batch or the packing."""
    for mask, (left, right) in MASKS.items():
        lengths = [700, 300, 129, 1]
        q, k, v = (c.random(sum(lengths), h, d) for h in (4, 2, 2))
        cu = cumulative(lengths)
        p = Problem(q, k, v, left, right, cu_q=cu, cu_k=cu, max_q=700, max_k=700)
        dout = c.random(*q.shape)
        g = gradients_like(p, dout)
        c.run(p, g, deterministic=True)
        for i, length in enumerate(lengths):
            part = slice(int(cu[i]), int(cu[i]) + length)
            alone = Problem(q[None, part], k[None, part], v[None, part], left, right)
            h = gradients_like(alone, dout[None, part])
            h.out, h.lse = g.out[None, part], g.lse[None, :, part]
            c.run(alone, h, deterministic=True)
            for what in ("dq", "dk", "dv"):
                same = same_bits(getattr(h, what)[0], getattr(g, what)[part])
                c.expect(same, f"{mask}, sequence of {length} alone: {what} has other bits")
    p = Problem(c.random(4, 2048, 8, d), c.random(4, 2048, 8, d), c.random(4, 2048, 8, d), -1, 0)
    g = gradients_like(p, c.random(*p.q.shape))
    c.run(p, g, deterministic=True)
    first = [x.clone() for x in (g.dk, g.dv, g.dq)]
    for i in range(60):
        c.run(p, g, deterministic=i % 2 == 0)
        results = (g.dk, g.dv, g.dq)[: 3 - i % 2]
        same = all(bool((a == b).all()) for a, b in zip(results, first, strict=False))
        c.expect(same, f"run {i}: other bits")


CHECKS = (check_masks, check_bits, check_lengths, check_packed, check_poison)

if __name__ == "__main__":
    sys.exit(run_checks(BackwardChecker, CHECKS))
