"""From a loaded model to a running streaming engine: take it apart, give every part its home, open the lanes."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

import torch

from outcore.engine.device_memory import let_segments_grow
from outcore.engine.stream.activations import Activations, DeviceActivations, RamActivations
from outcore.engine.stream.activations_nvme import NvmeActivations
from outcore.engine.stream.check import sharing_holds, try_tiny_copy
from outcore.engine.stream.compiled import CompiledLayers, draws_random_numbers
from outcore.engine.stream.discovery import discover_units
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.gradient_arena import GradientArena
from outcore.engine.stream.gradients import GradientDownload
from outcore.engine.stream.graphs import LayerGraphs
from outcore.engine.stream.homes import Homes
from outcore.engine.stream.host_memory import HostMemory
from outcore.engine.stream.host_sizes import arena_bytes, lender, pool_bytes, state_store
from outcore.engine.stream.packed_rows import attention_to_packed_rows
from outcore.engine.stream.parts import EngineParts
from outcore.engine.stream.placement import cut_states, spill
from outcore.engine.stream.prefetch import WeightPrefetcher
from outcore.engine.stream.runner import UnitRunner
from outcore.engine.stream.schedule import VerticalSchedule
from outcore.engine.stream.scratch import Scratch
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.stalls import Stalls
from outcore.engine.stream.state_ring import StateRing
from outcore.engine.stream.tiles_plan import TilePlan, free_device_bytes, plan_tiles
from outcore.engine.stream.tiles_trial import try_tiled_copy
from outcore.engine.stream.tiles_units import open_tiles
from outcore.engine.stream.tiles_work import work_of_step
from outcore.engine.stream.units import Unit, Units
from outcore.engine.stream.updates import TIMEOUT_S, UnitUpdates
from outcore.engine.stream.weights import WeightHomes, plan_cuts
from outcore.model.load import LoadedModel
from outcore.optim import OptimizerPool, state_format
from outcore.staging import DownloadLane, PinnedPool, UploadLane
from outcore.staging.pinned_grant import PinnedGrant
from outcore.storage import StorageEngine, TensorStore

logger = logging.getLogger(__name__)


class _Source:
    """What the prefetcher asks: homes, and whether their last update is over."""

    def __init__(self, homes: Homes, updates: UnitUpdates) -> None:
        self._homes, self._updates = homes, updates

    def slab(self, unit: Unit) -> torch.Tensor:
        return self._homes[unit].slab

    def stored(self, unit: Unit) -> tuple[TensorStore, str] | None:
        place = self._homes.weights.stored_at(unit, len(self._homes[unit].slab))
        return None if place is None else place[:2]

    def is_ready(self, unit: Unit) -> bool:
        return self._updates.is_done(unit)

    def wait_ready(self, unit: Unit) -> None:
        self._updates.wait(unit)


def build_stream_engine(
    loaded: LoadedModel,
    settings: StreamSettings,
    *,
    device: torch.device | str,
    pinned_grant: PinnedGrant | bool = True,
    trial: bool = True,
    storage: StorageEngine | None = None,
) -> StreamEngine:
    """An engine that trains `loaded` layer by layer on `device` ("cuda" or "cpu").

    `loaded` comes from `load_model(..., device="cpu")` with its parameters whole and on the CPU in the type of the run
    (bf16, fp16 or fp32), or from `load_model(..., lazy=True)`; they become views of the engine's homes. Its own
    activation checkpointing is switched off: every layer is recomputed anyway. `pinned_grant`: as `probe` of
    `PinnedPool` (what an earlier probe found; True asks a child process; False does not ask). `trial`: first compare a
    tiny copy of the model, run unit by unit, with plain autograd. `storage`: whose threads move bytes from and to
    drives; None opens one.

    Raises StreamUnsupported (a ValueError) naming why this model cannot be streamed, before memory is spent; ValueError
    for settings; PinnedPoolFull or RuntimeError when the machine does not give the staging memory, EngineError when the
    drives have no room.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    units = discover_units(loaded)
    if trial:
        try_tiny_copy(loaded)
    dtype = units.embed.layout.dtype
    aux_coefficient = loaded.token_loss().aux_coefficient
    packed_rows = attention_to_packed_rows(
        loaded, device, dtype, wanted=settings.packed_attention == "auto", trial=trial
    )
    compiled = _compiled(loaded, units, settings, device, aux_coefficient)
    tile_plan = _tile_plan(loaded, units, settings, device, trial, compiled=not compiled.why_not)
    holding = tile_plan.holding
    if not compiled.why_not and all(unit.index in tile_plan.indices for unit in units.layer_units):
        compiled.give_up("they are computed in tiles.")
    states = state_format(settings.states)
    states.check_param_dtype(dtype)
    deferred = settings.is_deferred(dtype)
    chunks = cut_states(units.all, states, settings.chunk_numel)
    spill([chunk for unit in units.all for chunk in chunks[unit.index]], settings.state_ram_bytes)
    let_segments_grow(device)
    _prepare_model(units, device, expert_by_expert=bool(tile_plan.tiled))
    with ExitStack() as undo:
        combined_bytes = settings.lane_bytes // 2 if settings.write_combined else 0
        with compiled.loading_compiler():  # pinning waits for the kernel meanwhile
            pool = PinnedPool(
                pool_bytes(units, settings), device=device, write_combined_bytes=combined_bytes, probe=pinned_grant
            )
        staging = undo.enter_context(pool)
        scratch = undo.enter_context(Scratch(settings.nvme_paths, storage)) if settings.nvme_paths else None
        upload = undo.enter_context(
            UploadLane(
                staging,
                None,
                device,
                settings.slot_bytes,
                settings.num_slots,
                write_combined=settings.write_combined,
            )
        )
        download_lane = undo.enter_context(DownloadLane(staging, None, device, settings.slot_bytes, settings.num_slots))
        memory = HostMemory(staging)
        undo.callback(memory.close)
        cuts = plan_cuts(
            units.all,
            units.layer_units,
            settings.weight_ram_bytes,
            settings.chunk_numel,
            whole=tile_plan.indices & {units.embed.index, units.head.index},  # rows of an embedding come from RAM
        )
        weights = WeightHomes(units.all, memory, cuts, scratch, loaded.feed)
        on_nvme = {unit.index for unit in units.all if cuts[unit.index] < unit.layout.numel}
        lanes = {"weights": bool(on_nvme - tile_plan.indices), "tiles": bool(on_nvme & tile_plan.indices)}
        left = min(settings.weight_read_ahead_bytes, staging.free_bytes // 2)
        num_slots = max(2, left // max(1, sum(lanes.values())) // settings.slot_bytes)
        drive_lanes = {
            what: undo.enter_context(
                UploadLane(staging, None, device, settings.slot_bytes, num_slots, owner=f"{what} from NVMe")
            )
            for what, is_needed in lanes.items()
            if is_needed
        }
        homes = Homes(units.all, memory, states, chunks, state_store(chunks, scratch), weights=weights)
        early = units.embed if units.tied and units.embed.index in tile_plan.indices else None
        arena = GradientArena(units.all, memory, None if deferred else arena_bytes(units, settings), early=early)
        optimizer = undo.enter_context(OptimizerPool(settings.optimizer_threads, backend=settings.optimizer_backend))
        stalls = Stalls(device)
        ring = None
        if any(homes.flowing(unit) for unit in units.all):
            ring = StateRing(
                homes,
                optimizer,
                memory,
                ring_bytes=settings.state_ring_bytes,
                max_slots=settings.state_ring_slots,
                descending=not deferred,
                timeout_s=TIMEOUT_S,
            )
            undo.callback(ring.close)
        updates = UnitUpdates(homes, arena, optimizer, ring, stalls=stalls)
        source = _Source(homes, updates)
        skip = tile_plan.indices
        prefetcher = WeightPrefetcher(
            units, source, upload, holding.layer_buffers, skip, drive_lane=drive_lanes.get("weights"), stalls=stalls
        )
        sum_dtype = torch.float32 if settings.accumulate == "fp32" else dtype
        download = GradientDownload(
            units,
            arena,
            download_lane,
            make_room=updates.make_room,
            accumulate_dtype=sum_dtype,
            num_buffers=holding.ship_buffers,
            ends_in_parts=holding.ends_in_parts,
            part_numel=holding.part_numel,
            skip=skip,
            stalls=stalls,
            norm_per_unit=not deferred,
        )
        tiles = None
        if tile_plan.tiled:
            tiles, prefetcher, download = open_tiles(
                tile_plan,
                source,
                memory,
                upload,
                drive_lanes.get("tiles"),
                download_lane,
                prefetcher,
                download,
                sum_dtype,
            )
        runner = UnitRunner(
            units,
            vocab_size=loaded.facts.vocab_size,
            aux_coefficient=aux_coefficient,
            logits_chunk_bytes=settings.logits_chunk_bytes,
            compiled=compiled,
            tiles=tiles,
            head_loss=loaded.head_loss,
        )
        num_layers = len(units.layers)
        activations: Activations = DeviceActivations()
        where = settings.activations_on(device)
        if where == "ram":
            activations = RamActivations(memory, upload, download_lane, num_layers, lend=lender(units, arena, skip))
        elif where == "nvme":
            assert scratch is not None
            activations = NvmeActivations(scratch, upload, download_lane, num_layers)
            row_bytes = loaded.facts.hidden_size * dtype.itemsize
            activations.reserve([tokens * row_bytes for tokens in settings.step_tokens or ()])
        schedule = VerticalSchedule(runner, prefetcher, download, activations, device, settings.seed)
        engine = StreamEngine(
            loaded,
            settings,
            EngineParts(
                units,
                device,
                staging,
                memory,
                scratch,
                homes,
                upload,
                list(drive_lanes.values()),
                download_lane,
                optimizer,
                updates,
                prefetcher,
                download,
                schedule,
                stalls,
                tile_plan,
                arena,
                ring,
                packed_rows,
            ),
        )
        undo.pop_all()
        return engine


def _tile_plan(
    loaded: LoadedModel, units: Units, settings: StreamSettings, device: torch.device, trial: bool, *, compiled: bool
) -> TilePlan:
    device_bytes = free_device_bytes(device) if settings.device_bytes is None else settings.device_bytes
    sum_itemsize = 4 if settings.accumulate == "fp32" else units.embed.layout.dtype.itemsize
    plan = plan_tiles(
        units,
        settings.tiling,
        device_bytes,
        settings.tile_bytes,
        settings.num_layer_buffers,
        sum_itemsize,
        partial(work_of_step, loaded, settings, device, compiled=compiled),
    )
    if plan.tiled:
        logger.info("computed in tiles: %s", plan.reason)
        if trial:
            try_tiled_copy(loaded, build_stream_engine)
    return plan


def _compiled(
    loaded: LoadedModel,
    units: Units,
    settings: StreamSettings,
    device: torch.device,
    aux_coefficient: float,
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


def _prepare_model(units: Units, device: torch.device, *, expert_by_expert: bool) -> None:
    """Buffers (rotary frequencies and the like) stay on the device; layers are recomputed by the schedule only.

    `expert_by_expert`: a mixture's stacked weights are in tiles, so its experts must be computed one after another.
    """
    for module in units.parts.causal.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        config = getattr(module, "config", None)
        if expert_by_expert and getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        if getattr(module, "gradient_checkpointing", False):
            module.__dict__["gradient_checkpointing"] = False
