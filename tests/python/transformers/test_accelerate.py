"""anyflash.integrations.transformers with models and optimizers that accelerate has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch

from models.hf_models import build, counted, padding, tokens

accelerate = pytest.importorskip("accelerate")
state = pytest.importorskip("accelerate.state")
STEPS = 2
BOUND = 2.0**-8  # a unit in the last place of bfloat16, relative to a loss


@pytest.fixture
def alone() -> Iterator[None]:
    """What an Accelerator says of the process is forgotten after the test."""
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def train(implementation: str) -> list[float]:
    model = deepcopy(build("llama")).train()
    model.set_attn_implementation(implementation)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    keep = padding("right")
    inputs = {"input_ids": tokens(), "attention_mask": keep, "use_cache": False}
    labels = tokens().masked_fill(keep == 0, -100)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_mixed_precision(alone: None) -> None:
    right = train("sdpa")
    assert right[1] < 0.99 * right[0], "it does not learn, and would show nothing"
    with counted() as ran:
        losses = train("anyflash")
    assert ran() == {"forward": 2 * STEPS, "backward": 2 * STEPS}
    print(right, losses)
    assert losses == pytest.approx(right, rel=BOUND)


def test_list_of_attentions_for_sharded_sequences() -> None:
    """accelerate has one of its own, but looks at it only where the configuration is made."""
    make = accelerate.utils.DeepSpeedSequenceParallelConfig
    with pytest.raises(ValueError, match="Invalid sp_attn_implementation: anyflash"):
        make(sp_attn_implementation="anyflash")
    config = make()
    config.sp_attn_implementation = "anyflash"
    assert config.sp_attn_implementation == "anyflash"
