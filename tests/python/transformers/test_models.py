"""anyflash.integrations.transformers: models give what they give with their own attention."""

from __future__ import annotations

import pytest
import torch

from models.hf_models import (
    TRAINED,
    build,
    counted,
    difference,
    padding,
    run,
    tokens,
    usual_difference,
)

LAYERS = dict.fromkeys(TRAINED, 2) | {"t5": 6}
PADDINGS = ("none", "left", "right", "holes")


def inputs_of(name: str, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs, and which of its outputs count."""
    mask = padding(kind)
    inputs = {"input_ids": tokens(*mask.shape)}
    if kind != "none":
        inputs["attention_mask"] = mask
    if name != "t5":
        return inputs, mask
    answers = padding("right" if kind == "left" else kind, seqlen=7)
    inputs["decoder_input_ids"] = tokens(*answers.shape)
    if kind != "none":
        inputs["decoder_attention_mask"] = answers
    return inputs, answers


@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("name", TRAINED)
def test_logits_and_gradients_of_all_parameters(name: str, kind: str) -> None:
    inputs, keep = inputs_of(name, kind)
    exact = run(build(name, torch.float64), "exact", keep, inputs)
    with counted() as ran:
        ours = run(build(name, torch.float64), "anyflash", keep, inputs)
    assert ran() == {"forward": LAYERS[name], "backward": LAYERS[name]}
    print(name, kind, difference(ours, exact))
    assert max(difference(ours, exact)) < 1e-6

    model = build(name)
    usual = usual_difference(model, keep, inputs, exact)
    single = difference(run(model, "anyflash", keep, inputs), exact)
    print(usual, single)
    assert single[0] <= 2 * usual[0]
    assert single[2] <= 3 * usual[2]
