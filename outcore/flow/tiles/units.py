"""The parts that are computed in tiles, as whoever runs a pass sees them.

A pass acquires a part's slab and hands it to the runner, tiled or not: `TiledParts` tells the runner what to bind in
place of a part's parameters; `TiledArrival` stands before the prefetcher, looks after tiled parts and passes everything
else on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.common.deadline import Deadline
from outcore.flow.parts import Part
from outcore.flow.tiles.chunks import TileSink, TokenChunks
from outcore.flow.tiles.matrix import TiledPart, TilePlan
from outcore.flow.tiles.ring import TileRing
from outcore.flow.tiles.weight import StreamedWeight, TileWork
from outcore.flow.weights import SlabRanges, WeightArrival, WeightSource
from outcore.staging import UploadLane


class TiledParts:
    """What stands for the parameters of each tiled part."""

    def __init__(self, tiled: Sequence[TiledPart], work: TileWork, chunk_bytes: int | None = None) -> None:
        self.work = work
        self.chunks = TokenChunks(chunk_bytes, work.gradients)
        self._tiled = {unit.unit.index: unit for unit in tiled}
        self._weights: dict[str, StreamedWeight] = {}
        for unit in tiled:
            for slot in unit.unit.layout.slots:
                if slot.name in unit.matrices:
                    self._weights[slot.name] = StreamedWeight(work, slot.shape, unit.matrices[slot.name])

    def __contains__(self, unit: Part) -> bool:
        return unit.index in self._tiled

    def __getitem__(self, unit: Part) -> TiledPart:
        return self._tiled[unit.index]

    def tensors(self, unit: Part, slab: torch.Tensor) -> list[Any]:
        """What stands for each parameter, in slot order: a view of the resident slab, or a `StreamedWeight`."""
        return self._bind(unit, self[unit].resident.views(slab), None)

    def leaves(self, unit: Part, slab: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """(what stands for each parameter in a backward, those of them that autograd is asked about)."""
        resident = self[unit].resident
        views = [
            view.detach().requires_grad_(slot.trainable)
            for slot, view in zip(resident.slots, resident.views(slab), strict=True)
        ]
        anchor = torch.zeros((), device=self.work.ring.device, requires_grad=True)
        return self._bind(unit, views, anchor), [view for view in views if view.requires_grad]

    def _bind(self, unit: Part, views: Sequence[torch.Tensor], anchor: torch.Tensor | None) -> list[Any]:
        by_name: dict[str, Any] = dict(zip((slot.name for slot in self[unit].resident.slots), views, strict=True))
        for name in self[unit].matrices:
            by_name[name] = self._weights[name]
            self._weights[name].anchor = anchor
        return [by_name[slot.name] for slot in unit.layout.slots]

    def anchors(self, unit: Part) -> list[torch.Tensor]:
        """What autograd must be asked about besides, so that gradients of an embedding's rows are computed."""
        found = [self._weights[name].anchor for name in self[unit].matrices]
        return [anchor for anchor in found[:1] if anchor is not None]

    def begin_forward(self, unit: Part) -> None:
        """The runner starts on a unit, with one micro-batch."""
        self.work.ring.restart("forward")
        if self.work.gradients is not None:
            self.work.gradients.begin_forward(unit)

    def begin_backward(self, unit: Part) -> None:
        """The runner starts on a unit's recomputation and backward, with one micro-batch."""
        self.work.ring.restart("backward")
        if self.work.gradients is not None:
            self.work.gradients.begin_backward(unit)


class TiledArrival:
    """The `WeightArrival` of a model with tiled parts: their use brings up the resident slab."""

    def __init__(self, inner: WeightArrival, tiled: Sequence[TiledPart], ranges: SlabRanges, ring: TileRing) -> None:
        self._inner, self._ranges, self._ring = inner, ranges, ring
        self.stalls = inner.stalls
        self._tiled = {unit.unit.index: unit for unit in tiled}
        numel = max((unit.resident.numel for unit in tiled), default=0)
        self._resident = torch.zeros(numel, dtype=tiled[0].unit.layout.dtype, device=ranges.lane.device)
        self._places: list[tuple[Part, int | None]] = []
        """For each use, its unit and its place among the uses of units that come in whole."""

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes + self._ring.device_bytes + self._resident.nbytes

    def begin(self, sequence: Sequence[Part]) -> None:
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
            self._ranges.source.wait_current(unit)
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


@dataclass(frozen=True)
class Tiles:
    """Tiled parts, and how their weights arrive beside those of the others."""

    parts: TiledParts
    arrival: TiledArrival


def open_tiles(
    plan: TilePlan,
    source: WeightSource,
    upload: UploadLane,
    drive_lane: UploadLane | None,
    inner: WeightArrival,
    gradients: TileSink | None = None,
) -> Tiles:
    """Buffers for a plan with tiled parts. `inner`: brings the other parts; `gradients`: takes those of tiles, None:
    nothing is trained; `drive_lane`: for tiled parts' parameters on NVMe, nobody else's; None when all are in RAM."""
    ranges = SlabRanges(source, upload, drive_lane)
    ring = TileRing(ranges, [matrix for unit in plan.tiled for matrix in unit.all_matrices], stalls=inner.stalls)
    parts = TiledParts(plan.tiled, TileWork(ring, source, upload, gradients), plan.chunk_bytes)
    return Tiles(parts, TiledArrival(inner, plan.tiled, ranges, ring))
