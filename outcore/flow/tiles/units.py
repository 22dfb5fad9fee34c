"""The units that are computed in tiles, as the rest of the engine sees them.

The schedule acquires a unit's slab, hands it to the runner, adds up gradients and ships them, tiled or not:
`TiledUnits` tells the runner what to bind in place of a unit's parameters; `TiledWeights` and `TiledDownload` stand
before the prefetcher and the gradient download, look after tiled units and pass everything else on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.common.deadline import Deadline
from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.gradients.download import GradientDownload
from outcore.engine.stream.gradients.tiles import TileGradients
from outcore.flow.parts.units import Unit
from outcore.flow.tiles.chunks import TokenChunks
from outcore.flow.tiles.matrix import TiledUnit
from outcore.flow.tiles.plan import TilePlan
from outcore.flow.tiles.ring import TileRing
from outcore.flow.tiles.weight import StreamedWeight, TileWork
from outcore.flow.weights.prefetch import WeightPrefetcher, WeightSource
from outcore.flow.weights.ranges import SlabRanges
from outcore.staging import DownloadLane, UploadLane
from outcore.staging.pool.host_memory import HostMemory


class TiledUnits:
    """By unit; see the module docstring."""

    def __init__(self, tiled: Sequence[TiledUnit], work: TileWork, chunk_bytes: int | None = None) -> None:
        self.work = work
        self.chunks = TokenChunks(chunk_bytes, work.gradients)
        self._tiled = {unit.unit.index: unit for unit in tiled}
        self._weights: dict[str, StreamedWeight] = {}
        for unit in tiled:
            for slot in unit.unit.layout.slots:
                if slot.name in unit.matrices:
                    self._weights[slot.name] = StreamedWeight(work, slot.shape, unit.matrices[slot.name])

    def __contains__(self, unit: Unit) -> bool:
        return unit.index in self._tiled

    def __getitem__(self, unit: Unit) -> TiledUnit:
        return self._tiled[unit.index]

    def tensors(self, unit: Unit, slab: torch.Tensor) -> list[Any]:
        """What stands for each parameter, in slot order: a view of the resident slab, or a `StreamedWeight`."""
        return self._bind(unit, self[unit].resident.views(slab), None)

    def leaves(self, unit: Unit, slab: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """The same for a backward, and those of them that autograd is asked for, as the accumulator wants them."""
        resident = self[unit].resident
        views = [
            view.detach().requires_grad_(slot.trainable)
            for slot, view in zip(resident.slots, resident.views(slab), strict=True)
        ]
        anchor = torch.zeros((), device=self.work.ring.device, requires_grad=True)
        return self._bind(unit, views, anchor), [view for view in views if view.requires_grad]

    def _bind(self, unit: Unit, views: Sequence[torch.Tensor], anchor: torch.Tensor | None) -> list[Any]:
        by_name: dict[str, Any] = dict(zip((slot.name for slot in self[unit].resident.slots), views, strict=True))
        for name in self[unit].matrices:
            by_name[name] = self._weights[name]
            self._weights[name].anchor = anchor
        return [by_name[slot.name] for slot in unit.layout.slots]

    def anchors(self, unit: Unit) -> list[torch.Tensor]:
        """What autograd must be asked about besides, so that gradients of an embedding's rows are computed."""
        found = [self._weights[name].anchor for name in self[unit].matrices]
        return [anchor for anchor in found[:1] if anchor is not None]

    def begin_forward(self, unit: Unit) -> None:
        """The runner starts on a unit, with one micro-batch."""
        self.work.ring.restart("forward")
        if self.work.gradients is not None:
            self.work.gradients.begin_forward(unit)

    def begin_backward(self, unit: Unit) -> None:
        """The runner starts on a unit's recomputation and backward, with one micro-batch."""
        self.work.ring.restart("backward")
        if self.work.gradients is not None:
            self.work.gradients.begin_backward(unit)


class TiledWeights(WeightPrefetcher):
    """The prefetcher of a model with tiled units: their use brings up the resident slab."""

    def __init__(
        self,
        inner: WeightPrefetcher,
        tiled: Sequence[TiledUnit],
        ranges: SlabRanges,
        ring: TileRing,
    ) -> None:
        self._inner, self._ranges, self._ring = inner, ranges, ring
        self.stalls = inner.stalls
        self._tiled = {unit.unit.index: unit for unit in tiled}
        numel = max((unit.resident.numel for unit in tiled), default=0)
        self._resident = torch.zeros(numel, dtype=tiled[0].unit.layout.dtype, device=ranges.lane.device)
        self._places: list[tuple[Unit, int | None]] = []
        """For each use, its unit and its place among the uses of units that come in whole."""

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes + self._ring.device_bytes + self._resident.nbytes

    def begin(self, sequence: Sequence[Unit]) -> None:
        whole = [unit for unit in sequence if unit.index not in self._tiled]
        self._places, at = [], 0
        for unit in sequence:
            self._places.append((unit, None if unit.index in self._tiled else at))
            at += unit.index not in self._tiled
        self._inner.begin(whole)

    def acquire(self, at: int) -> torch.Tensor:
        unit, place = self._places[at]
        if place is not None:
            return self._inner.acquire(place)
        tiled = self._tiled[unit.index]
        with self.stalls.until(f"small weights of {unit.name}", "pcie"):
            self._ranges.source.wait_ready(unit)
            self._ring.open(unit)
            uploads = [
                self._ranges.submit(unit, home.offset, home.end, self._resident[own.offset : own.end])
                for home, own in tiled.resident_homes
            ]
            for upload in uploads:
                upload.wait_stream()
        return self._resident[: tiled.resident.numel]

    def release(self, at: int) -> None:
        _, place = self._places[at]
        if place is None:
            self._ring.drop()
        else:
            self._inner.release(place)

    def abort(self, deadline: Deadline | None = None) -> None:
        deadline = deadline if self._ring.give_up(deadline) else Deadline(0.0)
        self._inner.abort(deadline)


class TiledDownload(GradientDownload):
    """The gradient download of a model with tiled units: of these, only resident parameters' are added up here."""

    def __init__(
        self,
        inner: GradientDownload,
        tiled: Sequence[TiledUnit],
        gradients: TileGradients,
        accumulate_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._inner, self._gradients, self._accumulate_dtype = inner, gradients, accumulate_dtype
        self._tiled = {unit.unit.index: unit for unit in tiled}
        self._device = device

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes + self._gradients.device_bytes

    def begin(self) -> None:
        self._inner.begin()
        self._gradients.begin()

    def accumulator(self, unit: Unit, *, only_once: bool = False) -> GradAccumulator:
        tiled = self._tiled.get(unit.index)
        if tiled is None:
            return self._inner.accumulator(unit, only_once=only_once)
        resident = tiled.resident
        flat = torch.zeros(resident.trainable_numel, dtype=self._accumulate_dtype, device=self._device)
        return GradAccumulator(resident, flat)

    def ship(self, unit: Unit, accumulator: GradAccumulator) -> Any:
        tiled = self._tiled.get(unit.index)
        return self._inner.ship(unit, accumulator) if tiled is None else self._gradients.finish(tiled, accumulator)

    def count(self, rounded: torch.Tensor) -> torch.Tensor:
        return self._inner.count(rounded)

    def norm_of(self, unit: Unit) -> float | None:
        return self._inner.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._inner.norm()


def open_tiles(
    plan: TilePlan,
    source: WeightSource,
    memory: HostMemory,
    upload: UploadLane,
    drive_lane: UploadLane | None,
    down: DownloadLane,
    prefetcher: WeightPrefetcher,
    download: GradientDownload,
    sum_dtype: torch.dtype,
) -> tuple[TiledUnits, TiledWeights, TiledDownload]:
    """What a plan with tiled units needs on the device, around the prefetcher and download for the others.

    `drive_lane`: for tiled units' parameters on NVMe, nobody else's; None when all are in RAM.
    """
    dtype = plan.tiled[0].unit.layout.dtype
    ranges = SlabRanges(source, upload, drive_lane)
    ring = TileRing(ranges, plan.tile_numel, dtype, stalls=prefetcher.stalls)
    gradients = TileGradients(plan.tiled, download, upload, down, memory)
    tiles = TiledUnits(plan.tiled, TileWork(ring, source, upload, gradients), plan.chunk_bytes)
    return (
        tiles,
        TiledWeights(prefetcher, plan.tiled, ranges, ring),
        TiledDownload(download, plan.tiled, gradients, sum_dtype, upload.device),
    )
