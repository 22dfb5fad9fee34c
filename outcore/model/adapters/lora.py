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
from outcore.model.adapters.experts import add_to_products, stacked_names
from outcore.model.adapters.targets import leaf_of, linear_names, names_of_experts
from outcore.model.adapters.whole import is_called, lies_in, modules_trained_whole, train_whole
from outcore.model.facts import checkpoint_name
from outcore.model.settings import LoraSettings
from outcore.model.weights import Gather, full_shape, seeded_cpu

ALL_LINEAR = ("auto", "all-linear")
EXPERTS = "experts"
"""Target that stands for every weight of all experts."""


def apply_lora(model: nn.Module, settings: LoraSettings, seed: int, gather: Gather | None = None) -> nn.Module:
    """The model with adapters on its linear layers or experts (a PeftModel); every other parameter is frozen.

    A ~ uniform as peft draws it (kaiming, a = sqrt 5) but by (seed, name); B = 0, so training starts at the base
    model. ValueError when no module matches `target_modules` or `modules_to_save`. DoRA's lengths are those of the
    weights that the model holds: of one loaded lazily they are set with its weights (`dora_lengths`).
    """
    peft_model: Any = with_adapters(model, settings)
    if gather is not None and peft_model.peft_config["default"].target_parameters:
        raise ValueError(
            "lora target_modules: DeepSpeed's ZeRO-3 takes the weights of adapters on experts away before the experts "
            "run. Use --engine stream, or --zero_stage zero2."
        )
    _initialise_adapters(peft_model, settings, seed, gather)
    return peft_model


def with_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """`apply_lora` without initial values: for counting on the meta device."""
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import PreTrainedModel

    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    whole = modules_trained_whole(model, settings.modules_to_save)
    parameters: list[str] = []
    if settings.target_modules == "auto":
        targets = [name for name in linear_names(model) if not lies_in(name, whole)]
    else:
        parameters, targets = _parameters_among(model, settings)
        if experts := sorted(names_of_experts(model, targets)):
            raise ValueError(
                f"lora target_modules: peft takes {', '.join(experts)} for parts of this model's experts or its "
                "router, which transformers holds as one weight for all experts. Name that weight, or write experts "
                "for all of them; leave target_modules out to adapt the attention."
            )
        leaves = sorted({name.split(".")[-1] for name, m in model.named_modules() if not list(m.children())})
        for target in targets:
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
        target_parameters=parameters or None,
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
    add_to_products(adapted)
    return adapted


def _parameters_among(model: nn.Module, settings: LoraSettings) -> tuple[list[str], list[str]]:
    """(what peft is told of targets that are weights of all experts, the other targets)."""
    stacked = sorted({".".join(name.split(".")[-2:]) for name in stacked_names(model)})
    of = {
        target: [n for n in stacked if target == EXPERTS or is_called(n, target)] for target in settings.target_modules
    }
    if EXPERTS in of and not stacked:
        raise ValueError("lora target_modules: experts, but the model has no weight that holds all experts of a layer.")
    parameters = list(dict.fromkeys(name for names in of.values() for name in names))
    if parameters and (settings.dropout or settings.use_dora):
        what = "dropout" if settings.dropout else "use_dora"
        raise ValueError(
            f"lora target_modules: {', '.join(parameters)} holds all experts of a layer, and peft has no {what} on "
            f"such a weight. Leave lora {what} out."
        )
    others = [target for target, names in of.items() if not names]
    if linear := [target for target in others if target in ALL_LINEAR]:
        others = [*(name for name in others if name not in linear), *linear_names(model)]
    return parameters, others


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layer around each adapted weight, by every name of that weight."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "lora_A") and (base := getattr(module, "base_layer", None)) is not None:
            while hasattr(base, "base_layer"):  # of one module, several parameters may be adapted
                name, base = f"{name}.base_layer", base.base_layer
            found[f"{name}.base_layer.{getattr(module, 'parameter_name', 'weight')}"] = module
    return found


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
