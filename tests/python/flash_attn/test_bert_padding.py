"""anyflash.flash_attn.bert_padding: batches with padding become packed sequences and back."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from anyflash.flash_attn import bert_padding

torch: Any = importlib.import_module("torch")

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
UNUSED = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def hidden(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, *shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 2, 4)])
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    x, mask = hidden(*shape), MASK.to(getattr(torch, dtype))
    results = bert_padding.unpad_input(x, mask)
    assert isinstance(results, tuple)
    tokens, indices, cu_seqlens, longest, seqused = results
    assert torch.equal(tokens, x[MASK.bool()])
    assert (indices.tolist(), indices.dtype) == ([0, 1, 3, 8, 9, 10, 11], torch.int64)
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 3, 7], torch.int32)
    assert (longest, type(longest)) == (4, int)
    assert (seqused.tolist(), seqused.dtype) == ([3, 0, 4], torch.int32)
    back = bert_padding.pad_input(tokens, indices, 3, 4)
    shown = MASK.reshape(3, 4, *[1] * len(shape)).bool()
    assert torch.equal(back, x.masked_fill(~shown, 0))
    (gradient,) = torch.autograd.grad((back * 3).sum(), x)
    assert torch.equal(gradient, torch.where(shown, 3.0, 0.0).expand_as(x).double())


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16"])
def test_unused(dtype: str) -> None:
    """Kept, but not counted in seqused."""
    mask, unused = (x.to(getattr(torch, dtype)) for x in (MASK, UNUSED))
    tokens, indices, cu_seqlens, longest, seqused = bert_padding.unpad_input(
        hidden(2), mask, unused_mask=unused
    )
    assert indices.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 4, 5, 9]
    assert (longest, len(tokens), seqused.tolist()) == (4, 9, [3, 0, 4])


def test_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]])
    x = hidden(2, 3)
    results = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    tokens, indices, cu_seqlens, longest = results
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 2, 3, 7, 8, 9, 10], torch.int32)
    assert (longest, type(longest)) == (4, int)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_index_and_put(dtype: str) -> None:
    x = hidden(2).flatten(0, 1)
    indices = torch.tensor([7, 0, 3], dtype=getattr(torch, dtype))
    rows = bert_padding.index_first_axis(x, indices)
    assert torch.equal(rows, x[indices.long()])
    placed = bert_padding.index_put_first_axis(rows, indices, 12)
    assert torch.equal(placed[indices.long()], rows)
    assert placed.count_nonzero() == rows.count_nonzero()
    assert torch.autograd.gradcheck(bert_padding.index_first_axis, (x, indices))
    given = (rows.detach().requires_grad_(), indices, 12)
    assert torch.autograd.gradcheck(bert_padding.index_put_first_axis, given)
    assert torch.autograd.gradgradcheck(bert_padding.index_put_first_axis, given)


def test_residual() -> None:
    """The rows, and what they are of; gradients add up."""
    x, indices = hidden(2).flatten(0, 1), torch.tensor([7, 0, 3])
    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert torch.equal(residual, x)
    assert residual.data_ptr() == x.data_ptr()
    assert torch.autograd.gradcheck(bert_padding.index_first_axis_residual, (x, indices))


def test_no_rows_on_a_device_that_is_not_waited_for() -> None:
    """Of a meta tensor no number can be read, as of a GPU's without waiting."""
    x, indices = torch.empty(0, 2, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"index_first_axis: indices has 3 numbers; none is allow"):
        bert_padding.index_first_axis(x, indices)
