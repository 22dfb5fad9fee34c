"""From what the user calls a model (preset, folder, config file, hub id) to a `ModelShape`; weights are never read.

Presets of decoders are counted by hand (no torch). Everything else goes through transformers on the meta device: a hub
id fetches its config.json, nothing more. Layers are discovered by structure: the longest module list whose members
share a class. Cost: 2-4 s of imports, then about 0.2 s for 70 B parameters, no memory.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from outcore.sizing.shape import COUNTED, Blocks, ModelShape, in_blocks, shape_from_fields, stays_eager

KEYLESS = ("linear_attention", "conv", "mamba", "moe", "mlp")
"""Kinds of layers, as transformers names them, that keep no keys and values."""


def resolve_shape(
    model: str,
    *,
    lora_target_modules: str = "auto",
    use_dora: bool = False,
    modules_to_save: tuple[str, ...] = (),
    trust_remote_code: bool = False,
) -> ModelShape:
    """The shape of a model by preset name, config file, folder or hub id.

    `lora_target_modules`, `use_dora`, `modules_to_save`: what adapters would be, as train_model.py takes it.

    Raises:
        ValueError: no such model here, not a language model that can be trained, or no such modules in it.
        RuntimeError: the hub cannot give its configuration.
    """
    from outcore.model.presets import PRESETS

    adapters = _names_of(lora_target_modules), use_dora, modules_to_save
    if model in PRESETS:
        return preset_on_targets(model, *adapters)
    config, path = named_config(model, trust_remote_code), Path(model).expanduser()
    shape = shape_from_config(path.name if path.exists() else model, config)
    return on_targets(shape, config, *adapters)


def named_config(model: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a model by config file, GGUF file, folder or hub id. ValueError, RuntimeError as above."""
    path = Path(model).expanduser()
    if not path.exists() and "/" not in model and "\\" not in model:
        from outcore.model.presets import check_preset_name

        check_preset_name(model)  # raises, with the nearest names
    from outcore.model.settings import ModelSettings
    from outcore.model.source import resolve_source

    config_file = path / "config.json" if path.is_dir() else path
    has_weights = path.suffix.lower() == ".gguf" or any(path.glob("*.safetensors"))
    if config_file.is_file() and not has_weights:  # a folder needs no weights to be planned
        settings = ModelSettings(config_file=str(config_file), seq_length=2, trust_remote_code=trust_remote_code)
    else:
        settings = ModelSettings(model_name_or_path=model, trust_remote_code=trust_remote_code, seq_length=2)
    return resolve_source(settings, sees=True).config


def _names_of(lora_target_modules: str) -> tuple[str, ...]:
    """() for every linear layer."""
    if lora_target_modules == "auto":  # most plans: no torch
        return ()
    from outcore.model.settings import LoraSettings

    targets = LoraSettings(target_modules=lora_target_modules).target_modules
    return () if isinstance(targets, str) else targets


def preset_shape(name: str) -> ModelShape:
    """The shape of a preset by its name; ValueError with the nearest names when there is none."""
    from outcore.model.presets import check_preset_name, preset_config

    preset = check_preset_name(name)
    if preset.model_type in COUNTED:
        return shape_from_fields(name, preset.model_type, preset.fields)
    return shape_from_config(name, preset_config(name))


def preset_on_targets(
    name: str, targets: tuple[str, ...], use_dora: bool = False, whole: tuple[str, ...] = ()
) -> ModelShape:
    """`on_targets` of a preset; counted by hand where nothing is asked for."""
    if not (targets or use_dora or whole):
        return preset_shape(name)
    from outcore.model.presets import preset_config

    return on_targets(preset_shape(name), preset_config(name), targets, use_dora, whole)


def on_targets(
    shape: ModelShape, config: Any, targets: tuple[str, ...], use_dora: bool = False, whole: tuple[str, ...] = ()
) -> ModelShape:
    """The shape whose adapters go on modules of these names ((): on every linear layer): peft makes them, of rank 1, on
    the meta device. `whole`: modules that are trained whole beside them.

    What a name means is peft's own rule (of experts that are one weight, for one). ValueError when the model lacks one.
    """
    if not (targets or use_dora or whole):
        return shape
    import torch

    from outcore.model.adapters import with_adapters
    from outcore.model.facts import model_class_of
    from outcore.model.settings import LoraSettings
    from outcore.model.weights import meta_skeleton

    model: Any = meta_skeleton(model_class_of(config), config)
    layers = [layer for stack in _layer_stacks(model) for layer in stack]
    settings = LoraSettings(r=1, target_modules=targets or "auto", use_dora=use_dora, modules_to_save=whole)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft thinks of the targets, it says when the run makes them
        adapted = with_adapters(model, settings)
    kinds: dict[str, list[Any]] = {"adapters": [], "lengths": [], "whole": []}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            kind = "lengths" if "lora_magnitude_vector" in name else "adapters" if "lora_" in name else "whole"
            kinds[kind].append((parameter, [parameter.numel()]))
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    return dataclasses.replace(
        shape,
        **{kind: _by_layer(layers, found) for kind, found in kinds.items()},
        lora_targets=targets,
        use_dora=use_dora,
        modules_to_save=whole,
        whole_in_ends=sum(p.numel() for p, _ in kinds["whole"] if id(p) not in in_layers),
    )


def shape_from_config(name: str, config: Any, *, adapts: bool = True) -> ModelShape:
    """Count a transformers config on the meta device. `adapts` False: without adapters, which only peft knows, whose
    import takes seconds. ValueError when its layers cannot be found."""
    from outcore.model.facts import ConfigKey, model_class_of

    shape = _counted(ConfigKey.about(config), adapts)
    if shape is None:
        found = model_class_of(config).__name__
        raise ValueError(f"{name}: no stack of layers was found in {found}, so it cannot be planned.")
    return dataclasses.replace(shape, name=name)


@lru_cache(64)
def _counted(asked: Any, adapts: bool) -> ModelShape | None:
    from outcore.model.facts import model_class_of, model_facts, resolve_attention, skeleton_and_tied
    from outcore.model.source import max_positions
    from outcore.model.states import state_numels

    config = asked.config
    seeing = _seeing_class(config)
    model, tied_numels = skeleton_and_tied(seeing or model_class_of(config), config)
    facts = model_facts(model)
    text = config.get_text_config(decoder=True)
    whole: Any = model
    of_text = [whole.get_decoder(), whole.get_input_embeddings(), whole.get_output_embeddings()] if seeing else [whole]
    in_text = {id(p): p.numel() for module in of_text if module is not None for p in module.parameters()}
    stacks = _layer_stacks(of_text[0])
    if not stacks:
        return None
    layers = [layer for stack in stacks for layer in stack]
    layer_params = tuple(_numel(layer) for layer in layers)
    embedding = _embedding_params(model, facts.vocab_size * facts.hidden_size)
    in_experts = [sum(p.numel() for n, p in layer.named_parameters() if "experts" in n.split(".")) for layer in layers]
    top_k = int(_first(text, "num_experts_per_tok", "num_experts_per_token", "moe_top_k") or 0) if facts.is_moe else 0
    num_experts = int(_first(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 1)
    heads = int(_first(text, "num_attention_heads", "num_heads") or 1)
    head_dim = int(_first(text, "head_dim", "d_kv") or facts.hidden_size // heads)
    ffn = int(_first(text, "intermediate_size", "ffn_dim", "d_ff", "n_inner") or 4 * facts.hidden_size)
    if top_k:
        ffn = top_k * int(_first(text, "moe_intermediate_size") or ffn)
    return ModelShape(
        name="",
        model_type=config.model_type,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        embedding_params=embedding,
        layer_params=layer_params,
        head_params=sum(in_text.values()) - embedding - sum(layer_params),
        seeing_params=facts.total_params - sum(in_text.values()),
        active_layer_params=sum(layer_params)
        - (sum(in_experts) * (num_experts - top_k) // num_experts if top_k else 0),
        largest_weight_numel=facts.largest_weight_numel,
        tensors=_by_layer(layers, [(parameter, [parameter.numel()]) for parameter in model.parameters()]),
        num_heads=heads,
        num_kv_heads=int(_first(text, "num_key_value_heads") or heads),
        head_dim=head_dim,
        ffn_width=ffn,
        gated_ffn=any("gate" in n.split(".")[-1] or "gate_proj" in n for n, _ in layers[0].named_modules())
        or bool(top_k),
        experts_per_token=top_k,
        num_experts=num_experts if top_k else 0,
        expert_params=tuple(in_experts) if top_k else (),
        fused_attention=resolve_attention(config, "auto")[0] != "eager",
        caps_logits=bool(_first(text, "final_logit_softcapping")),
        tied=facts.tied,
        tied_numels=tied_numels,
        is_encoder_decoder=facts.is_encoder_decoder,
        max_positions=max_positions(config),
        short_positions=facts.short_positions,
        adapters=_adapters(model, layers) if adapts else (),
        matrices=_by_layer(layers, _matrices(layers)),
        windows=_windows(text, len(layers)),
        stays_eager=stays_eager({**config.to_dict(), **text.to_dict()}),
        states=(0, 0) if facts.is_encoder_decoder or seeing else state_numels(model, config),
    )


def _seeing_class(config: Any) -> Any:
    """The image-text model of a configuration that transformers knows for no model of text alone; else None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return kinds[type(config)] if type(config) in kinds and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _layer_stacks(model: Any) -> list[Any]:
    """Outermost module lists: the decoder's layers, or encoder's and decoder's."""
    from torch import nn

    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if any(name.startswith(f"{outer}.") for outer, _ in found):
            continue
        found.append((name, module))
    longest = max((len(stack) for _, stack in found), default=0)
    return [stack for _, stack in found if len(stack) == longest or len(found) <= 2]


def _embedding_params(model: Any, otherwise: int) -> int:
    """Token embedding and learned positions (top-level embeddings), shared ones once."""
    from torch import nn

    inside = [layer for stack in _layer_stacks(model) for layer in stack]
    in_layers = {id(p) for layer in inside for p in layer.parameters()}
    numels = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(n for key, n in numels.items() if key not in in_layers) or otherwise


def _numel(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def _windows(text: Any, num_layers: int) -> tuple[tuple[int | None, int], ...]:
    """`ModelShape.windows` by the names that transformers gives the kinds of attention."""
    window = getattr(text, "sliding_window", None)
    keyless = set(KEYLESS) & set(kinds := getattr(text, "layer_types", None) or [])
    if not window and not keyless:
        return ()
    kinds = [kind for kind in kinds or ["sliding_attention"] * num_layers if kind not in KEYLESS]
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    found = tuple((w, count) for w, count in ((None, len(kinds) - sliding), (window, sliding)) if count)
    return found or ((None, 0),)


def _first(config: Any, *names: str) -> Any:
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)


def _by_layer(layers: list[Any], found: list[tuple[Any, list[int]]]) -> Blocks:
    """(parameter, its numbers) in the order of the model, cut where a layer begins or ends."""
    layer_of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    cut = groupby(found, key=lambda pair: layer_of.get(id(pair[0])))
    return in_blocks([[number for _, numbers in pairs for number in numbers] for _, pairs in cut])


def _matrices(layers: list[Any]) -> list[tuple[Any, list[int]]]:
    """(weight, its elements and columns) of linear layers and stacked experts; `outcore.flow.parts` packs these."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    found = {}
    for module in (module for layer in layers for module in layer.modules()):
        for weight in module._parameters.values():
            is_linear = weight is not None and weight.ndim == 2 and isinstance(module, (nn.Linear, Conv1D))
            if weight is not None and (is_linear or weight.ndim == 3):
                found[id(weight)] = (weight, [weight.numel(), weight.shape[-1]])
    return list(found.values())


def _adapters(model: Any, layers: list[Any]) -> Blocks:
    """Adapters of every layer that adapters go on unless told otherwise."""
    from outcore.model.adapters import linear_names

    found: list[tuple[Any, list[int]]] = []
    for name in linear_names(model):
        module = model.get_submodule(name)
        shape = module.weight.shape if type(module).__name__ == "Conv1D" else module.weight.shape[::-1]
        found.append((module.weight, list(shape)))
    return _by_layer(layers, found)
