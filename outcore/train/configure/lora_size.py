"""How many parameters LoRA adapters will have, counted on a model without memory."""

from __future__ import annotations

from typing import Any

import torch

from outcore.model.facts import model_class_of, model_facts
from outcore.model.settings import ModelSettings
from outcore.model.source import resolve_source
from outcore.model.weights.initialise import meta_skeleton


def adapter_params(settings: ModelSettings, tokenizer: Any) -> int:
    """Trainable parameters of the run's adapters. ValueError when no module matches the targets."""
    from outcore.model.lora import apply_lora

    assert settings.lora is not None
    source = resolve_source(settings, tokenizer)
    skeleton = meta_skeleton(model_class_of(source.config), source.config)
    with torch.device("meta"):
        return model_facts(apply_lora(skeleton, settings.lora, settings.seed)).trainable_params
