"""Ranges of a unit's slab on their way up: from RAM, from NVMe, or a part from each.

Tiles are ranges of slabs. What of a slab lives on NVMe comes through a lane of its own: whole units' reads are queued
in another one long before their buffers are free, and a tile behind them would wait for a layer that waits for it."""

from __future__ import annotations

from typing import Any

import torch

from outcore.flow.parts import Part
from outcore.flow.weights.prefetch import wait_for_drive
from outcore.flow.weights.source import WeightSource
from outcore.staging import LaneTransfer, UploadLane


class RangeUpload:
    """A range under way."""

    def __init__(self, unit: Part, from_ram: LaneTransfer | None, from_drive: LaneTransfer | None) -> None:
        self._unit, self._from_ram, self._from_drive = unit, from_ram, from_drive

    @property
    def is_from_drive(self) -> bool:
        return self._from_drive is not None

    def wait_stream(self) -> None:
        """Work queued on the current stream from now on waits for it. EngineError when it could not be read."""
        if self._from_ram is not None:
            self._from_ram.wait_stream()
        if self._from_drive is not None:
            wait_for_drive(self._unit, self._from_drive)

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until it is there; the bytes moved."""
        transfers = [transfer for transfer in (self._from_ram, self._from_drive) if transfer is not None]
        return sum(transfer.wait(timeout_s) for transfer in transfers)


class SlabRanges:
    """Brings up ranges of slabs. `drive_lane` None: every slab it is asked for lives in RAM."""

    def __init__(self, source: WeightSource, lane: UploadLane, drive_lane: UploadLane | None = None) -> None:
        self.source, self.lane, self.drive_lane = source, lane, drive_lane

    def submit(self, unit: Part, start: int, stop: int, out: torch.Tensor, *, after: Any = None) -> RangeUpload:
        """Elements [start, stop) of the unit's slab to `out` on the device; `after` as for a lane."""
        slab = self.source.ram(unit)
        in_ram = min(max(0, len(slab) - start), stop - start)
        from_ram = from_drive = None
        if in_ram:
            from_ram = self.lane.submit_host(slab[start : start + in_ram], out[:in_ram], after=after, label=unit.name)
        if in_ram < stop - start:
            place = self.source.stored(unit)
            assert place is not None and self.drive_lane is not None
            store, name = place
            offset_bytes = (start + in_ram - len(slab)) * slab.dtype.itemsize
            from_drive = self.drive_lane.submit_stored(
                store, name, out[in_ram:], offset_bytes=offset_bytes, after=after, label=unit.name
            )
        return RangeUpload(unit, from_ram, from_drive)
