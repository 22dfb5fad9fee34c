"""What LoRA adapters and a packed base will take, counted on a model without memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from outcore.flow.parts import saved_bytes
from outcore.formats.checkpoint import usual_format
from outcore.model import ModelSettings, resolve_source
from outcore.model.facts import model_class_of, model_facts, quantization_of
from outcore.model.weights import meta_skeleton


class LoraSize(NamedTuple):
    """Size of one run's adapters."""

    adapter_params: int
    """Trainable parameters."""
    saved_bytes: int
    """Bytes less that the base takes because it is packed."""


def lora_size(settings: ModelSettings, tokenizer: Any) -> LoraSize:
    """ValueError when no module matches the targets."""
    from outcore.model.adapters import apply_lora

    assert settings.lora is not None
    source = resolve_source(settings, tokenizer)
    skeleton = meta_skeleton(model_class_of(source.config), source.config).to(settings.dtype)
    with torch.device("meta"):
        model = apply_lora(skeleton, settings.lora, settings.seed)
    published = quantization_of(source.config) if source.path is not None else None
    packed = settings.quantize if published is None else usual_format(published)
    saved = 0 if packed is None else saved_bytes(model, packed)
    return LoraSize(model_facts(model).trainable_params, saved)
