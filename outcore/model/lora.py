"""LoRA through peft: adapters put in place, with the same initial values everywhere, and merged back for export."""

from __future__ import annotations

import math
import warnings
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
    peft_model = with_adapters(model, settings)
    _initialise_adapters(peft_model, seed, gather)
    return peft_model


def with_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """`apply_lora` without initial values: for counting on the meta device."""
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
    with warnings.catch_warnings():  # an attribute's old name; ties, which export looks after; what peft sets by itself
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True. and", category=UserWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but", category=UserWarning)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    if encoder_decoder:
        _refuse_tied_targets(adapted)
    return adapted


def _refuse_tied_targets(model: nn.Module) -> None:
    """A merged export of a decoder-only model unties its head. Of encoder-decoder models some compute otherwise then:
    T5 scales what goes into a tied head."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for names in names_of.values():
        tied = [checkpoint_name(name) for name in names if name.endswith(".base_layer.weight")]
        if tied and len(names) > 1:
            others = [checkpoint_name(name) for name in names if checkpoint_name(name) not in tied]
            raise ValueError(
                f"lora target_modules: {tied[0]} shares its weights with {', '.join(others) or tied[1]}, and an "
                "adapter on one of them could not be merged for export. Leave out "
                f"{tied[0].removesuffix('.weight').split('.')[-1]!r}."
            )


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


def is_lora(model: nn.Module) -> bool:
    """True for a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")
