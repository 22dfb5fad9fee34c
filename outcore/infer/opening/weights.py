"""Weights brought to their homes by the placement: on the device for good, in RAM, or a share of each layer on NVMe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from outcore.common.quantities import MIB, format_gib, round_up
from outcore.flow import FixedWeights, ModelParts, Part
from outcore.flow.experts import ChosenLayers, ExpertCache, form_of, run_chosen
from outcore.flow.weights import (
    Expansion,
    InPlaceProducts,
    Scratch,
    SlabRanges,
    WeightHomes,
    WeightPrefetcher,
)
from outcore.infer.opening.arrival import ResidentWeights
from outcore.model.weights import WeightFeed
from outcore.sizing.inference import (
    InferenceLimits,
    InferenceNeeds,
    Placement,
)
from outcore.sizing.streaming import NUM_SLOTS, SLOT_BYTES
from outcore.sizing.tiles import Holding
from outcore.staging import LaneSettings, PinnedPool, PinnedPoolFull, UploadLane
from outcore.staging.pool import CudaRuntime, HostMemory, device_view, refusal_is_harmless
from outcore.staging.shared import Exchange, SharedHomes, SharedSegment, shared_bytes

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


@dataclass(frozen=True)
class HostShare:
    """This process among those of one host that answer with one copy of the weights in RAM, each over its own link."""

    rank: int
    world_size: int
    exchange: Exchange


class _PlacedMemory:
    """RAM for homes, but for parts that stay on the device memory there. `rows`: RAM that is there already."""

    def __init__(
        self,
        ram: HostMemory | SharedHomes,
        parts: Sequence[Part],
        resident: Sequence[Part],
        device: torch.device,
        rows: Mapping[str, torch.Tensor],
    ) -> None:
        self._ram, self._rows = ram, {f"parameters of {name}": memory for name, memory in rows.items()}
        self._resident, self._device = {f"parameters of {part.name}" for part in resident}, device
        self._elsewhere = {part.index for part in parts if part in resident or part.name in rows}

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Parts that stay on the device, or have RAM already, take nothing of the pool."""
        return self._ram.which_pinned([(index, 0 if index in self._elsewhere else size) for index, size in sizes])

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        if owner in self._rows:
            return self._rows[owner]
        if owner in self._resident:
            return torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
        return self._ram.take(n_bytes, owner, pinned=pinned, touch=touch)


def shared_limits(limits: InferenceLimits, needs: InferenceNeeds, share: HostShare) -> InferenceLimits:
    """Limits that hold for every process of `share`, with the weights once and the rest of RAM in equal parts.
    ValueError where RAM does not hold the weights."""
    found = share.exchange((limits.vram_bytes, limits.ram_bytes))
    vram = [vram for vram, _ in found if vram is not None]
    ram, weights = min(ram for _, ram in found), sum(part.size_bytes for part in needs.parts)
    if ram <= weights:
        raise ValueError(
            f"num_gpus {share.world_size} shares weights in RAM: they take {format_gib(weights)}, and "
            f"{format_gib(ram)} are free. Leave --num_gpus out, or pack them (--quantize)."
        )
    return replace(
        limits,
        vram_bytes=min(vram, default=None),
        reads_ram=False,
        ram_bytes=weights + (ram - weights) // share.world_size,
        has_nvme=False,
    )


@dataclass(frozen=True)
class OpenedWeights:
    """Opened weights of a model: their homes, and the lanes and caches that bring them to the device."""

    arrival: ResidentWeights
    homes: WeightHomes
    pool: PinnedPool | None
    lanes: dict[str, UploadLane]
    experts: ExpertCache | None = None
    chosen: ChosenLayers | None = None
    """Runs experts as they are chosen."""


def open_weights(
    units: ModelParts,
    placement: Placement,
    device: torch.device,
    settings: StagingSettings,
    feed: WeightFeed | None,
    undo: ExitStack,
    scratch: Scratch | None = None,
    share: HostShare | None = None,
    in_place: InPlaceProducts | None = None,
    rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> OpenedWeights:
    """Give every part its home; `undo` closes what was opened. `scratch`: on the drives, where weights spill to them.
    `in_place`: computes with parts where they are. `share`: homes in RAM are one copy for all its processes,
    which call this at once. `rows`: from `open_rows`. EngineError where a drive has no room."""
    home_of = {home.part: home for home in placement.parts}
    in_vram = [part for part in units.all if home_of[part.name].home == "vram"]
    stays = [part for part in units.all if part in in_vram or part.name in rows or _in_place(home_of, part, device)]
    travels = [part for part in units.all if part not in stays]
    cuts = {part.index: part.layout.home_numel for part in units.all}
    for part in travels:
        cuts[part.index] = _cut(part, home_of[part.name].ram_bytes)
    spills = [part for part in travels if cuts[part.index] < part.layout.home_numel]
    on_device = in_vram if device.type != "cpu" else []
    in_ram = [part for part in units.all if part not in on_device]
    apart = {part.index for part in units.expert_units.values()}
    pinned = {part.index: cuts[part.index] * part.layout.dtype.itemsize + MIB for part in travels}
    drives = {
        "drive": any(part.index not in apart for part in spills),
        "expert drive": any(part.index in apart for part in spills),
    }
    reading = [name for name, is_read in drives.items() if is_read]
    if travels:  # a slot holds one part at most
        largest = round_up(max(part.layout.home_bytes for part in travels), 4096)
        settings = replace(settings, slot_bytes=min(settings.slot_bytes, largest))
    homes_bytes = sum(pinned.values()) if share is None else 0
    pool, lanes = _open_lanes(bool(travels), reading, homes_bytes, device, settings, undo)
    if share is None:
        ram, owned = HostMemory(pool), None
    else:
        segment = SharedSegment(shared_bytes([part.layout.home_bytes for part in in_ram]), share.rank, share.exchange)
        limit = settings.staging_bytes or sum(pinned.values())
        runtime = CudaRuntime(device) if device.type == "cuda" and refusal_is_harmless() else None
        ram = SharedHomes(segment, limit, runtime)
        owned = None if share.rank == 0 else frozenset(part.index for part in on_device)
    undo.callback(ram.close)
    memory = _PlacedMemory(ram, units.all, on_device, device, rows)
    homes = WeightHomes(units.all, memory, cuts, scratch if spills else None, feed, owned=owned)
    homes.adopt()
    if share is not None:
        share.exchange(None)  # the values of all parts are there
    travelling = chosen = None
    is_expanded = in_place is None or device.type != "cpu" or not in_place.most_rows
    whole = [part for part in units.all if part.index not in apart]
    expansion = Expansion(units.layer_units if is_expanded else (), device)
    if any(part in whole for part in travels):
        travelling = WeightPrefetcher(
            units,
            FixedWeights(homes),
            lanes["upload"],
            Holding(frozenset(part.index for part in stays) | apart, settings.num_buffers),
            drive_lane=lanes.get("drive"),
            expansion=expansion,
        )
    on_cpu = [part for part in travels if home_of[part.name].home == "ram"] if placement.cpu_parts else []
    arrival = ResidentWeights(stays, homes, travelling, device, in_place, on_cpu, placement.on_cpu, expansion)
    arrival.multiply_there(whole)
    for part in units.all:
        if part.name in rows:
            arrival.read_there(part, homes.ram(part), device)
    if placement.experts is not None:
        ranges = SlabRanges(FixedWeights(homes), lanes["upload"], lanes.get("expert drive"))
        sizes = placement.expert_slots, placement.experts.group(placement.expert_slots)
        in_ram = {
            layer: homes.ram(part).nbytes // form_of(part).size_bytes for layer, part in units.expert_units.items()
        }
        arrival.experts = ExpertCache(units.expert_units, ranges, *sizes, device, arrival.stalls, in_ram)
        chosen = run_chosen(units, arrival.experts, None if is_expanded else in_place)
    return OpenedWeights(arrival, homes, pool, lanes, arrival.experts, chosen)


def open_rows(
    units: ModelParts, placement: Placement, device: torch.device, undo: ExitStack
) -> dict[str, torch.Tensor] | None:
    """Page-locked RAM for an embedding that the device reads there, by name, where the placement has one; None where
    the machine refuses it."""
    found, homes = {}, {home.part: home for home in placement.parts}
    with ExitStack() as own:
        for part in units.all:
            if homes[part.name].is_rows:
                pool = own.enter_context(PinnedPool(part.layout.home_bytes + MIB, device=device))
                try:
                    lease = pool.lease(part.layout.home_bytes, f"rows of {part.name}")
                    own.callback(lease.release)
                    device_view(lease.tensor, device)
                except (PinnedPoolFull, MemoryError):
                    return None
                found[part.name] = lease.tensor.zero_()
        undo.enter_context(own.pop_all())
    return found


def _in_place(home_of: dict, part: Part, device: torch.device) -> bool:
    """Whether the CPU computes it where it lives."""
    return device.type == "cpu" and home_of[part.name].home == "ram"


def _cut(part: Part, ram_bytes: int) -> int:
    numel = ram_bytes // part.layout.dtype.itemsize
    return part.layout.home_numel if numel >= part.layout.home_numel else numel // GRAIN_NUMEL * GRAIN_NUMEL


def _open_lanes(
    travels: bool,
    drives: Sequence[str],
    homes_bytes: int,
    device: torch.device,
    settings: StagingSettings,
    undo: ExitStack,
) -> tuple[PinnedPool | None, dict[str, UploadLane]]:
    if not travels:
        return None, {}
    slots = NUM_SLOTS + READ_AHEAD_SLOTS * len(drives)
    lane_bytes = slots * settings.slot_bytes
    wanted = lane_bytes + (homes_bytes if device.type == "cuda" else 0)
    limit = settings.staging_bytes or wanted
    pool = undo.enter_context(PinnedPool(max(lane_bytes, min(wanted, limit)), device=device))
    lanes = {"upload": undo.enter_context(UploadLane(pool, None, device, LaneSettings(settings.slot_bytes, NUM_SLOTS)))}
    for name in drives:  # experts' reads behind those of whole layers would wait for layers that wait for them
        of_drive = LaneSettings(settings.slot_bytes, READ_AHEAD_SLOTS)
        lanes[name] = undo.enter_context(UploadLane(pool, None, device, of_drive, owner=f"weights from NVMe ({name})"))
    return pool, lanes
