"""The yardstick of the backward: against differences of the forward's, and against autograd."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cases.case import Bias, Blocks, Case, Features, Packed
from cases.features import EVERYTHING, EVERYTHING_PACKED
from cases.gradient_case import GradientCase
from oracle.attention import truth
from oracle.gradients import (
    NAMES,
    Given,
    check_gradients,
    gradient_bounds,
    naive_gradients,
    true_gradients,
)
from oracle.problem import DTYPES, Array, Batch, Problem, batches

SMALL = {"dropout_p": 0.3, "window": (9, 5), "softcap": 1.5}
FEATURES = {
    "plain": Features(),
    "softcap": Features(softcap=0.7),
    "keep": Features(bias=Bias("bool", "hk"), alibi="h"),
    "alibi": Features(alibi="1h", window=(2, 1)),
    "sinks": Features(sinks="normal", window=(None, -1)),
    "no-sink": Features(sinks="none", dropout_p=0.2),
    "blocks": Features(blocks=Blocks(), bias=Bias(axes="k")),
    "seqused": Features(seqused_k=(4, 0), bias=Bias(axes="bq"), sinks="normal"),
    **{f"bias-{axes}": Features(bias=Bias(axes=axes)) for axes in ("bhqk", "hq", "bk", "h", "")},
    "packed-bias": Features(packed=Packed((3, 5), (6, 2), 2), bias=Bias(axes="hk"), alibi="h"),
    "dense": replace(EVERYTHING, seqused_k=(11, 0), **SMALL),
    "packed": replace(
        EVERYTHING_PACKED, packed=Packed((7, 5, 0), (12, 3, 9), 2), seqused_k=(11, 3, 9), **SMALL
    ),
}


def case_of(name: str, dtype: str = "fp64", **changes: Any) -> GradientCase:
    sizes = {"batch": 2, "sq": 7, "sk": 12, "heads": 4, "heads_k": 2, "d": 5, "dv": 3}
    case = Case(f"gradients-{name}", dtype, **sizes, causal=name == "sinks", scale=0.7)
    return GradientCase(replace(case, features=FEATURES[name]), **changes)


def given_of(case: GradientCase) -> Given:
    """With the true out and lse, that are not rounded."""
    return replace(case.given(case.inputs()), out=None, lse=None)


FIELDS = dict(zip(NAMES, ("q", "k", "v", "bias", "sinks", "alibi_slopes"), strict=True))


def loss(given: Given, problem: Problem) -> Any:
    """What dout and dlse are the gradients of."""
    result = truth(problem)
    dout, out = np.nan_to_num(given.dout), result.out
    total = (dout * out).sum()
    if given.dlse is not None:
        seen = np.isfinite(result.lse)
        total = total + (given.dlse[seen] * result.lse[seen]).sum()
    return total


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_the_slopes_of_the_forward(name: str) -> None:
    """Along random directions, one tensor at a time."""
    random = np.random.default_rng(0)
    given = given_of(case_of(name))
    gradients = true_gradients(given)
    for gradient, tensor in FIELDS.items():
        if gradient not in gradients:
            continue
        x = getattr(given.problem, tensor)
        for _ in range(3):
            direction = np.where(np.isfinite(x), random.standard_normal(x.shape), 0)
            step = 1e-5
            ends = (x + step * direction, x - step * direction)
            up, down = (loss(given, replace(given.problem, **{tensor: end})) for end in ends)
            expected = float((up - down) / (2 * step))
            actual = float((gradients[gradient] * direction).sum())
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-8, err_msg=gradient)


def torch_loss(torch: ModuleType, given: Given, batch: Batch, leaves: dict[str, Any]) -> Any:
    """Of some sequences, in PyTorch's operations."""
    problem, sequences = given.problem, torch.from_numpy(batch.sequences)

    def rows(x: Any, index: Array, group: int = 1) -> Any:
        x = x.reshape(-1, *x.shape[-2:])[torch.from_numpy(index)].transpose(1, 2)
        return x.repeat_interleave(group, 1)

    def part(x: Any) -> Any:
        x = x if x.shape[0] == 1 else x[sequences]
        return x[:, :, : batch.rows_q.shape[1], : batch.rows_k.shape[1]]

    q = rows(leaves["q"], batch.rows_q)
    k, v = (rows(leaves[name], batch.rows_k, problem.group) for name in "kv")
    hidden = torch.from_numpy(np.broadcast_to(batch.hidden, (*q.shape[:3], k.shape[2])).copy())
    scores = q @ k.mT * problem.scale
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if "bias" in leaves:
        bias = part(leaves["bias"])
        scores = scores + torch.where(bias.isinf(), 0, bias)
    if "alibi_slopes" in leaves:
        slopes = part(torch.atleast_2d(leaves["alibi_slopes"])[..., None, None])
        scores = scores - slopes * torch.from_numpy(batch.distances)
    columns = [torch.where(hidden, -np.inf, scores)]
    if "sinks" in leaves:
        columns.append(leaves["sinks"][:, None, None].expand(*scores.shape[:3], 1))
    everything = torch.cat(columns, -1)
    keyless = torch.isinf(everything).all(-1, keepdim=True)
    everything = torch.where(keyless, 0, everything)
    p = torch.where(keyless | hidden, 0, everything.softmax(-1)[..., : scores.shape[3]])
    if problem.dropout_p > 0:
        p = p * part(torch.from_numpy(problem.dropout_mask())) / (1 - dropped_part(problem))
    total = (rows(torch.from_numpy(given.dout), batch.rows_q) * (p @ v)).sum()
    if given.dlse is not None:
        dlse = torch.from_numpy(given.dlse.astype(np.float64))
        dlse = dlse if problem.packed else dlse.transpose(0, 1).reshape(problem.shape[1], -1)
        dlse = dlse[:, torch.from_numpy(batch.rows_q)].transpose(0, 1)
        lse = torch.logsumexp(everything, -1)
        total = total + torch.where(keyless[..., 0], 0, dlse * lse).sum()
    return total


def dropped_part(problem: Problem) -> float:
    return round(problem.dropout_p * 65536) / 65536


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_autograds(torch: ModuleType, name: str) -> None:
    case = case_of(name)
    given = given_of(replace(case, forward=case.forward.without_poison()))
    inputs = {tensor: getattr(given.problem, tensor) for tensor in FIELDS.values()}
    leaves = {
        tensor: torch.from_numpy(np.array(x)).requires_grad_()
        for tensor, x in inputs.items()
        if x is not None and x.dtype == np.float64
    }
    losses = [torch_loss(torch, given, batch, leaves) for batch in batches(given.problem)]
    sum(losses).backward()
    gradients = true_gradients(given)
    assert {FIELDS[gradient] for gradient in gradients} == leaves.keys()
    for gradient, actual in gradients.items():
        expected = leaves[FIELDS[gradient]].grad
        expected = np.zeros(actual.shape) if expected is None else expected.numpy()
        np.testing.assert_allclose(
            actual.astype(float), expected, rtol=1e-10, atol=1e-12, err_msg=gradient
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_naive_passes(dtype: str, name: str) -> None:
    given = given_of(case_of(name, dtype))
    check_gradients(naive_gradients(given), gradient_bounds(given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_gradients_do_not_pass(dtype: str) -> None:
    """One wrong number is enough."""
    case = Case("wrong", dtype, 2, 70, 40, 4, 2, causal=True)
    features = Features(bias=Bias(axes="hk"), sinks="normal", alibi="h")
    case = GradientCase(replace(case, features=features, scale=0.3))
    given = given_of(case)
    bounds, right = gradient_bounds(given), naive_gradients(given)
    check_gradients(right, bounds)
    for name, gradient in right.items():
        index = tuple(n - 1 for n in gradient.shape)
        one = gradient.dtype.type(np.abs(gradient.astype(float)).mean())
        for wrong in (gradient[index] + one, np.nan, np.inf, -gradient[index] - one):
            changed = gradient.copy()
            changed[index] = wrong
            with pytest.raises(AssertionError, match=name):
                check_gradients(right | {name: changed}, bounds)
        with pytest.raises(AssertionError, match=name):
            check_gradients(right | {name: gradient * gradient.dtype.type(1.1)}, bounds)


def test_what_nothing_flows_into_is_zero() -> None:
    """Not only small: gradients of unseen keys and of queries that see none."""
    case = Case("zero", "bf16", 2, 70, 40, causal=True, features=Features())
    bounds = GradientCase(case).expected().bounds
    right = {name: bound.truth.astype(bound.dtype) for name, bound in bounds.items()}
    check_gradients(right, bounds)
    right["dq"][1, 3] = 1e-6
    with pytest.raises(AssertionError, match=r"dq: .* must be 0"):
        check_gradients(right, bounds)
