"""Decisions about an engine before memory is spent: whether it can be, how layers run, where every byte goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from outcore.engine.stream.check.gradients import GRADIENTS, try_tiled_copy, why_not_in_tiles_of_tokens
from outcore.engine.stream.ranks import ALONE, RankPlace
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.check import attention_to_packed_rows, sharing_holds, try_tiny_copy
from outcore.flow.layers import CompiledLayers, LayerGraphs, draws_random_numbers
from outcore.flow.parts import ModelParts, Part, StreamUnsupported, discover_units, needs_of_parts
from outcore.flow.tiles import TilePlan, free_device_bytes, plan_tiles
from outcore.machine import available_ram_bytes
from outcore.model import LoadedModel, shape_from_config
from outcore.model.adapters import add_to_products, multiply_dora
from outcore.model.facts import undecayed
from outcore.model.forward import LayerProducts
from outcore.optim import StateFormat, state_format
from outcore.sizing.activations import long_ram_bytes
from outcore.sizing.engine_rule import why_not_muon
from outcore.sizing.streaming import RAM_RESERVE_BYTES, PinnedMemory
from outcore.sizing.tiles import TilingWork
from outcore.sizing.training import TrainingLimits, TrainingPlacement, least_gradients, place_training
from outcore.sizing.work import step_work
from outcore.states import StateChunk, cut_states, spill

logger = logging.getLogger(__name__)

SMALLEST_READ_AHEAD_SLOTS = 4
"""Two for whole units, two for tiles."""


@dataclass(frozen=True)
class Blueprint:
    """The decisions; `build` opens what they need."""

    loaded: LoadedModel
    settings: StreamSettings
    device: torch.device
    units: ModelParts
    aux_coefficient: float
    """Coefficient of the routers' balancing loss; 0 without."""
    packed_rows: str
    """Text for people: how attention keeps packed documents apart; '' when it does not come up."""
    compiled: CompiledLayers
    products: LayerProducts
    tile_plan: TilePlan
    states: StateFormat
    chunks: dict[int, list[StateChunk]]
    """Optimizer states of each unit (by its index) that this rank keeps, and which of them are on NVMe."""
    placed: TrainingPlacement
    """Homes of all that the run keeps."""
    is_deferred: bool
    """Whether updates wait for the global norm."""
    place: RankPlace = ALONE
    """This process among the ranks of its host."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.units.embed.layout.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """Type in which gradients of several micro-batches are added up."""
        return torch.float32 if self.settings.accumulate == "fp32" else self.dtype

    @cached_property
    def in_order(self) -> list[Part]:
        """Parts as the placement counts them, the layers first."""
        layers = self.units.layer_units
        return [*layers, *(unit for unit in self.units.all if unit not in layers)]

    @cached_property
    def cuts(self) -> dict[int, int]:
        """Elements of each unit's slab (by its index) that live in RAM; the rest is on NVMe."""
        cuts = zip(self.in_order, self.placed.cuts, strict=True)
        return {unit.index: cut // unit.dtype.itemsize for unit, cut in cuts}

    @cached_property
    def waits(self) -> dict[int, int]:
        """First element of each layer (by index) that waits in its gradient's home from an update on, at the beginning
        of a chunk; of those layers in which any does."""
        starts = {
            unit.index: [chunk.start for chunk in self.chunks[unit.index] if chunk.start * unit.dtype.itemsize >= least]
            for unit, least in zip(self.units.layer_units, self.placed.waits, strict=True)
        }
        return {index: min(found) for index, found in starts.items() if found}

    @property
    def on_nvme(self) -> frozenset[int]:
        """Indices of the units with parameters on NVMe."""
        return frozenset(unit.index for unit in self.units.all if self.cuts[unit.index] < unit.layout.home_numel)


def draw_blueprint(
    loaded: LoadedModel,
    settings: StreamSettings,
    device: torch.device,
    *,
    trial: bool,
    build: Callable[..., object],
    place: RankPlace = ALONE,
) -> Blueprint:
    """Look at the model (`trial`: with tiny copies of it as well) and decide. `build`: build_stream_engine.

    StreamUnsupported (a ValueError) naming why this model cannot be streamed; ValueError for settings; EngineError for
    a compilation that was asked for and cannot be.
    """
    add_to_products(loaded.model)  # of adapters that the caller made, too
    units = discover_units(loaded)
    if trial:
        try_tiny_copy(loaded, GRADIENTS)
    dtype = units.embed.layout.dtype
    aux_coefficient = loaded.token_loss().aux_coefficient
    packed_rows = attention_to_packed_rows(
        loaded, device, dtype, wanted=settings.packed_attention == "auto", trial=trial
    )
    compiled = _compiled(loaded, units, settings, device, aux_coefficient)
    tile_plan = _tile_plan(loaded, units, settings, device, compiled=not compiled.why_not)
    if tile_plan.holding.tile_tokens and (
        why := _why_rows_are_whole(loaded, units, settings, aux_coefficient, trial=trial)
    ):
        if settings.tiling == "tokens":
            raise StreamUnsupported(f"tiling tokens: {why}")
        logger.warning("rows stay whole, although they do not fit: %s", why)
        tile_plan = _tile_plan(loaded, units, settings, device, compiled=not compiled.why_not, may_cut_rows=False)
    if tile_plan.holding.tile_tokens:
        compiled.graphs = None  # what is captured holds a whole layer's memory
    if tile_plan.tiled:
        logger.info("computed in tiles: %s", tile_plan.reason)
        if trial:
            try_tiled_copy(loaded, build)
    if not compiled.why_not and all(unit.index in tile_plan.indices for unit in units.layer_units):
        compiled.give_up("they are computed in tiles.")
    states = state_format(settings.states)
    states.check_param_dtype(dtype)
    is_deferred = settings.is_deferred(dtype)
    uses_muon = settings.optimizer == "muon"
    if uses_muon and (
        why := why_not_muon(
            ranks=place.world_size,
            is_frozen=any(slot.trainable is False for unit in units.layer_units for slot in unit.layout.slots),
            tiled=bool(tile_plan.tiled),
        )
    ):
        raise ValueError(why)
    layers = frozenset(unit.index for unit in units.layer_units if uses_muon)
    exempt = frozenset[str]() if settings.decay_all else undecayed(loaded.model)
    chunks = cut_states(units.all, states, settings.chunk_numel, muon=layers, undecayed=exempt)
    in_order = [chunk for unit in units.all for chunk in chunks[unit.index]]
    spill(in_order, settings.state_ram_bytes, compress=settings.compress_on_nvme)
    placed = _placement(loaded, units, settings, device, tile_plan, place, is_deferred=is_deferred)
    if not place.is_alone and placed.spilled_weights:
        raise ValueError(
            f"{place.world_size} ranks share the parameters in RAM, and weight_ram_bytes puts some on NVMe: leave it "
            "out, or train on one rank"
        )
    products = LayerProducts(settings.matmul, units.layers, device, dtype, tiled=bool(tile_plan.tiled))
    return Blueprint(
        loaded,
        settings,
        device,
        units,
        aux_coefficient,
        packed_rows,
        compiled,
        products,
        tile_plan,
        states,
        place.owned(chunks),
        placed,
        is_deferred,
        place,
    )


def _placement(
    loaded: LoadedModel,
    units: ModelParts,
    settings: StreamSettings,
    device: torch.device,
    tile_plan: TilePlan,
    place: RankPlace,
    *,
    is_deferred: bool,
) -> TrainingPlacement:
    """The run's placement by the sizes of its real parts, within the budgets that it was told. With immediate updates
    gradients share memory where RAM has no room for a home of each."""
    needs = needs_of_parts(
        units,
        settings.states,
        settings.step_tokens or (),
        loaded.facts.hidden_size,
        uses_muon=settings.optimizer == "muon",
        ranks=place.world_size,
    )
    long_rows = None
    if (holding := tile_plan.holding).tile_tokens:
        assert settings.step_tokens, "rows are cut where a step's tokens are known"
        shape = shape_from_config("model", loaded.config)
        long_rows = long_ram_bytes(shape, needs.element_bytes, *_micro_batches(settings.step_tokens), holding)
    limits = TrainingLimits(
        ram_bytes=0,
        pins=PinnedMemory(settings.staging_bytes, settings.lane_bytes),
        checkpoints_in_ram=settings.activations_on(device) == "ram",
        chunk_numel=settings.chunk_numel,
        gradient_bytes=settings.gradient_bytes,
        holding=holding,
        waits_for_norm=is_deferred,
        long_rows=long_rows,
        told=settings.residency,
        read_ahead_bytes=max(settings.weight_read_ahead_bytes, SMALLEST_READ_AHEAD_SLOTS * settings.slot_bytes),
    )
    placed = place_training(needs, limits).beginning_ahead(settings.ahead_bytes)
    coming = placed.homes - (placed.weights if loaded.feed is None else 0)  # weights that are there move into homes
    if is_deferred or not place.is_alone or settings.gradient_bytes is not None:
        return placed
    if coming <= available_ram_bytes() - RAM_RESERVE_BYTES:
        return placed
    return place_training(needs, replace(limits, gradient_bytes=least_gradients(needs)))


def prepare_model(units: ModelParts, device: torch.device, *, expert_by_expert: bool) -> None:
    """Buffers (rotary frequencies and the like) stay on the device; layers are recomputed by the schedule only.

    `expert_by_expert`: a mixture's stacked weights are in tiles, so its experts must be computed one after another.
    """
    units.buffers_to(device)
    multiply_dora(units.parts.causal)
    for config in units.grouping_configs() if expert_by_expert else ():
        config._experts_implementation = "eager"
    for module in units.parts.causal.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.__dict__["gradient_checkpointing"] = False


def _compiled(
    loaded: LoadedModel, units: ModelParts, settings: StreamSettings, device: torch.device, aux_coefficient: float
) -> CompiledLayers:
    graphs = LayerGraphs(device) if device.type == "cuda" and settings.cuda_graphs == "auto" else None
    compiled = CompiledLayers(units, settings.compile, graphs=graphs)
    if settings.compile == "auto" and device.type != "cuda":
        compiled.why_not = "compile: auto compiles on a GPU only"
    if graphs is None and compiled.why_not:
        return compiled
    if aux_coefficient:
        compiled.cannot("the routers' balancing loss needs their logits, which are read from the eager layers.")
        return compiled
    if draws_random_numbers(units):
        compiled.cannot("dropout is at work, and must draw the same numbers in forward and recomputation.")
        return compiled
    if sharing_holds(loaded):
        compiled.graphs_fit_eager = True
        return compiled
    if not compiled.why_not:
        logger.warning(
            "layers that look alike differ in their results, so each is compiled by itself: a slow first step"
        )
    return CompiledLayers(units, settings.compile, share=False, graphs=graphs)


def _why_rows_are_whole(
    loaded: LoadedModel, units: ModelParts, settings: StreamSettings, aux_coefficient: float, *, trial: bool
) -> str:
    """Why layers cannot run on tiles of tokens, in words; '' when they can."""
    if settings.activations == "nvme":
        return "hidden states of long rows wait in RAM, and activations nvme asks for the drive"
    if aux_coefficient:
        return "the routers' balancing loss needs the logits of all tokens"
    if draws_random_numbers(units):
        return "dropout is at work, which would draw other numbers for tiles"
    return why_not_in_tiles_of_tokens(loaded) if trial else ""


def _tile_plan(
    loaded: LoadedModel,
    units: ModelParts,
    settings: StreamSettings,
    device: torch.device,
    *,
    compiled: bool,
    may_cut_rows: bool = True,
) -> TilePlan:
    device_bytes = free_device_bytes(device) if settings.device_bytes is None else settings.device_bytes
    sum_itemsize = 4 if settings.accumulate == "fp32" else units.embed.layout.dtype.itemsize
    return plan_tiles(
        units,
        settings.tiling,
        device_bytes,
        settings.tile_bytes,
        settings.num_layer_buffers,
        sum_itemsize,
        partial(work_of_step, loaded, settings, device, compiled=compiled),
        may_cut_rows and settings.activations_on(device) == "ram",  # where hidden states of long rows are
    )


def work_of_step(
    loaded: LoadedModel,
    settings: StreamSettings,
    device: torch.device,
    tile_bytes: int,
    chunk_bytes: int | None,
    *,
    compiled: bool,
) -> TilingWork | None:
    """Make the work of the largest micro-batch of a step. None where a step's tokens are not told, or the configuration
    does not say what a layer computes: the rule then leaves a fixed share of the device to it."""
    if not settings.step_tokens:
        return None
    try:
        shape = shape_from_config("model", loaded.config)
    except ValueError:
        return None
    tokens, accumulation = _micro_batches(settings.step_tokens)
    itemsize = next(loaded.model.parameters()).dtype.itemsize
    layout = replace(settings.layout(1, accumulation, device), compiled=compiled)
    return step_work(shape, itemsize, settings.row_tokens or tokens, tokens, layout, tile_bytes, chunk_bytes)


def _micro_batches(step_tokens: Sequence[int]) -> tuple[int, int]:
    """(tokens of the largest micro-batch, as how many of these a step counts)."""
    tokens = max(step_tokens)
    return tokens, -(-sum(step_tokens) // tokens)
