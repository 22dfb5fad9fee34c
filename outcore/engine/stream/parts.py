"""The engine's parts, made and closed together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S, Deadline
from outcore.common.quantities import format_gb, format_gib
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.gradients.download import GradientShipping
from outcore.engine.stream.residents import Residents
from outcore.engine.stream.schedule import VerticalSchedule
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.updates import PartUpdates
from outcore.flow import Flow
from outcore.flow.parts import ModelParts
from outcore.flow.tiles import TilePlan
from outcore.flow.trace import Stalls
from outcore.flow.weights import Scratch
from outcore.model.forward import LayerProducts
from outcore.optim import OptimizerPool
from outcore.staging import DownloadLane, PinnedPool, UploadLane
from outcore.staging.pool import HostMemory
from outcore.staging.shared import Ranks, SharedHomes
from outcore.states import Homes, StateRing

logger = logging.getLogger(__name__)


@dataclass
class EngineParts:
    """Objects that `build_stream_engine` puts together."""

    units: ModelParts
    device: torch.device
    staging: PinnedPool
    memory: HostMemory
    shared: SharedHomes | None
    """Homes that the ranks of a host have together; None for one rank."""
    scratch: Scratch | None
    """Files on the drive; None: everything lives in RAM."""
    homes: Homes
    upload: UploadLane
    drive_lanes: list[UploadLane]
    """Lanes for parameters on NVMe, of whole units and of tiles; none when all are in RAM."""
    download_lane: DownloadLane
    optimizer: OptimizerPool
    updates: PartUpdates
    download: GradientShipping
    flow: Flow
    schedule: VerticalSchedule
    stalls: Stalls
    tile_plan: TilePlan
    products: LayerProducts
    residents: Residents
    arena: GradientArena
    ring: StateRing | None
    """Ring of states on the drive; None: all states live in RAM."""
    ranks: Ranks
    """The other ranks of this host, if any."""
    save_buffer: torch.Tensor | None
    """Shared by several ranks: where a saved tensor is put together from what each has of it."""
    also_closed: Sequence[Callable[[float], object]] = ()
    """Parts of several ranks, which are closed with the rest within the given seconds."""
    packed_rows: str = ""
    """Text for people: how attention keeps packed documents apart; '' when it does not come up."""

    def describe(self, settings: StreamSettings, *, deferred: bool) -> str:
        """Text for people."""
        units = self.units.all
        total = sum(unit.layout.num_params for unit in units)
        trained = sum(slot.numel for unit in units for slot in unit.layout.trainable_slots)
        tied = ", embedding and head tied" if self.units.tied else ""
        homes = {"device": "on the device", "ram": "in RAM", "nvme": "on NVMe"}
        memories = [self.memory] if self.shared is None else [self.memory, self.shared]
        pinned_bytes = sum(memory.pinned_bytes for memory in memories)
        ahead_bytes = self.updates.ahead.seconds.size_bytes
        ram_bytes = pinned_bytes + sum(memory.pageable_bytes for memory in memories) - ahead_bytes
        pinned = f"{format_gib(pinned_bytes)} of it pinned" if pinned_bytes else "not pinned"
        threads = f"{self.optimizer.num_threads} thread{'s' if self.optimizer.num_threads > 1 else ''}"
        when = "under the next forward, after the global norm is known" if deferred else "as each gradient arrives"
        if ahead_bytes:
            when += f", or before it while most steps clip nothing ({format_gib(ahead_bytes)}, --ahead_gib)"
        return "\n".join(
            [
                f"stream: {len(self.units.layers)} layers of {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M "
                f"trained{tied}",
                f"  device: {format_gib(self.flow.arrival.device_bytes)} of weight buffers, "
                f"{format_gib(self.download.device_bytes)} of gradient buffers; activation checkpoints "
                f"{homes[settings.activations_on(self.device)]}",
                f"  RAM: {format_gib(ram_bytes)} of parameters, gradients and {settings.states} states, {pinned}",
                *self._packed_in_words(),
                *self._ranks_in_words(),
                *self._nvme_in_words(),
                f"  layers: {self._layers_in_words()}",
                *([f"  products: {words}"] if (words := self.products.words()) else []),
                *([f"  residents: {words}"] if (words := self.residents.words()) else []),
                *([f"  to fit the device: {less}"] if (less := self.tile_plan.holding.words()) else []),
                *([f"  packed rows: {self.packed_rows}"] if self.packed_rows else []),
                *([f"  tiles: {self.tile_plan.reason}"] if self.tile_plan.tiled else []),
                f"  updates: {when}, on {threads} ({self.optimizer.backend.name})",
            ]
        )

    def _packed_in_words(self) -> list[str]:
        slots = [slot for unit in self.units.layer_units for slot in unit.layout.slots]
        matrices = [slot for slot in slots if not slot.trainable and len(slot.shape) > 1]
        formats = [slot.packed.format.name for slot in matrices if slot.packed is not None]
        if not formats:
            return []
        left = len(matrices) - len(formats)
        why = f"; {left} stay as they are: routers, or rows that do not divide into blocks" if left else ""
        return [
            f"  packed: {len(formats)} of {len(matrices)} matrices of layers as {', '.join(sorted(set(formats)))}{why}"
        ]

    def _ranks_in_words(self) -> list[str]:
        if self.shared is None:
            return []
        return [
            f"  ranks: {self.ranks.world_size} on this host share {format_gib(self.shared.segment.size_bytes)} of it: "
            "parameters, gradients; each keeps and updates its share of the states"
        ]

    def _nvme_in_words(self) -> list[str]:
        if self.scratch is None:
            return []
        weights, lanes = self.homes.weights, self.drive_lanes
        num_slots = sum(lane.num_slots for lane in lanes)
        ahead = f", read ahead in {num_slots} slots of {format_gib(lanes[0].slot_bytes)}" if lanes else ""
        return [
            f"  NVMe: {format_gib(self.scratch.size_bytes)} reserved in {', '.join(map(str, self.scratch.folders))}; "
            f"{format_gib(weights.nvme_bytes)} of parameters{ahead}",
            *self._states_in_words(),
        ]

    def _states_in_words(self) -> list[str]:
        if self.ring is None:
            return []
        chunks = [chunk for unit in self.units.all for chunk in self.homes[unit].chunks]
        spilled = [chunk for chunk in chunks if chunk.on_nvme]
        moved = f"; so far {format_gb(self.ring.read_bytes)} read and {format_gb(self.ring.written_bytes)} written"
        moved = moved if self.ring.read_bytes else ""
        share = 100 * sum(chunk.numel for chunk in spilled) / sum(chunk.numel for chunk in chunks)
        size = format_gib(sum(chunk.moved_bytes for chunk in spilled))
        how = ", compressed without loss" if any(chunk.state_format.compressed for chunk in spilled) else ""
        return [
            f"  NVMe: {size} of states ({share:.0f} %){how}, through {self.ring.num_slots} slots of "
            f"{format_gib(self.ring.slot_bytes)}{moved}"
        ]

    def _layers_in_words(self) -> str:
        compiled = self.flow.runner.compiled
        if compiled is None or compiled.why_not:
            return f"eager ({compiled.why_not if compiled is not None else 'no compiler was given'})"
        return f"compiled, {compiled.num_kinds} kinds"

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Threads and lanes first, then the memory they used, within `timeout_s` in all.

        What cannot be closed is logged, and the rest is closed all the same: whatever ended the run must stay in sight.
        Where something is still under way by then the memory stays until the process ends, because it may be written
        to, and so do the scratch files that are in use.
        """
        deadline, is_idle = Deadline(timeout_s), True
        self.products.close()

        def close_lane(lane: UploadLane | DownloadLane) -> None:
            lane.close(timeout_s=min(lane.timeout_s, deadline.left_s()))

        closing: list[Callable[[], object]] = [
            lambda: self.updates.close(deadline.left_s()),
            *(partial(lambda close: close(deadline.left_s()), close) for close in self.also_closed),
            lambda: self.optimizer.close(deadline.left_s(), cancel=True),
            lambda: self.flow.arrival.abort(Deadline(min(self.upload.timeout_s, deadline.left_s()))),
            *(partial(close_lane, lane) for lane in (self.upload, *self.drive_lanes, self.download_lane)),
        ]
        if self.scratch is not None:
            scratch = self.scratch
            closing.append(lambda: scratch.close(deadline.left_s()))
        for close in closing:
            try:
                has_ended = close() is not False
            except (RuntimeError, OSError) as error:  # TimeoutError is one
                logger.error("while the engine was closed: %s", error)
                has_ended = False
            if not has_ended:
                is_idle = False
                deadline.expire()
        if not is_idle:
            self.staging.leave()
            logger.error("while the engine was closed: something is still under way, its memory stays as it is")
            return
        self.memory.close()
        if self.shared is not None:
            self.shared.close()
        try:
            self.staging.close()
        except RuntimeError as error:
            logger.error("while the engine was closed: %s", error)
