"""LoRA through peft: adapters put in place, with the same initial values everywhere, and merged back for export."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from outcore.common.words import did_you_mean
from outcore.model.adapters.dora import check_dora
from outcore.model.adapters.targets import leaf_of, linear_names, names_of_experts
from outcore.model.adapters.whole import is_called, lies_in, modules_trained_whole, train_whole
from outcore.model.facts import checkpoint_name
from outcore.model.settings import LoraSettings
from outcore.model.weights import Gather, full_shape, seeded_cpu


def apply_lora(model: nn.Module, settings: LoraSettings, seed: int, gather: Gather | None = None) -> nn.Module:
    """The model with adapters on its linear layers (a PeftModel); every other parameter is frozen.

    A ~ uniform as peft draws it (kaiming, a = sqrt 5) but by (seed, name); B = 0, so training starts at the base
    model. ValueError when no module matches `target_modules` or `modules_to_save`. DoRA's lengths are those of the
    weights that the model holds: of one loaded lazily they are set with its weights (`dora_lengths`).
    """
    peft_model = with_adapters(model, settings)
    _initialise_adapters(peft_model, settings, seed, gather)
    return peft_model


def with_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """`apply_lora` without initial values: for counting on the meta device."""
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import PreTrainedModel

    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    whole = modules_trained_whole(model, settings.modules_to_save)
    if settings.target_modules == "auto":
        targets = [name for name in linear_names(model) if not lies_in(name, whole)]
    else:
        targets = list(settings.target_modules)
        if experts := sorted(names_of_experts(model, targets)):
            raise ValueError(
                f"lora target_modules: peft takes {', '.join(experts)} for parts of this model's experts or its "
                "router, which transformers holds as one weight for all experts; adapters on those are not supported. "
                "Adapt the attention: leave target_modules out, or name its layers."
            )
        leaves = sorted({name.split(".")[-1] for name, m in model.named_modules() if not list(m.children())})
        for target in settings.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
                raise ValueError(
                    f"lora target_modules: the model has no module {target!r}.{did_you_mean(target, leaves)} "
                    f"Its modules are called {', '.join(leaves[:20])}."
                )
            if any(lies_in(name, whole) and is_called(name, target) for name, _ in model.named_modules()):
                raise ValueError(
                    f"lora target_modules: {target} is trained whole (lora_modules_to_save), and an adapter on it "
                    "would train it twice. Name it in one of them."
                )
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias=settings.bias,  # pyright: ignore[reportArgumentType]
        task_type=TaskType.SEQ_2_SEQ_LM if encoder_decoder else TaskType.CAUSAL_LM,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
    )
    with warnings.catch_warnings():  # an attribute's old name; ties, which export looks after; what peft sets by itself
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True. and", category=UserWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but", category=UserWarning)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    if encoder_decoder or not isinstance(model, PreTrainedModel):
        _refuse_tied_targets(adapted)
    if settings.use_dora:
        check_dora(adapted)
    train_whole(adapted, whole, settings.modules_to_save)
    return adapted


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layer around each adapted weight, by every name of that weight."""
    return {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def tied_apart(model: nn.Module) -> list[list[str]]:
    """All names of each parameter that several modules share of which not all have the same adapter."""
    layers = adapted_layers(model)
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return [names for names in names_of.values() if len({id(layers.get(name)) for name in names}) > 1]


def _refuse_tied_targets(model: nn.Module) -> None:
    """Refuse what an export could not untie: encoder-decoders, of which some compute otherwise then (T5 scales what
    goes into a tied head), and modules without a configuration that would say so."""
    for names in tied_apart(model):
        tied = next(checkpoint_name(name) for name in names if name.endswith(".base_layer.weight"))
        others = [name for name in map(checkpoint_name, names) if name != tied]
        raise ValueError(
            f"lora target_modules: {tied} shares its weights with {', '.join(others)}, and an adapter on one of them "
            f"could not be merged for export. Leave out {leaf_of(tied.removesuffix('.weight'))!r}."
        )


@torch.no_grad()
def _initialise_adapters(model: nn.Module, settings: LoraSettings, seed: int, gather: Gather | None) -> None:
    for full_name, parameter in model.named_parameters():
        if "lora_" not in full_name or "lora_magnitude_vector" in full_name:
            continue
        shape = full_shape(parameter)
        value = torch.zeros(shape, dtype=torch.float32)
        if "lora_A" in full_name:
            with seeded_cpu(seed, checkpoint_name(full_name)):
                if settings.init == "gaussian":
                    nn.init.normal_(value, std=1 / settings.r)
                else:
                    nn.init.kaiming_uniform_(value, a=math.sqrt(5))
        elif "lora_embedding_B" in full_name:
            with seeded_cpu(seed, checkpoint_name(full_name)):
                nn.init.normal_(value)
        with gather([parameter]) if gather is not None and hasattr(parameter, "ds_id") else nullcontext():
            parameter.data.copy_(value)
