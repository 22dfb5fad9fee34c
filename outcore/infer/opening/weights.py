"""Weights brought to their homes by the placement: on the device for good, in RAM, or a share of each layer on NVMe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from outcore.common.quantities import MIB
from outcore.flow import FixedWeights, ModelParts, Part, WeightArrival
from outcore.flow.weights import Scratch, WeightHomes, WeightPrefetcher
from outcore.infer.opening.arrival import ResidentWeights
from outcore.model.weights import WeightFeed
from outcore.sizing.inference import Placement
from outcore.sizing.streaming import NUM_SLOTS, SLOT_BYTES
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool import HostMemory

GRAIN_NUMEL = 1 << 20
"""Grain at which a layer is cut between RAM and NVMe: at multiples of so many elements."""
READ_AHEAD_SLOTS = 16


@dataclass(frozen=True)
class StagingSettings:
    """Pinned memory."""

    staging_bytes: int | None = None
    """Pinned memory at most; None: as much as the weights in RAM take, as far as the machine gives it."""
    slot_bytes: int = SLOT_BYTES
    num_buffers: int = 3


class _PlacedMemory(HostMemory):
    """RAM for homes, but for parts that stay on the device memory there."""

    def __init__(self, pool: PinnedPool | None, resident: Sequence[Part], device: torch.device) -> None:
        super().__init__(pool)
        self._resident, self._device = {f"parameters of {part.name}" for part in resident}, device
        self._indices = {part.index for part in resident}

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Parts that stay on the device take nothing of the pool."""
        return super().which_pinned([(index, 0 if index in self._indices else size) for index, size in sizes])

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        if owner in self._resident:
            return torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
        return super().take(n_bytes, owner, pinned=pinned, touch=touch)


@dataclass(frozen=True)
class OpenedWeights:
    """What a model's weights became."""

    arrival: WeightArrival
    homes: WeightHomes
    pool: PinnedPool | None
    lanes: dict[str, UploadLane]


def open_weights(
    units: ModelParts,
    placement: Placement,
    device: torch.device,
    settings: StagingSettings,
    feed: WeightFeed | None,
    undo: ExitStack,
    scratch: Scratch | None = None,
) -> OpenedWeights:
    """Give every part its home; `undo` closes what was opened. `scratch`: on the drives, where weights spill to them.
    EngineError where a drive has no room."""
    home_of = {home.part: home for home in placement.parts}
    stays = [part for part in units.all if home_of[part.name].home == "vram" or _in_place(home_of, part, device)]
    travels = [part for part in units.all if part not in stays]
    cuts = {part.index: part.layout.home_numel for part in units.all}
    for part in travels:
        cuts[part.index] = _cut(part, home_of[part.name].ram_bytes)
    spills = [part for part in travels if cuts[part.index] < part.layout.home_numel]
    pool, lanes = _open_lanes(travels, spills, cuts, device, settings, undo)
    memory = _PlacedMemory(pool, stays if device.type != "cpu" else (), device)
    undo.callback(memory.close)
    homes = WeightHomes(units.all, memory, cuts, scratch if spills else None, feed)
    homes.adopt()
    travelling = None
    if travels:
        travelling = WeightPrefetcher(
            units,
            FixedWeights(homes),
            lanes["upload"],
            settings.num_buffers,
            frozenset(part.index for part in stays),
            drive_lane=lanes.get("drive"),
        )
    return OpenedWeights(ResidentWeights(stays, homes, travelling, device), homes, pool, lanes)


def _in_place(home_of: dict, part: Part, device: torch.device) -> bool:
    """Whether the CPU computes it where it lives."""
    return device.type == "cpu" and home_of[part.name].home == "ram"


def _cut(part: Part, ram_bytes: int) -> int:
    numel = ram_bytes // part.layout.dtype.itemsize
    return part.layout.home_numel if numel >= part.layout.home_numel else numel // GRAIN_NUMEL * GRAIN_NUMEL


def _open_lanes(
    travels: Sequence[Part],
    spills: Sequence[Part],
    cuts: dict[int, int],
    device: torch.device,
    settings: StagingSettings,
    undo: ExitStack,
) -> tuple[PinnedPool | None, dict[str, UploadLane]]:
    if not travels:
        return None, {}
    slots = NUM_SLOTS + (READ_AHEAD_SLOTS if spills else 0)
    lane_bytes = slots * settings.slot_bytes
    homes = sum(cuts[part.index] * part.layout.dtype.itemsize + MIB for part in travels)
    wanted = lane_bytes + (homes if device.type == "cuda" else 0)
    limit = settings.staging_bytes or wanted
    pool = undo.enter_context(PinnedPool(max(lane_bytes, min(wanted, limit)), device=device))
    lanes = {"upload": undo.enter_context(UploadLane(pool, None, device, LaneSettings(settings.slot_bytes, NUM_SLOTS)))}
    if spills:
        lanes["drive"] = undo.enter_context(
            UploadLane(
                pool, None, device, LaneSettings(settings.slot_bytes, READ_AHEAD_SLOTS), owner="weights from NVMe"
            )
        )
    return pool, lanes
