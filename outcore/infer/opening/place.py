"""Placing a model that is to answer: taken apart, counted, every byte given a home; nothing is opened yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outcore.flow import ModelParts, discover_units
from outcore.flow.experts import experts_apart
from outcore.infer.opening.check import KeptOfLayers, Way, kept_of_layers, way_of
from outcore.infer.opening.limits import can_run_few, layer_size, limits_of, needs_of, shape_of
from outcore.infer.opening.model import FoundModel
from outcore.infer.opening.settings import InferSettings
from outcore.infer.opening.weights import HostShare, shared_limits
from outcore.sizing.inference import (
    InferenceLimits,
    InferenceNeeds,
    Placement,
    RowCost,
    place_by_experts,
    place_inference,
    row_cost_of,
)

WORDS = {
    "states": "sequences keep states beside keys and values",
    "steps": "sequences keep states; prompts go in one piece, without guesses and shared beginnings",
    "whole": "sequences run by themselves, without guesses and shared beginnings",
}
"""Text for people, by the way in which sequences share a pass without sharing its rows."""


@dataclass(frozen=True)
class PlacedModel:
    """A model taken apart, and where it will live."""

    found: FoundModel
    settings: InferSettings
    device: torch.device
    way: Way
    """Way in which sequences share a pass (`opening.check`)."""
    units: ModelParts
    kept: KeptOfLayers
    needs: InferenceNeeds
    limits: InferenceLimits
    placement: Placement
    row_cost: RowCost

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.units.embed.layout.dtype

    @property
    def context(self) -> int:
        """Tokens of a sequence at most."""
        return min(n for n in (self.found.max_context, self.placement.context_tokens) if n is not None)

    def without_rows_in_ram(self) -> PlacedModel:
        """Place it anew, with an embedding that the device does not read in RAM."""
        limits = replace(self.limits, reads_ram=False)
        if self.needs.experts is not None:  # as many answers at once as their experts were placed for
            limits = replace(limits, max_sequences=self.placement.max_sequences)
        return replace(self, placement=place_inference(self.needs, limits, self.settings.preset), limits=limits)


def place_found(
    found: FoundModel,
    settings: InferSettings,
    device: torch.device,
    progress: Callable[[str], None],
    share: HostShare | None,
) -> PlacedModel:
    """Decide. StreamUnsupported where the model cannot be served, DoesNotFit or another ValueError where nothing holds
    it."""
    loaded = found.loaded
    units = discover_units(loaded, packs_ends=True)
    way, why = way_of(loaded)
    if why:
        progress(f"{WORDS[way]} ({why})")
    kept = KeptOfLayers() if way == "whole" else kept_of_layers(loaded, units, way)
    dtype, shape = units.embed.layout.dtype, shape_of(found)
    layer = layer_size(loaded, shape, kept.attentions.values(), device, dtype)
    needs = needs_of(found, units, kept, layer, dtype, settings, device)
    limits = limits_of(found, settings, device, way)
    if way == "states" and settings.share_prefixes and not settings.deterministic:
        needs, limits = needs.with_snapshots(kept.state_bytes, limits, 1 if share is None else share.world_size)
    if share is not None:
        limits = shared_limits(limits, needs, share)
    alone: list[ModelParts] = []

    def apart() -> InferenceNeeds | None:
        if share is not None or settings.deterministic:  # which experts come together depends on company
            return None
        alone.append(experts_apart(units))
        found_apart = needs_of(found, alone[0], kept, layer, dtype, settings, device)
        return None if found_apart.experts is None else replace(found_apart, num_snapshots=needs.num_snapshots)

    is_asked = bool(settings.expert_cache_gib) and share is None
    on_gpu = device.type == "cuda" and not settings.scores_only
    placement, placed = place_by_experts(
        lambda asked: place_inference(asked, limits, settings.preset),
        needs,
        apart,
        is_asked=None if settings.expert_cache_gib is None else is_asked,
        on_gpu=on_gpu,
        runs_few=on_gpu and limits.runs_few and settings.expert_cache_gib is None and can_run_few(units),
        max_sequences=limits.max_sequences,
    )
    if is_asked and placement.travels and placed is needs:
        raise ValueError("expert_cache_gib does nothing: this model has no experts that can come alone. Leave it out.")
    if placed is not needs:
        units, needs = alone[0], placed
    row_cost = RowCost() if shape is None else row_cost_of(shape, needs.kv)
    return PlacedModel(found, settings, device, way, units, kept, needs, limits, placement, row_cost)
