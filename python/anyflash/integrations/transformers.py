"""Hugging Face transformers: ``attn_implementation="anyflash"``."""

from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from anyflash.integrations._hf_attention import attention_forward
from anyflash.integrations._hf_masks import attention_mask
from anyflash.integrations._hf_paged import admit_pages

__all__ = ["register"]

_NAME = "anyflash"
_NAMES = (_NAME, f"paged|{_NAME}")
_OLDEST = (4, 57)


def register() -> None:
    """Make ``attn_implementation="anyflash"`` known to transformers.

    Afterwards any model whose attention goes through transformers' ``AttentionInterface`` takes the
    name: ``from_pretrained(..., attn_implementation="anyflash")``, or
    ``model.set_attn_implementation("anyflash")`` at any time. Gradients, ``torch.compile``,
    ``torch.export``, activation checkpointing and ``generate`` work as with "sdpa". Calling it
    again changes nothing.

    Padding is left out of the work. Grouped heads, sliding windows, softcap, attention sinks
    (GPT-OSS), dropout, dynamic and static caches are taken. So are an additive position bias with
    its gradient (T5), and sequences packed by ``position_ids`` or by ``cu_seq_lens_q`` and its kin.
    A mask of all scores is made only where a model hides more than its positions and padding tell
    (prefixes, blocks, chunks). Compiled models need one, too, if they are given neither
    ``attention_mask`` nor a cache: ``position_ids`` may then hold packed sequences. Give it ones.

    CPU: float64, float32, float16, bfloat16. CUDA: float16, bfloat16; float32 states of a model in
    half precision are cast to it.

    Padded queries give numbers without a meaning, not always those of "eager". Weights are never
    made: ``output_attentions=True`` gives None, as with "sdpa".

    Some models' attention does not go through the interface: in transformers 4 that of BERT, before
    5.15 that of T5. To make such a model with the name raises ValueError, and
    ``set_attn_implementation`` warns and changes nothing. A call raises NotImplementedError for
    ``head_mask``.

    Continuous batching (``generate_batch``) works from transformers 5.23 on, also as
    "paged|anyflash". Layers that see the whole sequence read the pages where they are if
    ``page_size`` is a power of two; for the others transformers gathers the keys.

    Raises
    ------
    ImportError
        transformers is missing or older than 4.57.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from anyflash.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="anyflash")
    >>> ids = torch.tensor([[0, 0, 5, 7], [3, 1, 4, 1]])
    >>> padding = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> model(ids, attention_mask=padding).logits.shape
    torch.Size([2, 4, 32])
    >>> model.generate(
    ...     ids, attention_mask=padding, max_new_tokens=3, min_new_tokens=3, do_sample=False
    ... ).shape
    torch.Size([2, 7])
    """
    found = import_module("transformers").__version__
    if tuple(map(int, found.split(".")[:2])) < _OLDEST:
        raise ImportError(
            "anyflash.integrations.transformers: expected transformers "
            f"{'.'.join(map(str, _OLDEST))} or newer, found {found}"
        )
    modeling = import_module("transformers.modeling_utils")
    masking = import_module("transformers.masking_utils")
    _admit(modeling.PreTrainedModel)
    _admit_chunks(masking)
    admit_pages(_NAME)
    modeling.AttentionInterface.register(_NAME, attention_forward)
    masking.AttentionMaskInterface.register(_NAME, attention_mask)


def _admit(model_class: Any) -> None:
    """Models take the name as it is.

    transformers 5 holds every name with "flash" in it for a build of flash-attn: it looks for that
    package, or puts in another name that the model lists. From 5.23 on one name stands for pages,
    too.
    """
    check = model_class._check_and_adjust_attn_implementation
    if hasattr(check, "anyflash"):
        return

    @wraps(check)
    def checked(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> Any:
        if attn_implementation not in _NAMES:
            return check(self, attn_implementation, *args, **options)
        _refuse_own_attention(self)
        return _NAME

    checked.anyflash = True  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = checked


def _admit_chunks(masking: Any) -> None:
    """Chunks of Llama 4: transformers 5 refuses them where "flash" is in the name."""
    asks = getattr(masking, "is_flash_attention_requested", None)
    if asks is None or hasattr(asks, "anyflash"):
        return

    @wraps(asks)
    def asks_for_flash_attn(config: Any = None, *args: Any, **options: Any) -> bool:
        if getattr(config, "_attn_implementation", None) in _NAMES:
            return False
        return bool(asks(config, *args, **options))

    asks_for_flash_attn.anyflash = True  # type: ignore[attr-defined]
    masking.is_flash_attention_requested = asks_for_flash_attn


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
