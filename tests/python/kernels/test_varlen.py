"""Packed sequences and lengths in tensors: invariance, and lengths that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.capi import INVALID_VALUE, Backend, CallError
from backends.tensors import Tensor, empty, place
from cases.auxiliary import int32_tensor
from cases.case import Bias, Blocks, Case, Features, Packed
from cases.features import EVERYTHING
from oracle.attention import DTYPES, Array
from run.forward import bits, call, run

pytestmark = pytest.mark.hopper

# Dropout is left out: its mask depends on the place in the batch.
INVARIANT = {
    "plain": Features(),
    "window": Features(window=(40, 10), sinks="normal"),
    "scores": Features(softcap=4.0, alibi="bh", bias=Bias(values="some_inf")),
    "blocks": Features(blocks=Blocks(), window=(100, None)),
    "everything": replace(EVERYTHING, dropout_p=0.0, seqused_k=()),
}
# One row, several, tiles of rows; the two last have queries of one length.
LENGTHS = Packed((131, 1, 0, 1, 30, 70, 70), (64, 33, 20, 300, 0, 150, 203))
HEADS = ((4, 1), (4, 2), (2, 2))


def results(case: Case, options: dict[str, Any], out: Array, lse: Array) -> tuple[bytes, ...]:
    return bits(out), bits(lse), bits(options["max_logits"].view)


def alone(options: dict[str, Any], index: int, sq: int, sk: int) -> dict[str, Any]:
    """The options of one sequence; of packed ones or of a batch."""
    one = slice(index, index + 1)
    single = {n: x for n, x in options.items() if "seqlen" not in n and n != "seqused_k"}
    for name in ("alibi_slopes", "bias", "block_mask"):
        if name not in options:
            continue
        x = options[name].view
        if name == "bias":
            x = x[one, :, :sq, :sk]
        elif name == "block_mask":
            rows, columns = options["block_size"]
            x = x[one, :, : -(-sq // rows), : -(-sk // columns)]
        else:
            x = x[one]
        single[name] = place(x, axes="bhsd"[: x.ndim])
    if "key_ranges" in options:
        x = options["key_ranges"].view
        if "cu_seqlens_k" in options:
            x = x[None, :, slice(*options["cu_seqlens_k"].view[index : index + 2])]
        else:
            x = x[one, :, :sk]
        single["key_ranges"] = place(x)
    heads = options["max_logits"].shape[1]
    return single | {"max_logits": empty((1, heads), DTYPES["fp32"], axes="bh")}


def run_alone(
    backend: Backend, case: Case, inputs: list[Array], options: dict[str, Any], index: int
) -> tuple[bytes, ...]:
    """`inputs` are one sequence's q, k and v without a batch axis."""
    sq, sk = len(inputs[0]), len(inputs[1])
    single = alone(options, index, sq, sk)
    out = empty((1, sq, case.heads, case.head_dim_v), case.dtype_of_out)
    lse = empty((1, case.heads, sq), DTYPES["fp32"], axes="bhs")
    backend.forward(*(place(x[None]) for x in inputs), out, lse, **single)
    return bits(out.view), bits(lse.view), bits(single["max_logits"].view)


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize(("heads", "heads_k"), HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_bug_1772_packed_has_the_bits_of_alone(
    backend: Backend, name: str, heads: int, heads_k: int, causal: bool
) -> None:
    """flash-attn's two entry points differ in bits; so do vllm 51902's batches."""
    features = replace(INVARIANT[name], packed=LENGTHS, poison=False)
    case = Case("alone", heads=heads, heads_k=heads_k, causal=causal, features=features)
    if backend.is_cpu:
        case = replace(case, dtype="fp32")
    tensors, options = call(backend, case)
    q, k, v, out, lse = (tensor.view for tensor in tensors)
    cu_q, cu_k = options["cu_seqlens_q"].view, options["cu_seqlens_k"].view
    for index in range(case.batch):
        rows_q, rows_k = (slice(*cu[index : index + 2]) for cu in (cu_q, cu_k))
        inputs = [q[rows_q], k[rows_k], v[rows_k]]
        logits = options["max_logits"].view[index]
        packed = bits(out[rows_q]), bits(lse[:, rows_q]), bits(logits)
        if len(inputs[0]) == 0:
            continue
        single = run_alone(backend, case, inputs, options, index)
        for what, a, b in zip(("out", "lse", "max_logits"), packed, single, strict=True):
            assert a == b, f"{what} of sequence {index} is not that of the sequence alone"


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize("sq", [1, 70])
def test_padded_batch_has_the_bits_of_alone(backend: Backend, name: str, sq: int) -> None:
    """Keys behind seqused_k (here NaN) and the neighbours change nothing."""
    used = (64, 200, 0, 1, 131)
    features = replace(INVARIANT[name], seqused_k=used)
    case = Case("padded", "fp16", len(used), sq, 200, 4, 1, causal=True, features=features)
    # Poison only behind the keys in use: what is unseen for another reason comes along.
    tensors, options = call(backend, case)
    q, k, v, out, lse = (tensor.view for tensor in tensors)
    for index, count in enumerate(used):
        inputs = [q[index], k[index, :count], v[index, :count]]
        logits = options["max_logits"].view[index]
        padded = bits(out[index]), bits(lse[index]), bits(logits)
        single = run_alone(backend, case, inputs, options, index)
        for what, a, b in zip(("out", "lse", "max_logits"), padded, single, strict=True):
            assert a == b, f"{what} of sequence {index} is not that of the sequence alone"


@pytest.mark.parametrize("spare", [1, 64, 1000])
def test_max_seqlen_does_not_change_bits(backend: Backend, spare: int) -> None:
    for lengths in (LENGTHS, Packed((1, 1, 0), (30, 200, 5))):
        exact = Case("spare", heads=4, heads_k=1, causal=True, features=Features(packed=lengths))
        tight = run(backend, exact)
        larger = replace(exact, features=Features(packed=lengths._replace(spare=spare)))
        loose = run(backend, larger)
        assert bits(loose.out.view) == bits(tight.out.view)
        assert bits(loose.lse.view) == bits(tight.lse.view)


def test_order_of_the_batch_does_not_change_bits(backend: Backend) -> None:
    case = Case("order", batch=6, sq=70, sk=150, heads=4, heads_k=2, causal=True)
    order = np.random.default_rng(0).permutation(case.batch)
    q, k, v, out, lse = case.tensors()
    backend.forward(q, k, v, out, lse, causal=True)
    inputs = [place(x.view[order]) for x in (q, k, v)]
    _, _, _, other_out, other_lse = case.tensors()
    backend.forward(*inputs, other_out, other_lse, causal=True)
    assert bits(other_out.view) == bits(out.view[order])
    assert bits(other_lse.view) == bits(lse.view[order])


INT_MAX, INT_MIN = (1 << 31) - 1, -(1 << 31)
# Lengths for 10 queries, at most 6 a sequence, and 12 keys, at most 8, and what is said about them.
WRONG = {
    "decreasing": ({"cu_seqlens_q": (0, 6, 4, 10)}, "cu_seqlens_q.* is 4, less than .* 6"),
    "decreasing-k": ({"cu_seqlens_k": (0, 8, 5, 12)}, "cu_seqlens_k.* is 5, less than .* 8"),
    "begins-late": ({"cu_seqlens_q": (1, 4, 6, 10)}, r"cu_seqlens_q\[0\] is 1.* 0"),
    "negative": ({"cu_seqlens_k": (-5, 4, 8, 12)}, r"cu_seqlens_k\[0\] is -5.* 0"),
    "ends-early": ({"cu_seqlens_q": (0, 3, 6, 9)}, "cu_seqlens_q.* is 9.* 10"),
    "ends-late": ({"cu_seqlens_k": (0, 4, 8, 13)}, "cu_seqlens_k.* is 13.* 12"),
    "too-long": ({"cu_seqlens_q": (0, 7, 8, 10)}, "length 7.*max_seqlen_q is 6"),
    "too-long-k": ({"cu_seqlens_k": (0, 1, 2, 12)}, "length 10.*max_seqlen_k is 8"),
    "huge": ({"cu_seqlens_k": (0, 4, INT_MAX, 12)}, "cu_seqlens_k"),
    "tiny": ({"cu_seqlens_q": (0, INT_MIN, INT_MAX, 10)}, "cu_seqlens_q"),
    "all-huge": ({"cu_seqlens_q": (INT_MAX,) * 4, "cu_seqlens_k": (INT_MAX,) * 4}, "cu_seqlens_q"),
    "used-negative": ({"seqused_k": (3, -1, 2)}, r"seqused_k\[1\] is -1"),
    "used-too-many": ({"seqused_k": (3, 4, 5)}, r"seqused_k\[2\] is 5.* 4"),
    "used-huge": ({"seqused_k": (INT_MAX, INT_MIN, 1)}, r"seqused_k\[0\]"),
}


def wrong_call(lengths: dict[str, tuple[int, ...]], packed: bool) -> tuple[Case, dict[str, Any]]:
    features = Features(packed=Packed((4, 3, 3), (4, 4, 4)) if packed else None)
    case = Case("wrong", batch=3, sq=4, sk=4, heads=2, heads_k=1, causal=True, features=features)
    limits = {"max_seqlen_q": 6, "max_seqlen_k": 8} if packed else {}
    return case, limits | {name: int32_tensor(x) for name, x in lengths.items()}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lengths_are_refused(backend: Backend, name: str) -> None:
    """Always on the CPU, where asked to on a GPU; nothing has been written then."""
    lengths, message = WRONG[name]
    for packed in (True, False):
        if not packed and not name.startswith("used"):
            continue
        case, changes = wrong_call(lengths, packed)
        options = case.options() | changes
        tensors = case.tensors()
        with pytest.raises(CallError, match=message) as error:
            backend.forward(*tensors, **options, validate=not backend.is_cpu)
        assert error.value.status == INVALID_VALUE
        for tensor in (tensors.out, tensors.lse, options["max_logits"]):
            assert set(bits(tensor.storage)) == {0xFF}


def filled(tensor: Tensor) -> Tensor:
    tensor.view[...] = 7
    return tensor


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lengths_reach_nothing_outside(gpu: Backend, name: str) -> None:
    """Unchecked on a GPU they give wrong numbers; around the tensors everything is NaN."""
    for packed in (True, False):
        if not packed and not name.startswith("used"):
            continue
        case, changes = wrong_call(WRONG[name][0], packed)
        options = case.options() | changes
        tensors = case.tensors()
        results = {"out": filled(tensors.out), "lse": filled(tensors.lse)}
        gpu.forward(*tensors, **options)
        for what, tensor in (*results.items(), ("max_logits", options["max_logits"])):
            tensor.check_canaries(what)
        assert np.isfinite(tensors.out.view).all(), "something outside k or v was read"
        assert not np.isnan(tensors.lse.view).any()


def test_right_lengths_pass_the_validation(backend: Backend) -> None:
    case = Case(
        "right", causal=True, features=Features(packed=LENGTHS, seqused_k=(9, 0, 20, 300, 0, 1, 2))
    )
    checked, _ = call(backend, case, validate=True)
    assert bits(checked.out.view) == bits(run(backend, case).out.view)
