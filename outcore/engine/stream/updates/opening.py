"""What turns gradients in RAM into weights, of an engine that is being built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from outcore.engine.stream.backward.saved import SavedForwards
from outcore.engine.stream.blueprint import Blueprint
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.ranks import RankHost
from outcore.engine.stream.ranks.published import PublishedUpdates
from outcore.engine.stream.updates.device_help import DeviceHelp, open_device_help
from outcore.engine.stream.updates.part_updates import TIMEOUT_S, PartUpdates
from outcore.engine.stream.updates.residents import Residents, open_residents
from outcore.flow.trace import Stalls
from outcore.flow.weights import Scratch
from outcore.optim import Backend, HomeJob, OptimizerPool, UpdatesFromHome, default_num_threads
from outcore.sizing.states import muon_matrices_under_way
from outcore.staging.pool import HostMemory
from outcore.states import Homes, StateRing


@dataclass(frozen=True)
class OpenedOptimizer:
    """Its threads, and who updates where."""

    pool: OptimizerPool
    ring: StateRing | None
    updates: PartUpdates
    residents: Residents
    device_help: DeviceHelp
    also_closed: Sequence[Callable[[float], object]]


def open_optimizer(
    plan: Blueprint,
    homes: Homes,
    arena: GradientArena,
    memory: HostMemory,
    scratch: Scratch | None,
    host: RankHost | None,
    *,
    backend: Backend,
    saved: SavedForwards,
    stalls: Stalls,
    undo: ExitStack,
) -> OpenedOptimizer:
    """Closed by `undo` where a later step of the building fails."""
    settings = plan.settings
    num_threads = settings.optimizer_threads
    if num_threads is None:
        num_threads = default_num_threads(cores_left=0 if scratch is None else 2)
    pool = undo.enter_context(OptimizerPool(num_threads, backend=backend))
    ring = None
    flowing = [homes.flowing(unit) for unit in plan.units.all]
    if any(flowing):
        ring = StateRing(
            homes,
            flowing,
            pool,
            memory,
            ring_bytes=settings.state_ring_bytes,
            max_slots=settings.state_ring_slots,
            descending=not plan.is_deferred,
            timeout_s=TIMEOUT_S,
            keep_param=arena.keep_weights,
        )
        undo.callback(ring.close)
    published = None
    if host is not None:
        published = PublishedUpdates(host, pool)
        undo.callback(published.close)
    device_help = open_device_help(plan, homes, arena, memory)
    residents = open_residents(plan, homes, saved, device_help.device_bytes)
    updates = PartUpdates(
        homes,
        arena,
        pool,
        ring,
        stalls=stalls,
        published=published,
        residents=residents,
        muon=_open_muon(plan),
        device_help=device_help,
    )
    return OpenedOptimizer(pool, ring, updates, residents, device_help, [] if published is None else [published.close])


def _open_muon(plan: Blueprint) -> UpdatesFromHome | None:
    if plan.settings.optimizer != "muon":
        return None
    chunks = [chunk for chunk in chain.from_iterable(plan.chunks.values()) if chunk.matrix is not None]
    sizes = [HomeJob.bytes_of(chunk.state_format, chunk.numel, plan.dtype.itemsize) for chunk in chunks]
    largest = max(sizes)
    return UpdatesFromHome(plan.device, largest, muon_matrices_under_way(len(sizes), largest))
