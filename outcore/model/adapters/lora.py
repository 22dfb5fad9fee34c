"""LoRA through peft: adapters put in place, with the same initial values everywhere, and merged back for export.

DoRA: a trained length for each row of an adapted weight, whose direction the adapter turns (peft's `use_dora`).

Modules that are trained whole beside adapters (peft's `modules_to_save`): an embedding, a head, norms.

peft trains a copy of each beside the frozen original, which nothing uses then. Here the module itself is trained: the
same numbers, without a second home and a second way over the link. An exported adapter holds them where peft looks."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from outcore.common.words import did_you_mean
from outcore.model.adapters.experts import add_to_products, stacked_names
from outcore.model.adapters.targets import leaf_of, linear_names, names_of_experts
from outcore.model.facts import checkpoint_name
from outcore.model.settings import LoraSettings
from outcore.model.weights import Gather, full_shape, seeded_cpu


def is_called(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def lies_in(name: str, whole: dict[str, nn.Module]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in whole)


def modules_trained_whole(model: nn.Module, wanted: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that are trained whole, by path. ValueError for a name that the model lacks, and for a tied weight of
    which not every module is named: peft trains a copy of one then, which is tied no more."""
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = sorted({path.rpartition(".")[2] for path, module in modules.items() if module._parameters})
    found: dict[str, nn.Module] = {}
    for name in wanted:
        named = {path: module for path, module in modules.items() if path and is_called(path, name)}
        if not any(next(module.parameters(), None) is not None for module in named.values()):
            raise ValueError(
                f"lora modules_to_save: the model has no module {name!r} with weights.{did_you_mean(name, leaves)} "
                f"Its modules are called {', '.join(leaves[:20])}."
            )
        found |= named
    inside = {id(p) for module in found.values() for p in module.parameters()}
    outside = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in inside]
    for name, _ in outside:
        if not lies_in(name, found):
            raise ValueError(
                f"lora modules_to_save: {name} shares its weights with {', '.join(wanted)}, and training a copy of one "
                f"would untie them. Add {name.split('.')[-2]} as well: both stay tied and are trained."
            )
    return found


def train_whole(adapted: Any, whole: dict[str, nn.Module], names: tuple[str, ...]) -> None:
    """Train these modules in place: peft trains a copy beside the frozen original, which here would be a second home
    and a second way over the link for weights that nothing uses."""
    if not whole:
        return
    parameters = [p for module in whole.values() for p in module.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    config = adapted.peft_config["default"]
    config.modules_to_save = list(names)  # the exported adapter holds them where peft looks for them
    held: dict[int, int] = {}
    for _, parameter in adapted.named_parameters(remove_duplicate=False):
        held[id(parameter)] = held.get(id(parameter), 0) + 1
    config.ensure_weight_tying = any(held[id(parameter)] > 1 for parameter in parameters)


def settle_trained_modules(adapted: Any) -> None:
    """Put the modules that an adapter's file brings whole in place of the base's, where peft keeps both."""
    from peft.utils.other import ModulesToSaveWrapper

    wrapped = [(path, module) for path, module in adapted.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for path, module in wrapped:
        parent, _, name = path.rpartition(".")
        setattr(adapted.get_submodule(parent), name, module.modules_to_save["default"])
    if wrapped and adapted.peft_config["default"].ensure_weight_tying:
        adapted.get_base_model().tie_weights()


def check_dora(adapted: nn.Module) -> None:
    """ValueError for layers whose lengths are not those of the rows of one matrix."""
    for name, module in adapted.named_modules():
        if len(getattr(module, "lora_embedding_A", ())):
            raise ValueError(
                f"use_dora: {checkpoint_name(name)} is an embedding, whose lengths would be those of whole columns of "
                "its vocabulary. Leave it out of lora_target_modules, or train it whole (lora_modules_to_save)."
            )


def dora_lengths(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """DoRA's lengths by checkpoint name: (name of the weight whose rows they are the norms of, whether it is stored
    transposed). At the start of training they are the base's, so that the model is the base."""
    return {
        checkpoint_name(f"{name}.lora_magnitude_vector.default.weight"): (
            checkpoint_name(f"{name}.base_layer.weight"),
            bool(module.fan_in_fan_out),
        )
        for name, module in model.named_modules()
        if len(getattr(module, "lora_magnitude_vector", ())) and hasattr(module, "base_layer")
    }


def multiply_dora(model: nn.Module) -> None:
    """Have DoRA layers multiply B and A by themselves. peft sends an identity of [in, in] through both instead (0.4 GB
    for an MLP of 14,336), because FSDP and ZeRO-3 give a weight to its own module only; here weights are whole."""
    for module in model.modules():
        if type(module).__name__ == "DoraLinearLayer":
            module.__class__ = _product_layer()


@cache
def _product_layer() -> type[nn.Module]:
    from peft.tuners.lora.dora import DoraLinearLayer

    class DoraProductLayer(DoraLinearLayer):
        def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
            return lora_B.weight @ lora_A.weight

    return DoraProductLayer


def row_lengths(weight: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    """L2 norms of the rows of `weight` [out, in] (of [in, out] when it is stored transposed), [out], as peft takes
    them."""
    return torch.linalg.norm(weight, dim=0 if is_transposed else 1).to(weight.dtype)


ALL_LINEAR = ("auto", "all-linear")
EXPERTS = "experts"
"""Target that stands for every weight of all experts."""


def apply_lora(model: nn.Module, settings: LoraSettings, seed: int, gather: Gather | None = None) -> nn.Module:
    """The model with adapters on its linear layers or experts (a PeftModel); every other parameter is frozen.

    A ~ uniform as peft draws it (kaiming, a = sqrt 5) but by (seed, name); B = 0, so training starts at the base
    model. ValueError when no module matches `target_modules` or `modules_to_save`. DoRA's lengths are those of the
    weights that the model holds: of one loaded lazily they are set with its weights (`dora_lengths`)."""
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
    from peft import LoraConfig, get_peft_model
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
        task_type=_task(model, encoder_decoder),
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


def _task(model: nn.Module, encoder_decoder: bool) -> Any:
    """Choose the task that peft wraps a model for; None for a user's own module, which has no `generate` to wrap."""
    from peft import TaskType

    if not hasattr(model, "prepare_inputs_for_generation"):
        return None
    return TaskType.SEQ_2_SEQ_LM if encoder_decoder else TaskType.CAUSAL_LM


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
