"""Search for layers that are alike, so that one compiled function serves them all.

Two layers are alike when every submodule has the same class and the same plain attributes, functions, configuration
objects and parameters (names, shapes, types, trainable or not). An attribute named after the layer's number may differ
when it *is* the layer's own number: it tells a cache where to store, and nothing is cached in training. So may a text
that ends with the layer's number and the submodule's path within the layer: peft's adapters keep their names. Layers
with buffers are alike to none. Whether sharing changes any number is tried on a tiny copy (`check.sharing_holds`).

What a run's model will keep, before it is loaded by its shape, and afterwards by its parts."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.common.quantities import round_up
from outcore.flow.parts.units import ModelParts, Part
from outcore.formats.checkpoint import usual_format
from outcore.model import ModelSettings, on_targets, resolve_source, shape_from_config
from outcore.model.facts import quantization_of
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import BLOCK_NUMEL
from outcore.sizing.training import PartNeeds, TrainingNeeds, checkpoint_ends


def alike(layers: Sequence[nn.Module]) -> list[int]:
    """For each layer the index of the first one that is like it (perhaps itself)."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(structure_of(layer, index), index) for index, layer in enumerate(layers)]


def structure_of(layer: nn.Module, index: int) -> Hashable:
    """A key that is equal for layers that are alike."""
    if next(layer.buffers(), None) is not None:
        return ("has buffers", index)
    return tuple(
        (
            path,
            type(module),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple(
                sorted(
                    (name, repr(_plain(name, value, index, path)))
                    for name, value in vars(module).items()
                    if not name.startswith("_")
                )
            ),
        )
        for path, module in layer.named_modules()
    )


def _plain(name: str, value: Any, index: int, path: str) -> Hashable:
    if isinstance(value, int) and not isinstance(value, bool) and value == index and ("idx" in name or "layer" in name):
        return "own number"
    own_path = f".{index}.{path}"
    if isinstance(value, str) and path and value.endswith(own_path):
        return ("own path", value.removesuffix(own_path))
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)):
        return tuple(_plain(name, item, index, path) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _plain(name, item, index, path)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return tuple(_plain(name, part, index, path) for part in (value.func, value.args, value.keywords))
    if hasattr(value, "__qualname__"):
        return (getattr(value, "__module__", ""), value.__qualname__)
    return (type(value).__name__, id(value))


def run_shape(settings: ModelSettings, tokenizer: Any) -> ModelShape:
    """Count the model on the meta device, with its adapters and as its frozen base will be packed. ValueError for a
    model of the user's own module, which only its builder knows, and for one without layers."""
    if settings.model_module is not None:
        raise ValueError("the planner cannot count a model_module's model, which only its own builder knows")
    name = settings.preset or settings.model_name_or_path or settings.config_file or "model"
    source = resolve_source(settings, tokenizer)
    config = source.config
    shape = shape_from_config(Path(name).stem if settings.config_file else name, config)
    if not settings.lora:
        return shape
    lora, targets = settings.lora, settings.lora.target_modules
    targets = () if isinstance(targets, str) else targets  # a string: auto
    shape = on_targets(shape, config, targets, lora.use_dora, lora.modules_to_save)
    packed = quantization_of(config) if source.path is not None else None
    published = usual_format(packed) if packed else None
    shape = shape.with_lora(settings.lora.r).packed(settings.quantize, published=published)
    return replace(shape, stays_eager=shape.stays_eager or settings.lora.dropout > 0)


def needs_of_parts(
    units: ModelParts,
    state_format: str,
    step_tokens: Sequence[int],
    hidden_size: int,
    *,
    uses_muon: bool = False,
    ranks: int = 1,
) -> TrainingNeeds:
    """Count what the parts of a model need, to the byte as `needs_of_shape` does before it is loaded."""
    itemsize = units.embed.dtype.itemsize

    def of(part: Part, *, has_matrices: bool) -> PartNeeds:
        slots = part.layout.trainable_slots if has_matrices else ()
        matrices = tuple(sorted(round_up(slot.numel, BLOCK_NUMEL) for slot in slots if len(slot.shape) == 2))
        return PartNeeds(part.layout.home_bytes, part.layout.size_bytes, part.layout.trainable_numel, matrices)

    layers = {part.index for part in units.layer_units}
    return TrainingNeeds(
        tuple(of(part, has_matrices=uses_muon) for part in units.layer_units),
        tuple(of(part, has_matrices=False) for part in units.all if part.index not in layers),
        itemsize,
        state_format,
        checkpoint_ends(step_tokens, hidden_size * itemsize),
        ranks,
    )
