"""From a loaded model to a running streaming engine: take it apart, give every part its home, open the lanes.

`blueprint` decides, and nothing is open until it has. What is opened from then on is closed again, the last first, when
a later step fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import torch

from outcore.engine.stream.activations.memory import Activations, open_activations
from outcore.engine.stream.backward.head import StreamedHeadGradient
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.blueprint import Blueprint, draw_blueprint, prepare_model
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.gradients.download import GradientDownload, GradientShipping
from outcore.engine.stream.gradients.tiles import TiledDownload, TileGradients
from outcore.engine.stream.parts import EngineParts
from outcore.engine.stream.ranks import ALONE, RankHost, RankPlace, agreed, open_host
from outcore.engine.stream.ranks.host import PublishedUpdates
from outcore.engine.stream.ranks.reduce import GradientReducer, ReducedDownload
from outcore.engine.stream.residents import ResidentDownload, Residents, open_residents
from outcore.engine.stream.schedule import VerticalSchedule
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.updates import (
    AheadUpdater,
    DriveUpdater,
    MatrixUpdater,
    PartUpdates,
    RamUpdater,
    UpdatedWeights,
)
from outcore.flow import Flow, let_segments_grow
from outcore.flow.layers import Head, LongRows, PartRunner, RouterTaps, RowHomes
from outcore.flow.tiles import TiledParts, open_tiles
from outcore.flow.trace import Stalls
from outcore.flow.weights import Scratch, WeightArrival, WeightHomes, WeightPrefetcher
from outcore.model import LoadedModel
from outcore.model.adapters import dora_lengths
from outcore.optim import Backend, MatrixUpdates, OptimizerPool, default_num_threads, open_backend
from outcore.sizing.streaming import ring_share_bytes
from outcore.staging import DownloadLane, LaneSettings, PinnedPool, UploadLane, whole_device
from outcore.staging.pool import HomeMemory, HostMemory, PinnedGrant
from outcore.staging.shared import Alone, Ranks
from outcore.states import Homes, RingSize, SecondHomes, StateRing, open_store
from outcore.storage import StorageEngine


def build_stream_engine(
    loaded: LoadedModel,
    settings: StreamSettings,
    *,
    device: torch.device | str,
    pinned_grant: PinnedGrant | bool = True,
    trial: bool = True,
    storage: StorageEngine | None = None,
    place: RankPlace = ALONE,
) -> StreamEngine:
    """An engine that trains `loaded` layer by layer on `device` ("cuda" or "cpu").

    `loaded` comes from `load_model(..., device="cpu")` with its parameters whole and on the CPU in the type of the run
    (bf16, fp16 or fp32), or from `load_model(..., lazy=True)`; they become views of the engine's homes. Its own
    activation checkpointing is switched off: every layer is recomputed anyway. `pinned_grant`: as `probe` of
    `PinnedPool` (what an earlier probe found; True asks a child process; False does not ask). `trial`: first compare a
    tiny copy of the model, run unit by unit, with plain autograd. `storage`: whose threads move bytes from and to
    drives; None opens one. `place`: among several ranks of one host, each of which calls this at once for one engine.

    Raises StreamUnsupported (a ValueError) naming why this model cannot be streamed, before memory is spent; ValueError
    for settings; PinnedPoolFull or RuntimeError when the machine does not give the staging memory, EngineError when the
    drives have no room.
    """
    device = whole_device(device)
    settings = agreed(settings, device, place)
    plan = draw_blueprint(loaded, settings, device, trial=trial, build=build_stream_engine, place=place)
    let_segments_grow(device)
    prepare_model(plan.units, device, expert_by_expert=bool(plan.tile_plan.tiled))
    with ExitStack() as undo:
        undo.callback(plan.products.close)
        ground = _open_ground(plan, pinned_grant, storage, undo)
        host, shared = ground.host, ground.shared
        weights = WeightHomes(
            plan.units.all,
            shared,
            plan.cuts,
            ground.scratch,
            loaded.feed,
            lengths=dora_lengths(loaded.model),
            owned=None if place.rank == 0 else frozenset(),
        )
        drive_lanes = _open_drive_lanes(plan, ground, undo)
        stored_states = open_store(chain.from_iterable(plan.chunks.values()), ground.scratch)
        backend = open_backend(settings.optimizer_backend)
        homes = Homes(
            plan.units.all,
            ground.memory,
            plan.states,
            plan.chunks,
            stored_states,
            weights=weights,
            backend=backend,
            adopted=lambda: ground.ranks.barrier("parameters loaded by rank 0", timeout_s=math.inf),
        )
        stalls, arena, residents = Stalls(device), _gradient_arena(plan, ground), open_residents(plan, homes)
        optimizer = _open_optimizer(plan, ground, homes, arena, stalls, backend, residents, undo)
        traffic = _traffic(plan, ground, drive_lanes, homes, arena, optimizer, stalls, undo)
        flow = _flow(plan, ground, traffic)
        lanes = (ground.upload, ground.download)
        checkpoints = open_activations(plan, ground.memory, lanes, ground.scratch, arena, flow.runner.expect)
        schedule = _schedule(plan, flow, traffic.download, checkpoints)
        parts = EngineParts(
            units=plan.units,
            device=device,
            staging=ground.staging,
            memory=ground.memory,
            scratch=ground.scratch,
            homes=homes,
            upload=ground.upload,
            drive_lanes=list(drive_lanes.values()),
            download_lane=ground.download,
            optimizer=optimizer.pool,
            updates=optimizer.updates,
            download=traffic.download,
            flow=flow,
            schedule=schedule,
            stalls=stalls,
            tile_plan=plan.tile_plan,
            products=plan.products,
            residents=residents,
            arena=arena,
            ring=optimizer.ring,
            ranks=ground.ranks,
            shared=None if host is None else host.homes,
            save_buffer=None if host is None else host.slots_memory,
            also_closed=[*optimizer.also_closed, *traffic.also_closed],
            packed_rows=plan.packed_rows,
        )
        ground.ranks.barrier("engine built", timeout_s=math.inf)
        engine = StreamEngine(loaded, settings, parts)
        undo.pop_all()
        return engine


@dataclass(frozen=True)
class _Ground:
    """Foundations of the engine: parts, memory, drive."""

    staging: PinnedPool
    memory: HostMemory
    scratch: Scratch | None
    upload: UploadLane
    download: DownloadLane
    host: RankHost | None
    """Ranks of this host; None: this is the only rank."""

    @property
    def ranks(self) -> Ranks:
        return Alone() if self.host is None else self.host.group

    @property
    def shared(self) -> HomeMemory:
        """Memory where parameters and gradients live."""
        return self.memory if self.host is None else self.host.homes


def _open_ground(
    plan: Blueprint, pinned_grant: PinnedGrant | bool, storage: StorageEngine | None, undo: ExitStack
) -> _Ground:
    settings, device = plan.settings, plan.device
    place, own_bytes = plan.place, plan.placed.own_pinned
    combined_bytes = settings.lane_bytes // 2 if settings.write_combined else 0
    with plan.compiled.loading_compiler():  # pinning waits for the kernel meanwhile
        pool = PinnedPool(own_bytes, device=device, write_combined_bytes=combined_bytes, probe=pinned_grant)
    staging = undo.enter_context(pool)
    scratch = None
    if paths := settings.nvme_paths:
        scratch = undo.enter_context(
            Scratch(
                paths if place.is_alone else [paths[place.rank % len(paths)]],
                storage,
                settings.nvme_checksums,
                rank=place.rank,
                num_ranks=place.world_size,
                storage=settings.storage,
            )
        )
    slots = LaneSettings(settings.slot_bytes, settings.num_slots)
    only_written = replace(slots, write_combined=settings.write_combined)
    upload = undo.enter_context(UploadLane(staging, None, device, only_written))
    download = undo.enter_context(DownloadLane(staging, None, device, slots))
    memory = HostMemory(staging)
    undo.callback(memory.close)
    host = None
    if not place.is_alone:
        weight_bytes = [plan.cuts[unit.index] * unit.layout.dtype.itemsize for unit in plan.units.all]
        pin_bytes = settings.staging_bytes - place.world_size * own_bytes
        slots_bytes = plan.placed.rank_slots // place.world_size
        host = undo.enter_context(open_host(place, plan.units, weight_bytes, slots_bytes, pin_bytes, device))
    return _Ground(staging, memory, scratch, upload, download, host)


def _open_drive_lanes(plan: Blueprint, ground: _Ground, undo: ExitStack) -> dict[str, UploadLane]:
    """Open lanes for parameters on NVMe, of whole units ("weights") and of tiles ("tiles"); only those that have
    work."""
    settings, tiled = plan.settings, plan.tile_plan.indices
    lanes = {"weights": bool(plan.on_nvme - tiled), "tiles": bool(plan.on_nvme & tiled)}
    free_bytes = ground.staging.free_bytes  # half of it for reading ahead where homes would take all
    ahead = min(settings.weight_read_ahead_bytes, max(free_bytes - plan.placed.shared, free_bytes // 2))
    num_slots = max(2, ahead // max(1, sum(lanes.values())) // settings.slot_bytes)
    direct = settings.storage.is_direct
    return {
        what: undo.enter_context(
            UploadLane(
                ground.staging,
                None,
                plan.device,
                LaneSettings(settings.slot_bytes, 1 if direct else num_slots, direct=direct),
                owner=f"{what} from NVMe",
            )
        )
        for what, is_needed in lanes.items()
        if is_needed
    }


def _gradient_arena(plan: Blueprint, ground: _Ground) -> GradientArena:
    units = plan.units
    early = units.embed if units.tied and units.embed.index in plan.tile_plan.indices else None
    limit_bytes = None if plan.placed.has_homes else plan.placed.gradients
    return GradientArena(units.all, ground.shared, limit_bytes, early=early, weights_from=plan.waits)


@dataclass(frozen=True)
class _Optimizer:
    """Objects that turn gradients in RAM into weights."""

    pool: OptimizerPool
    ring: StateRing | None
    updates: PartUpdates
    also_closed: Sequence[Callable[[float], object]]


def _open_optimizer(
    plan: Blueprint,
    ground: _Ground,
    homes: Homes,
    arena: GradientArena,
    stalls: Stalls,
    backend: Backend,
    residents: Residents,
    undo: ExitStack,
) -> _Optimizer:
    settings = plan.settings
    num_threads = settings.optimizer_threads
    if num_threads is None:
        num_threads = default_num_threads(cores_left=0 if ground.scratch is None else 2)
    pool = undo.enter_context(OptimizerPool(num_threads, backend=backend))
    muon = MatrixUpdates(plan.device) if settings.optimizer == "muon" else None
    ring = None
    flowing = [homes.flowing(unit) for unit in plan.units.all]
    if any(flowing):
        ring = StateRing(
            homes,
            flowing if plan.is_deferred else flowing[::-1],  # immediate updates come from the last unit on
            pool,
            ground.memory,
            RingSize(ring_share_bytes(settings.state_ring_bytes, plan.place.world_size), settings.state_ring_slots),
            keep_param=arena.keep_weights,
            muon=muon,
        )
        undo.callback(ring.close)
    published = None
    if ground.host is not None:
        published = PublishedUpdates(ground.host, pool)
        undo.callback(published.close)
    early = [] if ring is not None else [plan.in_order[number] for number in plan.placed.ahead]
    seconds = SecondHomes(homes, early, ground.memory)
    updates = PartUpdates(
        homes,
        arena,
        AheadUpdater(RamUpdater(homes, pool), seconds),
        residents=residents,
        matrices=None if muon is None else MatrixUpdater(homes, muon),
        drive=None if ring is None else DriveUpdater(homes, ring, pool),
        published=published,
        stalls=stalls,
    )
    return _Optimizer(pool, ring, updates, [] if published is None else [published.close])


@dataclass(frozen=True)
class _Traffic:
    """Objects that bring weights to the device and gradients from it."""

    arrival: WeightArrival
    download: GradientShipping
    tiles: TiledParts | None
    """Parts computed in tiles; None: every part comes in whole."""
    also_closed: Sequence[Callable[[float], object]]


def _traffic(
    plan: Blueprint,
    ground: _Ground,
    drive_lanes: dict[str, UploadLane],
    homes: Homes,
    arena: GradientArena,
    optimizer: _Optimizer,
    stalls: Stalls,
    undo: ExitStack,
) -> _Traffic:
    holding, updates = plan.tile_plan.holding, optimizer.updates
    source = UpdatedWeights(homes, updates, arena)
    prefetcher = WeightPrefetcher(
        plan.units,
        source,
        ground.upload,
        holding,
        drive_lane=drive_lanes.get("weights"),
        stalls=stalls,
        resident=updates.residents.slab,
    )
    host, reducer = ground.host, None
    if host is not None:
        reducer = GradientReducer(host, arena, optimizer.pool)
        undo.callback(reducer.close)
    download = GradientDownload(
        plan.units,
        arena if host is None else host.slots,
        ground.download,
        holding,
        make_room=updates.make_room if reducer is None else reducer.make_room,
        accumulate_dtype=plan.sum_dtype,
        stalls=stalls,
        norm_per_unit=not plan.is_deferred and host is None,
    )

    def whole(shipping: GradientShipping) -> GradientShipping:
        return shipping if reducer is None else ReducedDownload(shipping, reducer)

    also_closed = [] if reducer is None else [reducer.close]
    if not plan.tile_plan.tiled:
        return _Traffic(prefetcher, whole(ResidentDownload(download, updates.residents)), None, also_closed)
    tiled = plan.tile_plan.tiled
    gradients = TileGradients(tiled, download, ground.upload, ground.download, ground.memory)
    tiles = open_tiles(plan.tile_plan, source, ground.upload, drive_lanes.get("tiles"), prefetcher, gradients)
    shipping = TiledDownload(download, tiled, gradients, plan.sum_dtype, plan.device)
    return _Traffic(tiles.arrival, whole(shipping), tiles.parts, also_closed)


def _flow(plan: Blueprint, ground: _Ground, traffic: _Traffic) -> Flow:
    taps = RouterTaps(plan.units) if plan.aux_coefficient else None
    holding = plan.tile_plan.holding
    homes = RowHomes(ground.memory, (ground.upload, ground.download), plan.device, near=holding.near)
    long_rows = LongRows(plan.units, holding.tile_tokens, homes, plan.compiled) if holding.tile_tokens else None
    runner = PartRunner(plan.units, compiled=plan.compiled, tiles=traffic.tiles, taps=taps, long_rows=long_rows)
    head = Head(
        runner,
        vocab_size=plan.loaded.facts.vocab_size,
        logits_chunk_bytes=plan.settings.logits_chunk_bytes,
        head_loss=plan.loaded.head_loss,
    )
    return Flow(runner, head, traffic.arrival, plan.device)


def _schedule(plan: Blueprint, flow: Flow, download: GradientShipping, activations: Activations) -> VerticalSchedule:
    head = StreamedHeadGradient(
        flow.head,
        aux_coefficient=plan.aux_coefficient,
        is_aux_whole=plan.loaded.abilities.terms.per_micro_batch,
        compiled=not plan.compiled.why_not,
    )
    return VerticalSchedule(
        flow,
        BackwardRunner(flow.runner),
        head,
        download,
        activations,
        plan.settings.seed,
        plan.place.rank,
        plan.place.world_size,
    )
