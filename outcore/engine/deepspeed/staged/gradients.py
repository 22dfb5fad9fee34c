"""Gradients on the drive: the shares that backward produces go there through lanes, and come back to be added to.

For runs whose RAM does not hold 2 bytes per parameter of gradients beside everything else. A share's gradient is
written behind when DeepSpeed has reduced it; with further micro-batches it is read back to the device, added to there
and written again, the arithmetic of gradients in RAM bit for bit. The optimizer's ring reads it with the states. The
norm is taken on the device on the way down, so nothing is read for it.

Cost per parameter and step in 16 bit with `a` micro-batches: 2a B written and 2a B read (`a - 1` times to be added to,
once by the optimizer). Device memory beside that of gradients in RAM: up to `FLIGHT_BYTES` each way. Nothing here is
ever read by a resume: a gradient lives within one step. A failed transfer is raised where the next one of its share is
asked for, at the latest by `settle` before the update."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outcore.common.deadline import Deadline
from outcore.common.quantities import MIB, round_up
from outcore.flow.weights import Scratch
from outcore.sizing.staged import GRADIENT_SLOT_BYTES, GRADIENT_SLOTS
from outcore.sizing.staged import MIN_BYTES as MIN_BYTES  # for whoever decides which live here
from outcore.staging import DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.staging.lanes import LaneTransfer
from outcore.staging.pool import pageable
from outcore.states import GradPlace
from outcore.storage import TensorSpec, TensorStore

logger = logging.getLogger(__name__)

FLIGHT_BYTES = 64 * MIB
"""Device memory for gradients on their way down, and as much for those read ahead; one share may always go."""
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class _Moving:
    """A share's gradient on the device, on its way."""

    value: torch.Tensor
    transfer: LaneTransfer


class StagedGradients:
    """One rank's. Its lanes lease their slots from `pool` now; `open` makes the store once the shares are known."""

    def __init__(self, pool: PinnedPool, device: torch.device) -> None:
        lane = LaneSettings(GRADIENT_SLOT_BYTES, GRADIENT_SLOTS)
        self._down = DownloadLane(pool, None, device, lane, "gradients to NVMe")
        try:
            self._up = UploadLane(pool, None, device, lane, "gradients from NVMe")
        except BaseException:
            self._down.close()
            raise
        self._device = self._down.device
        self._store: TensorStore | None = None
        self._dtype = torch.float32
        self._numel: dict[int, int] = {}
        self._writing: dict[int, _Moving] = {}
        self._ahead: dict[int, _Moving] = {}
        self._next: dict[int, int] = {}
        """Which share came after which, last time."""
        self._last: int | None = None
        self._seen: set[int] = set()
        """Shares of this micro-batch."""
        self._begun: set[int] = set()
        """Shares of this step."""
        self._micro_step = 0
        self._zeros: torch.Tensor | None = None
        self.read_bytes = self.written_bytes = 0
        """Moved by backward so far; what the optimizer reads is counted by its ring."""

    def open(self, scratch: Scratch, numel: Mapping[int, int], dtype: torch.dtype) -> None:
        """Reserve room for gradients of `dtype` with so many elements, by `ds_id`. EngineError without room."""
        self._numel, self._dtype = dict(numel), dtype
        if numel:
            specs = [TensorSpec(_name(ds_id), torch.uint8, (self._blocks(ds_id),)) for ds_id in numel]
            self._store = scratch.store("gradients", specs)

    def holds(self, ds_id: int) -> bool:
        """Whether the share's gradient lives here."""
        return ds_id in self._numel

    @property
    def nvme_bytes(self) -> int:
        """Gradients that live on the drive."""
        return sum(self._numel.values()) * self._dtype.itemsize

    def place(self, ds_id: int, start: int) -> GradPlace:
        """Place of the share's gradient from element `start` on, which begins a block."""
        assert self._store is not None
        return GradPlace(self._store, _name(ds_id), start * self._dtype.itemsize, self._dtype)

    # --- backward

    def add(self, ds_id: int, part: torch.Tensor, *, micro_step: int, is_first: bool, is_last: bool) -> torch.Tensor:
        """Take the gradient of one micro-batch; the sum so far, on the device, not to be changed.

        `is_first` begins the share's sum, whatever the drive has of it; after `is_last` no micro-batch follows.
        StorageError, TimeoutError."""
        self._follow(ds_id, micro_step)
        n_bytes = part.numel() * self._dtype.itemsize
        self._begun.add(ds_id)
        if is_first:
            self._make_room(n_bytes)
            value = torch.empty(part.shape, dtype=self._dtype, device=self._device).copy_(part)
        else:
            value = self._read_back(ds_id, part.numel())
            value.add_(part.to(self._dtype))
            self._make_room(n_bytes)
        self._end_write(ds_id)
        assert self._store is not None
        transfer = self._down.submit_stored(value.view(torch.uint8), self._store, _name(ds_id), label=_name(ds_id))
        self.written_bytes += n_bytes
        self._writing[ds_id] = _Moving(value, transfer)
        if micro_step > 0 or not is_last:
            self._read_ahead(ds_id, is_last=is_last)
        return value

    def _follow(self, ds_id: int, micro_step: int) -> None:
        """Learn the order in which backward produces shares."""
        if micro_step != self._micro_step:
            self._micro_step = micro_step
            self._seen.clear()
        if self._last is not None:
            self._next[self._last] = ds_id
        self._last = ds_id
        self._seen.add(ds_id)

    def _read_back(self, ds_id: int, numel: int) -> torch.Tensor:
        moving = self._ahead.pop(ds_id, None) or self._start_read(ds_id, numel)
        moving.transfer.wait_stream()
        return moving.value

    def _start_read(self, ds_id: int, numel: int) -> _Moving:
        self._end_write(ds_id)
        assert self._store is not None
        value = torch.empty(numel, dtype=self._dtype, device=self._device)
        transfer = self._up.submit_stored(self._store, _name(ds_id), value.view(torch.uint8), label=_name(ds_id))
        self.read_bytes += value.nbytes
        return _Moving(value, transfer)

    def _read_ahead(self, ds_id: int, *, is_last: bool) -> None:
        """Start reading the shares that came next last time, as far as the memory for it reaches."""
        room_bytes = FLIGHT_BYTES - sum(moving.value.nbytes for moving in self._ahead.values())
        for _ in range(len(self._numel)):
            following = self._next.get(ds_id)
            if following is None or (is_last and following in self._seen):
                return
            ds_id = following
            if ds_id in self._ahead:
                continue
            writing = self._writing.get(ds_id)
            room_bytes -= self._numel[ds_id] * self._dtype.itemsize
            if room_bytes < 0 or (writing is not None and not writing.transfer.done()):
                return
            if ds_id not in self._begun:
                return  # it starts a sum: what the drive has of it is of an earlier step
            self._ahead[ds_id] = self._start_read(ds_id, self._numel[ds_id])

    def _make_room(self, n_bytes: int) -> None:
        """So that no more than `FLIGHT_BYTES` of the device wait to be written."""
        waiting_bytes = sum(moving.value.nbytes for moving in self._writing.values())
        while self._writing and waiting_bytes + n_bytes > FLIGHT_BYTES:
            ds_id = next(iter(self._writing))
            waiting_bytes -= self._writing[ds_id].value.nbytes
            self._end_write(ds_id)

    def _end_write(self, ds_id: int) -> None:
        moving = self._writing.pop(ds_id, None)
        if moving is not None:
            moving.transfer.wait()

    # --- the update and the end

    def settle(self) -> None:
        """The drive has every gradient, and nothing is under way. StorageError when something failed."""
        for ds_id in list(self._writing):
            self._end_write(ds_id)
        while self._ahead:
            self._ahead.popitem()[1].transfer.wait()
        self._seen.clear()
        self._begun.clear()

    def read(self, ds_id: int) -> torch.Tensor:
        """The share's sum on the device, after `settle`."""
        return self._read_back(ds_id, self._numel[ds_id])

    def zeros(self, ds_id: int) -> torch.Tensor:
        """A gradient of zeros for the share, in host memory that is never written and so takes up none."""
        if self._zeros is None:
            numel = max(self._numel.values())
            self._zeros = pageable(numel * self._dtype.itemsize, touch=False).view(self._dtype)
        return self._zeros[: self._numel[ds_id]]

    def close(self, deadline: Deadline | None = None) -> bool:
        """Start nothing more, wait for what is under way, give the memory back; False if it hangs."""
        deadline, ended = deadline or Deadline(), True
        for lane in (self._down, self._up):
            try:
                lane.close(cancel=True, timeout_s=deadline.left_s())
            except (TimeoutError, RuntimeError) as error:
                logger.error("gradients on NVMe, at the end: %s", error)
                ended = False
                deadline.expire()
        self._writing.clear()
        self._ahead.clear()
        return ended

    def _blocks(self, ds_id: int) -> int:
        return round_up(self._numel[ds_id] * self._dtype.itemsize, BLOCK_BYTES)


def _name(ds_id: int) -> str:
    return f"gradient of parameter {ds_id}"
