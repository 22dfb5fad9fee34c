"""What a run's model will keep, before it is loaded by its shape, and afterwards by its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.common.quantities import round_up
from outcore.flow.parts.units import ModelParts, Part
from outcore.formats.checkpoint import usual_format
from outcore.model import ModelSettings, on_targets, resolve_source, shape_from_config
from outcore.model.facts import quantization_of
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import BLOCK_NUMEL
from outcore.sizing.training import PartNeeds, TrainingNeeds, checkpoint_ends


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
