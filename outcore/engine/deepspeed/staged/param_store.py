"""The store of parameters on the drive: where every share lies in it, and shares on their way to and from host memory.

A share's place is whole blocks, one behind the other in the order in which the model is made. A transfer that failed
gives its memory back; one that hangs keeps it as long as the run goes on, because the drive may still be at it.

Memory of gradients, lent to parameters that live on the drive while no gradient is there.

From an update until a share's next gradient comes, the memory of its gradient has nothing to hold. The update leaves
the new parameters there too, so forward and backward of the first micro-batch of a step, and evaluations, find them in
RAM: with one micro-batch to a step nothing is read from the drive in a pass. It costs no memory, and a copy of 2 B per
parameter in RAM. What DeepSpeed sees is a share that is available; it is the same on every rank at every point of a
step, so ranks gather in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import format_gib, round_up
from outcore.engine.base import EngineError
from outcore.engine.deepspeed.environment import accelerator
from outcore.staging import Lease
from outcore.staging.pool import ALIGNMENT_BYTES
from outcore.storage import TensorStore, Transfer

logger = logging.getLogger(__name__)

STORE_NAME = "parameters"


@dataclass(frozen=True)
class ParamPlace:
    """Place of a share in the store."""

    offset_bytes: int
    numel: int
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Whole blocks."""
        return round_up(self.numel * self.dtype.itemsize, ALIGNMENT_BYTES)


class ShareBuffer:
    """Host memory for one share, on its way or in use. `lease` None: pageable."""

    def __init__(self, memory: torch.Tensor, lease: Lease | None) -> None:
        self.memory, self._lease = memory, lease

    def data(self, place: ParamPlace) -> torch.Tensor:
        """[numel] of the share."""
        return self.memory[: place.numel * place.dtype.itemsize].view(place.dtype)

    def release(self) -> None:
        """Safe to call twice."""
        if self._lease is not None and not self._lease.is_released:
            self._lease.release()


class ShareTransfer:
    """A share that is being read into, or written from, `buffer`."""

    def __init__(self, transfer: Transfer, buffer: ShareBuffer) -> None:
        self._transfer, self.buffer = transfer, buffer

    def done(self) -> bool:
        """Whether it ended, well or badly."""
        return self._transfer.done()

    def wait(self) -> ShareBuffer:
        """The buffer, once it is over. StorageError: it failed, and the buffer is released. TimeoutError."""
        try:
            self._transfer.wait(TIMEOUT_S)
        except TimeoutError:
            raise
        except BaseException:
            self.buffer.release()
            raise
        return self.buffer

    def settle(self, timeout_s: float) -> bool:
        """At the end of a run: wait and release the buffer, unless the transfer did not end: False."""
        try:
            self._transfer.wait(timeout_s)
        except Exception as error:  # the first failure was raised where it was waited for
            logger.error("a transfer of parameters failed at the end: %s", error)
        has_ended = self.done()
        if has_ended:
            self.buffer.release()
        return has_ended


class ParamStore:
    """Shares by `ds_id` in `store`, which is closed by whoever made it."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.capacity_bytes = store.spec(STORE_NAME).n_bytes
        self._end_bytes = 0
        self._places: dict[int, ParamPlace] = {}
        self.read_bytes = self.written_bytes = 0
        """Moved so far, but for shares that were brought into RAM for good."""

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, ds_id: int) -> ParamPlace:
        return self._places[ds_id]

    def get(self, ds_id: int) -> ParamPlace | None:
        """Place of a share on the drive; None when it does not."""
        return self._places.get(ds_id)

    def add(self, ds_id: int, numel: int, dtype: torch.dtype) -> ParamPlace:
        """A place for a new share. EngineError when the store is full."""
        place = ParamPlace(self._end_bytes, numel, dtype)
        if self._end_bytes + place.n_bytes > self.capacity_bytes:
            raise EngineError(
                f"the store of parameters on NVMe was made for {format_gib(self.capacity_bytes)} and the model needs "
                "more: more parameters were made than the model was said to have."
            )
        self._end_bytes += place.n_bytes
        self._places[ds_id] = place
        return place

    def element(self, ds_id: int, start: int) -> tuple[TensorStore, str, int]:
        """(store, name, byte offset) of the share's element `start`."""
        place = self._places[ds_id]
        return self._store, STORE_NAME, place.offset_bytes + start * place.dtype.itemsize

    def read(self, ds_id: int, buffer: ShareBuffer) -> ShareTransfer:
        """Start to fill `buffer` with the share."""
        place = self._places[ds_id]
        transfer = self._store.submit_read(STORE_NAME, buffer.memory[: place.n_bytes], place.offset_bytes)
        self.read_bytes += place.n_bytes
        return ShareTransfer(transfer, buffer)

    def write(self, ds_id: int, buffer: ShareBuffer) -> ShareTransfer:
        """Start to write the share from `buffer`."""
        place = self._places[ds_id]
        transfer = self._store.submit_write(STORE_NAME, buffer.memory[: place.n_bytes], place.offset_bytes)
        self.written_bytes += place.n_bytes
        return ShareTransfer(transfer, buffer)

    def take_out(self, ds_id: int, memory: torch.Tensor) -> None:
        """Read the share into `memory` (uint8) for good: it has no place any more."""
        place = self._places.pop(ds_id)
        self._store.submit_read(STORE_NAME, memory, place.offset_bytes).wait(TIMEOUT_S)


class Loans:
    """`mark_absent(param)`: the share is on the drive alone from now on."""

    def __init__(self, mark_absent: Callable[[Any], None]) -> None:
        self._mark_absent = mark_absent
        self._lent: dict[int, tuple[Any, torch.Tensor]] = {}

    def __contains__(self, ds_id: int) -> bool:
        return ds_id in self._lent

    def memory_of(self, ds_id: int) -> torch.Tensor:
        """Gradient memory that a share reuses, with its contents."""
        return self._lent[ds_id][1]

    def lend(self, param: Any, memory: torch.Tensor) -> None:
        """Let the rank's share of `param`, padding included, stay in `memory` for DeepSpeed until `reclaim`."""
        self._lent[param.ds_id] = (param, memory)
        param.ds_tensor.data = memory
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def reclaim(self, param: Any) -> None:
        """Take the memory back before a gradient is written to it. Does nothing if the share has none."""
        lent = self._lent.pop(param.ds_id, None)
        if lent is None:
            return
        if param.ds_status == ZeroParamStatus.INFLIGHT:  # being gathered for another use of the same weight
            accelerator().synchronize()
        if param.data.untyped_storage().data_ptr() == lent[1].untyped_storage().data_ptr():
            param.data = param.data.clone()  # DeepSpeed on the CPU gathers a single rank's share without a copy
        self._mark_absent(param)

    def reclaim_all(self) -> None:
        """Shares on the drive are about to change, or have changed."""
        for param, _ in list(self._lent.values()):
            self.reclaim(param)

    def clear(self) -> None:
        """At the end."""
        self._lent.clear()
