"""LoRA through peft: adapters put in place, with the same initial values everywhere, and merged back for export."""

from __future__ import annotations

import math

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from outcore.model.initialise import Gather, seeded_cpu
from outcore.model.names import checkpoint_name
from outcore.model.settings import LoraSettings, nearest
from outcore.model.zero3 import full_shape


def apply_lora(model: nn.Module, settings: LoraSettings, seed: int, gather: Gather | None = None) -> nn.Module:
    """The model with adapters on its linear layers (a PeftModel); every other parameter is frozen.

    A ~ uniform as peft draws it (kaiming, a = sqrt 5) but by (seed, name); B = 0, so training starts at the base
    model. ValueError when no module matches `target_modules`.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    targets: Any = "all-linear" if settings.target_modules == "auto" else list(settings.target_modules)
    if settings.target_modules != "auto":
        leaves = sorted({name.split(".")[-1] for name, m in model.named_modules() if not list(m.children())})
        for target in settings.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
                raise ValueError(
                    f"lora target_modules: the model has no module {target!r}.{nearest(target, leaves)} "
                    f"Its modules are called {', '.join(leaves[:20])}."
                )
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias=settings.bias,  # pyright: ignore[reportArgumentType]
        task_type=TaskType.SEQ_2_SEQ_LM if encoder_decoder else TaskType.CAUSAL_LM,
        init_lora_weights=True,
    )
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    _initialise_adapters(peft_model, seed, gather)
    return peft_model


@torch.no_grad()
def _initialise_adapters(model: nn.Module, seed: int, gather: Gather | None) -> None:
    for full_name, parameter in model.named_parameters():
        if "lora_" not in full_name:
            continue
        shape = full_shape(parameter)
        value = torch.zeros(shape, dtype=torch.float32)
        if "lora_A" in full_name:
            with seeded_cpu(seed, checkpoint_name(full_name)):
                nn.init.kaiming_uniform_(value, a=math.sqrt(5))
        elif "lora_embedding_B" in full_name:
            with seeded_cpu(seed, checkpoint_name(full_name)):
                nn.init.normal_(value)
        with gather([parameter]) if gather is not None and hasattr(parameter, "ds_id") else nullcontext():
            parameter.data.copy_(value)
