"""Needs of a model and limits of machine and settings, from which a placement and its passes are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.common.quantities import GIB
from outcore.flow import ModelParts, Part
from outcore.flow.experts import experts_of, form_of
from outcore.flow.tiles import free_device_bytes
from outcore.flow.weights import InPlaceProducts
from outcore.formats import PackedProducts, PackedSpec
from outcore.infer.attention import has_fused, has_kernel
from outcore.infer.opening.check import IN_ONE_PIECE, KeptOfLayers, Way
from outcore.infer.opening.model import FoundModel
from outcore.infer.opening.settings import InferSettings
from outcore.infer.passes import SmallPasses
from outcore.infer.schedule import ScheduleLimits
from outcore.machine import available_ram_bytes
from outcore.model import LoadedModel, shape_from_config
from outcore.sizing.inference import (
    PRESETS,
    AttentionSize,
    InferenceLimits,
    InferenceNeeds,
    KvSize,
    LayerSize,
    PartSize,
    Placement,
    RowCost,
)
from outcore.sizing.shape import ModelShape

FIXED_CHUNK_TOKENS = 1024
"""Tokens of every call that reads prompts, where results may not depend on company: one size for every engine."""


def needs_of(
    found: FoundModel,
    units: ModelParts,
    kept: KeptOfLayers,
    layer: LayerSize,
    dtype: torch.dtype,
    settings: InferSettings,
    device: torch.device,
) -> InferenceNeeds:
    """Bytes of the parts, of a token's keys and values, of a sequence's states."""
    experts = {part.index for part in units.expert_units.values()}
    layers = experts | {part.index for part in units.layer_units}
    parts = tuple(
        PartSize(
            part.name,
            part.layout.home_bytes,
            part.index in layers,
            _expanded_bytes(part, is_whole=part.index in layers or device.type == "cpu"),
            part.index in experts,
            is_rows=not units.tied and part is units.embed and _is_table(part),
        )
        for part in units.all
    )
    by_window = tuple(
        (window, sum(shape.token_bytes(dtype, settings.kv_format) for shape in of_layers.values()))
        for window, of_layers in kept.shapes.items()
    )
    facts = found.loaded.facts
    if not by_window and kept.state_bytes:  # recurrent layers alone: pages hold nothing, they count tokens
        by_window = ((None, 1),)
    elif not by_window:  # a cache of the model's own: no more than keys and values of every layer would be
        by_window = ((None, 2 * facts.hidden_size * facts.num_layers * dtype.itemsize),)
    copies = 1 if settings.draft_tokens == 0 else InferenceNeeds.COPIES_WITH_GUESSES
    sizes, is_packed = (layer, found.loaded.facts.vocab_size, dtype.itemsize), settings.kv_format != "same"
    states = copies * kept.state_bytes
    needs = InferenceNeeds(parts, KvSize(by_window), *sizes, is_packed, state_bytes=states)
    forms = [form_of(part) for part in units.expert_units.values()]
    return needs.with_experts([(form.size_bytes, form.num_experts, form.expanded_bytes) for form in forms])


def _expanded_bytes(part: Part, *, is_whole: bool) -> int:
    """Bytes for values of a packed part: all of a layer's, of embedding and head on a GPU some rows' at a time."""
    if not part.layout.packed_slots:
        return 0
    most = part.layout.size_bytes
    return most if is_whole else min(most, InPlaceProducts.EXPANDED_NUMEL * part.layout.dtype.itemsize)


def _is_table(part: Part) -> bool:
    """Whether tokens choose rows of all that a part has."""
    return all(isinstance(module, nn.Embedding) for owners in part.owners for module, _ in owners)


def limits_of(found: FoundModel, settings: InferSettings, device: torch.device, way: Way) -> InferenceLimits:
    """Find what the machine has to give, within the settings. ValueError for settings that cannot be."""
    vram = free_device_bytes(device)
    if vram is not None and settings.vram_gib is not None:
        vram = min(vram, int(settings.vram_gib * GIB))
    ram = (
        available_ram_bytes() - InferenceLimits.RAM_LEFT_BYTES
        if settings.ram_gib is None
        else int(settings.ram_gib * GIB)
    )
    context = settings.context
    if found.max_context is not None and context is not None and context > found.max_context:
        raise ValueError(f"context is {context}, but the model knows {found.max_context} positions. Lower --context.")
    kv_home = None if settings.kv_home == "auto" else settings.kv_home
    if way == "whole" and vram is not None:
        if kv_home in ("ram", "nvme"):
            raise ValueError(
                f"kv_home {kv_home}: this model keeps states of its own, which stay on the GPU. Leave it out."
            )
        kv_home = "vram"
    context = PRESETS[settings.preset].usual_context(context, found.max_context, found.loaded.facts.short_positions)
    fixed = settings.deterministic and has_kernel(device)
    whole = context or PRESETS[settings.preset].context_tokens if way in IN_ONE_PIECE else None
    return InferenceLimits(
        vram,
        max(0, ram),
        bool(settings.nvme_path),
        context,
        settings.max_sequences,
        whole or settings.pass_tokens,
        whole or settings.chunk_tokens or (FIXED_CHUNK_TOKENS if fixed else None),
        kv_home,
        settings.kv_bytes,
        settings.layer_buffers,
        settings.scores_only,
        guessed_tokens_of(settings, way),
        has_graphs=runs_graphs(settings, way, device),
        expert_bytes=int(settings.expert_cache_gib * GIB) if settings.expert_cache_gib else None,
        reads_ram=device.type == "cuda" and settings.staging_bytes is None,
        runs_few=settings.cpu_tokens != 0 and runs_graphs(settings, way, device) and not settings.deterministic,
        pads_calls=settings.deterministic,
    )


def guessed_tokens_of(settings: InferSettings, way: Way) -> int:
    """Guesses of a pass at most."""
    if way in IN_ONE_PIECE:
        return 0
    return InferenceLimits.guessed_tokens if settings.draft_tokens is None else settings.draft_tokens


def runs_graphs(settings: InferSettings, way: Way, device: torch.device) -> bool:
    """Whether small passes run as CUDA graphs: those of sequences that share rows. Where results may not depend on
    company, only with the kernel whose bits do not."""
    return way == "paged" and settings.compile != "off" and (not settings.deterministic or has_kernel(device))


def shape_of(found: FoundModel) -> ModelShape | None:
    """Count the model's layers; None where they cannot be."""
    try:
        return shape_from_config(found.words, found.loaded.config, adapts=False)
    except (ValueError, RuntimeError):
        return None


def layer_size(
    loaded: LoadedModel,
    shape: ModelShape | None,
    attentions: Iterable[AttentionSize],
    device: torch.device,
    dtype: torch.dtype,
) -> LayerSize:
    """Widths of its layers; where they cannot be counted, those of a usual one."""
    hidden = loaded.facts.hidden_size
    sizes = {replace(a, is_fused=a.is_fused and has_fused(device, dtype, a.key_width)) for a in attentions}
    if shape is None:
        return LayerSize(hidden, 4 * hidden, tuple(sizes) or (AttentionSize(1, 1, hidden, hidden),))
    usual = AttentionSize(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    has_biases = any("experts." in name and name.endswith("bias") for name, _ in loaded.model.named_parameters())
    return LayerSize(hidden, shape.ffn_width, tuple(sizes) or (usual,), shape.experts_per_token, has_biases)


def schedule_limits(
    placement: Placement, settings: InferSettings, way: Way, row_cost: RowCost, device: torch.device
) -> ScheduleLimits:
    """Set the limits that passes are filled to."""
    drafts = guessed_tokens_of(settings, way)
    if way in IN_ONE_PIECE:
        context = placement.context_tokens
        return ScheduleLimits(placement.max_sequences, context, context, 0, whole_chunks=True)
    sizes, fixed = (placement.max_sequences, placement.pass_tokens, placement.chunk_tokens), settings.deterministic
    rows = fixed_rows_of(placement, settings, way, device)
    whole = fixed and rows is None
    return ScheduleLimits(
        *sizes, drafts, whole_chunks=whole, fixed_rows=rows, is_deterministic=fixed, row_cost=row_cost
    )


def fixed_rows_of(placement: Placement, settings: InferSettings, way: Way, device: torch.device) -> int | None:
    """Rows of calls of answers where results may not depend on company and prompts are cut freely: by the kernel that
    reads pages, which gives a token the same bits however its prompt was cut. Other ways of attention do not: None."""
    is_by_kernel = way == "paged" and placement.kv_home == "vram" and has_kernel(device)
    is_fixed = settings.deterministic and is_by_kernel
    return min(SmallPasses.FIXED_ROWS, placement.chunk_tokens) if is_fixed else None


def can_run_few(units: ModelParts) -> bool:
    """Whether a CPU can compute the model's experts for a GPU: all are packed along what their products sum over, and
    there are kernels for them."""
    found = []
    for layer, part in zip(units.layers, units.layer_units, strict=True):
        module: Any = experts_of(layer)
        for slot in part.layout.packed_slots:
            spec = slot.packed
            if spec is not None and len(spec.shape) == 3:
                one = PackedSpec(spec.format, spec.shape[1:])
                is_along = module is not None and spec.is_transposed == module.is_transposed
                found.append(is_along and PackedProducts.can(one))
    return bool(found) and all(found)
