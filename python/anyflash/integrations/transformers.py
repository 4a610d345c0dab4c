"""Hugging Face transformers: attn_implementation="anyflash"."""

from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from anyflash.integrations._hf_attention import attention_forward
from anyflash.integrations._hf_masks import attention_mask

__all__ = ["register"]

_NAME = "anyflash"


def register() -> None:
    """Make ``attn_implementation="anyflash"`` known to transformers.

    WORDS

    Raises
    ------
    ImportError
        transformers is not installed, or too old.

    Examples
    --------
    >>> import torch
    """
    modeling = import_module("transformers.modeling_utils")
    masking = import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(_NAME, attention_forward)
    masking.AttentionMaskInterface.register(_NAME, attention_mask)
    _admit(modeling.PreTrainedModel)


def _admit(model_class: Any) -> None:
    """Models take the name as it is.

    transformers 5 holds every name with "flash" in it for a build of flash-attn: it looks for that
    package, or puts in another name that the model lists.
    """
    check = model_class._check_and_adjust_attn_implementation
    if hasattr(check, "anyflash"):
        return

    @wraps(check)
    def checked(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> Any:
        if attn_implementation != _NAME:
            return check(self, attn_implementation, *args, **options)
        _refuse_own_attention(self)
        return _NAME

    checked.anyflash = True  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = checked


def _refuse_own_attention(model: Any) -> None:
    """Where a model's file has attention layers that do not ask for an implementation."""
    names = vars(sys.modules.get(type(model).__module__, torch))
    if "ALL_ATTENTION_FUNCTIONS" in names:
        return
    for name, layer in names.items():
        if not isinstance(layer, type) or not issubclass(layer, torch.nn.Module):
            continue
        if "Attention" in name and layer.__module__ == type(model).__module__:
            raise ValueError(
                f'anyflash.integrations.transformers: attn_implementation="{_NAME}" is given, but '
                f"{type(model).__name__} of this version of transformers has an attention of its "
                f"own, {name}, that takes no other"
            )
