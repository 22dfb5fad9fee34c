"""Parameters on the drive: what DeepSpeed asks of its parameter swapper, through leases of the pinned pool.

Every share has a place in one store file (`param_store`). A share that is needed is leased exactly its size of pinned
memory, read, and given to DeepSpeed as the share's data until DeepSpeed has released it. `read_ahead` keeps the drive
busy with what DeepSpeed's trace needs next; reads are awaited one by one. With one rank a share whose read is over
counts as available, so that DeepSpeed's own gathering ahead takes it to the device; with several it does not, because
ranks whose drives differ would then gather in different orders. Writes are asynchronous; a later read of the
same share waits for them. A pool that is full never stops a run: read-ahead gives way first, then pageable memory takes
the place, said once.

A share to which the memory of its gradient is lent (`loans`) is not read.

Method names without underscore are DeepSpeed 0.19.8's (runtime/swap_tensor/partitioned_param_swapper.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from outcore.common.deadline import Deadline
from outcore.common.quantities import format_gib
from outcore.engine.deepspeed.environment import accelerator
from outcore.engine.deepspeed.staged.param_store import Loans, ParamStore, ShareBuffer, ShareTransfer
from outcore.sizing.staged import MIN_BYTES
from outcore.staging import PinnedPool, PinnedPoolFull
from outcore.staging.pool import pageable
from outcore.storage import TensorStore

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 30


class StagedParams:
    """`ahead_bytes` of the pool may hold shares that were read before they are needed. `element_bytes`: of the run's
    parameters."""

    def __init__(
        self, store: TensorStore, pool: PinnedPool, *, ahead_bytes: int, element_bytes: int, world_size: int
    ) -> None:
        self.store = ParamStore(store)
        self._pool, self._ahead_bytes = pool, ahead_bytes
        self._element_bytes = element_bytes
        self._is_alone = world_size == 1
        self._held: dict[int, ShareBuffer] = {}
        self._reading: dict[int, tuple[Any, ShareTransfer]] = {}
        self._writing: dict[int, ShareTransfer] = {}
        self._ahead: dict[int, Any] = {}
        self.loans = Loans(self._mark_absent)
        self._updated: set[int] = set()
        self._wait_written: Callable[[], None] | None = None
        """Shares that may still be on their way to the drive from the last update, and how to wait for them."""
        self._invalid = torch.ones(1)
        self._said_pageable = False

    def store_place(self, ds_id: int, start: int) -> tuple[TensorStore, str, int]:
        """(store, name, byte offset) of the share's element `start`."""
        return self.store.element(ds_id, start)

    # --- memory

    def _take(self, n_bytes: int, *, is_ahead: bool = False) -> ShareBuffer | None:
        """Memory for a share. Ahead: None when the pool is full; else whatever it takes."""
        while True:
            try:
                lease = self._pool.lease(n_bytes, "parameters from NVMe")
                return ShareBuffer(lease.tensor, lease)
            except PinnedPoolFull:
                if is_ahead:
                    return None
                if self._writing:
                    self._finish_write(next(iter(self._writing)))
                elif not self._give_up_one_ahead():
                    break
        if not self._said_pageable:
            self._said_pageable = True
            logger.warning(
                "parameters on NVMe: the staging pool of %s is full of parameters in use; pageable memory takes the "
                "rest, which crosses to the GPU more slowly. Raise outcore.staging_bytes, or lower "
                "stage3_max_live_parameters and stage3_max_reuse_distance.",
                format_gib(self._pool.capacity_bytes),
            )
        return ShareBuffer(pageable(n_bytes), None)

    def _give_up_one_ahead(self) -> bool:
        """Let go of the share that was read ahead last and is not on its way to the device."""
        for ds_id, param in reversed(list(self._ahead.items())):
            if ds_id in self._reading:
                buffer = self._reading.pop(ds_id)[1].wait()
            elif param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                buffer = self._held.pop(ds_id)
                self._mark_absent(param)
            else:
                del self._ahead[ds_id]
                continue
            buffer.release()
            del self._ahead[ds_id]
            return True
        return False

    # --- what DeepSpeed calls while it makes the model

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a share is worth a place on the drive."""
        count = int(param.ds_tensor.ds_numel if numel is None else numel)
        return count * self._element_bytes >= MIN_BYTES

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for a new share of `numel` elements, to be filled and swapped out."""
        place = self.store.add(param.ds_id, numel, param.dtype)
        buffer = self._take(place.n_bytes)
        assert buffer is not None
        self._held[param.ds_id] = buffer
        return buffer.data(place)

    def swap_out_and_release(
        self, params: list[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write shares behind and let go of their memory once they are written."""
        for param in params:
            buffer = self._held.pop(param.ds_id, None)
            if buffer is None:
                buffer = self._copy_of_lent(param)
            self._ahead.pop(param.ds_id, None)
            self._finish_write(param.ds_id)
            self._writing[param.ds_id] = self.store.write(param.ds_id, buffer)
            self._mark_absent(param)

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Bring a share into RAM for good."""
        self._finish_write(param.ds_id)
        self.store.take_out(param.ds_id, dest_buffer.view(-1).view(torch.uint8))

    def reserve_partitioned_swap_space(self, partition_num_elems: list[int]) -> None:
        """Do nothing: updated parameters are written from the optimizer's own memory."""

    # --- what DeepSpeed calls in a pass

    def available_swap_in_buffers(self) -> int:
        """DeepSpeed never has to count buffers."""
        return UNLIMITED

    def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Have shares in host memory: soon, or (`async_op` False) when it returns."""
        wanted = list({param.ds_id: param for param in params}.values())
        for param in wanted:
            self._start_read(param, is_ahead=async_op)
        if not async_op:
            for param in wanted:
                self._finish_read(param.ds_id)
                self._ahead.pop(param.ds_id, None)

    def synchronize_reads(self) -> None:
        """Every read under way is over."""
        for ds_id in list(self._reading):
            self._finish_read(ds_id)

    def synchronize_writes(self) -> None:
        """Every write under way is over. StorageError when one failed."""
        for ds_id in list(self._writing):
            self._finish_write(ds_id)

    def remove_partition_and_release_buffers(self, params: list[Any]) -> None:
        """Release the buffers of gathered shares. Shares in reused gradient memory stay there."""
        for param in params:
            if param.ds_id in self.loans:
                continue
            buffer = self._held.pop(param.ds_id, None)
            self._ahead.pop(param.ds_id, None)
            if buffer is not None:
                if param.ds_status == ZeroParamStatus.INFLIGHT:  # one that stays on the device, still being copied
                    accelerator().synchronize()
                buffer.release()
            self._mark_absent(param)

    def written_behind(self, ds_ids: set[int], wait: Callable[[], None]) -> None:
        """Note shares that are still being written by whoever updated them: `wait` is called before one is read or
        written."""
        self._updated, self._wait_written = ds_ids, wait

    def _wait_for_update(self, ds_id: int) -> None:
        if ds_id in self._updated:
            assert self._wait_written is not None
            self._wait_written()
            self._updated = set()

    def _copy_of_lent(self, param: Any) -> ShareBuffer:
        """Copy a share from reused gradient memory to staging memory, and give the gradient memory back."""
        place = self.store[param.ds_id]
        self._wait_for_update(param.ds_id)
        buffer = self._take(place.n_bytes)
        assert buffer is not None
        buffer.data(place).copy_(self.loans.memory_of(param.ds_id))
        self.loans.reclaim(param)
        return buffer

    # --- ahead

    def read_ahead(self, upcoming: Iterable[Any]) -> None:
        """Start reading what comes next, as far as the memory for it reaches; take over reads that are done."""
        if self._is_alone:
            self._poll()
        for ds_id in [
            ds_id for ds_id, param in self._ahead.items() if param.ds_status != ZeroParamStatus.NOT_AVAILABLE
        ]:
            del self._ahead[ds_id]  # it is on its way to the device by now
        used_bytes = sum(self.store[ds_id].n_bytes for ds_id in self._ahead)
        for param in upcoming:
            place = self.store.get(param.ds_id)
            if place is None or param.ds_id in self._held or param.ds_id in self._reading:
                continue
            if param.ds_tensor.status != PartitionedParamStatus.NOT_AVAILABLE:
                continue
            used_bytes += place.n_bytes
            if used_bytes > self._ahead_bytes or not self._start_read(param, is_ahead=True):
                return

    def _poll(self) -> None:
        for ds_id in [ds_id for ds_id, (_, moving) in self._reading.items() if moving.done()]:
            self._finish_read(ds_id)

    def drop_ahead(self) -> None:
        """Forget what was read ahead: shares on the drive are about to change."""
        while self._give_up_one_ahead():
            pass
        assert not self._reading, "a share is still being read for a module that was left"

    # --- transfers

    def _start_read(self, param: Any, *, is_ahead: bool) -> bool:
        """False when there was no room for it ahead of its time."""
        ds_id = param.ds_id
        if ds_id in self._held or ds_id in self._reading or ds_id in self.loans:
            return True
        self._wait_for_update(ds_id)
        buffer = self._take(self.store[ds_id].n_bytes, is_ahead=is_ahead)
        if buffer is None:
            return False
        self._finish_write(ds_id)
        self._reading[ds_id] = (param, self.store.read(ds_id, buffer))
        if is_ahead:
            self._ahead[ds_id] = param
        return True

    def _finish_read(self, ds_id: int) -> None:
        if ds_id not in self._reading:
            return
        param, moving = self._reading.pop(ds_id)
        buffer = self._held[ds_id] = moving.wait()
        param.ds_tensor.data = buffer.data(self.store[ds_id])
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def _finish_write(self, ds_id: int) -> None:
        pending = self._writing.pop(ds_id, None)
        if pending is not None:
            pending.wait().release()

    def _mark_absent(self, param: Any) -> None:
        param.ds_tensor.data = self._invalid.to(param.dtype)
        param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    # --- the end

    def close(self, deadline: Deadline | None = None) -> bool:
        """Wait for what is under way and give the memory back; the store is closed by whoever made it.

        False when a transfer did not end: its memory stays on lease, because it may still be written to."""
        deadline, is_idle = deadline or Deadline(), True
        for moving in (*self._writing.values(), *(moving for _, moving in self._reading.values())):
            if not moving.settle(deadline.left_s() if is_idle else 0.0):
                is_idle = False
        if not is_idle:
            deadline.expire()
        for buffer in self._held.values():
            buffer.release()
        self._writing.clear()
        self._reading.clear()
        self._held.clear()
        self._ahead.clear()
        self.loans.clear()
        return is_idle


def prefetch_by_trace(coordinator: Any, params: StagedParams) -> None:
    """Let DeepSpeed's coordinator read ahead by bytes along its trace, instead of one weight at a time."""
    prefix = "_PartitionedParameterCoordinator__"

    def read_ahead() -> None:
        if coordinator.is_complete_trace():
            params.read_ahead(entry.param for entry in getattr(coordinator, f"{prefix}param_queue"))

    assert hasattr(coordinator, f"{prefix}prefetch_nvme_param_partitions")
    setattr(coordinator, f"{prefix}prefetch_nvme_param_partitions", read_ahead)
