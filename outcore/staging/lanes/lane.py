"""Lanes, the ways of bytes between homes (drive or RAM) and the device, through pinned slots of their own.

Purpose: keep the drive, the link and the device busy at the same time, and deliver failures where data is awaited. A
lane leases its slots from the pool once, has its own CUDA streams and threads (`lane_driver` has the algorithm), and
takes any number of transfers, which flow back to back in order of submission. Small ones share a slot; pinned RAM needs
no slot and is copied directly; with `direct` the engine moves device memory itself (kvikio, by GPUDirect Storage or
not). Fallback: on the CPU the slots are plain memory and copies are memcpy, the logic is the same.

Ordering: `after` says when the device memory is ready: None for "when all the work queued so far on the caller's
current stream is done" (always right, but a prefetch then waits behind the compute that is queued), an event,
`AT_ONCE`, or, for uploads from a drive, a `Gate` that is opened later. Reads do not wait for it, only the copies do.
Lifetime: the lane keeps both ends alive until the transfer has ended; their contents must be left alone until `wait`,
or in stream order after `wait_stream`. Transfers are not ordered among each other: where two touch the same bytes, wait
for the first.

`UploadLane` and `DownloadLane`: the two directions of a `Lane` (see there for ordering and lifetime).

`label` says whose bytes they are ("layer 3"), in messages and in a trace."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_gib, format_s
from outcore.staging.lanes.copy_streams import CopyStreams, open_streams, whole_device
from outcore.staging.lanes.driver import LaneDriver
from outcore.staging.lanes.homes import FileHome, HostCopier, RamHome, StoreHome
from outcore.staging.lanes.slots import Gate, LaneClock, SlotRing
from outcore.staging.lanes.transfer import LaneClosed, LaneTransfer, Unwatched
from outcore.staging.pool import ALIGNMENT_BYTES, Lease, PinnedPool
from outcore.storage import BlockFile, StorageEngine
from outcore.storage.store import TensorStore

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0  # the process is ending: a copy that hangs must not hold it up
HOME_COPY_BYTES = 64 * MIB
"""Piece of a copy between pinned RAM and the device: few calls a layer, and at 12 GB/s other lanes get between
after 5 ms."""

AT_ONCE: Literal["at once"] = "at once"
"""For `after=`: the device memory is ready, wait for nothing."""
After = Any
"""Condition that a transfer waits for: None, AT_ONCE, an event (torch.cuda.Event) that has been recorded, or a Gate."""


@dataclass(frozen=True)
class LaneSettings:
    """Settings of a lane: slots, streams, threads. Raises ValueError for a combination that cannot work."""

    slot_bytes: int
    """A multiple of 4 KiB."""
    num_slots: int = 2
    """Two overlap I/O and copy, four to eight smooth a drive."""
    write_combined: bool = False
    """Slots that the CPU only writes: uploads."""
    num_streams: int = 1
    """CUDA streams of the lane; slots take turns on them."""
    timeout_s: float = TIMEOUT_S
    """Limit of every wait that is not given one."""
    copy_threads: int | None = None
    """Threads that copy between pageable RAM and slots. None: `sizing.streaming`."""
    direct: bool = False
    """Transfers of files skip the slots: the engine (the store's own, for a store) moves device memory itself."""

    def __post_init__(self) -> None:
        if self.slot_bytes <= 0 or self.slot_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"slot_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {self.slot_bytes}")
        if self.num_slots < 1:
            raise ValueError(f"a lane needs at least one slot (two to overlap), got {self.num_slots}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


class Lane:
    """Base of `UploadLane` and `DownloadLane`; not used by itself.

    - `pool`, `owner`: where the slots are leased now, until `close` (PinnedPoolFull when they do not fit).
    - `engine`: moves file bytes; None for a lane that only serves RAM homes.
    - `streams`: other copy streams than the device's own (tests)."""

    direction = "lane"

    def __init__(
        self,
        pool: PinnedPool,
        engine: StorageEngine | None,
        device: torch.device | str,
        settings: LaneSettings,
        owner: str = "",
        *,
        streams: CopyStreams | None = None,
    ) -> None:
        if settings.write_combined and self.direction == "download":
            raise ValueError("a download lane cannot be write-combined: the CPU reads its slots, at about 2 GB/s then")
        if settings.direct and engine is not None:
            _check_direct(engine)
        self.device = whole_device(device)
        self.owner = owner or self.direction
        self.settings = settings
        self.slot_bytes, self.num_slots = settings.slot_bytes, settings.num_slots
        self.timeout_s, self.direct = settings.timeout_s, settings.direct
        self.streams = streams or open_streams(self.device, settings.num_streams)
        self.clock = LaneClock()
        self.moved_bytes = 0
        """Bytes of the transfers that ended well."""
        self._engine = engine
        self._outstanding: set[LaneTransfer] = set()
        self._settled = threading.Condition()
        self._turns = itertools.count()
        self._unwatched: deque[LaneTransfer] = deque()
        self._closed = False
        self._broken: BaseException | None = None
        self._copier = HostCopier(settings.copy_threads, self.owner, settings.num_slots)
        self._leases = _lease_slots(pool, settings, self.owner)
        self._driver = LaneDriver(
            self.owner,
            self.direction == "upload",
            SlotRing(self._leases),
            self.streams,
            self.clock,
            self._settle,
            self._break,
        )
        atexit.register(self._close_at_exit)

    @property
    def write_combined(self) -> bool:
        """True when the slots really are write-combined, which CUDA may refuse."""
        return all(lease.write_combined for lease in self._leases)

    def describe(self) -> str:
        """The lane's state in half a sentence, for messages."""
        return (
            f"{self.direction} lane {self.owner!r} ({self.num_slots} slots of {format_gib(self.slot_bytes)}) "
            f"has {len(self._outstanding)} transfers under way"
        )

    def drain(self, timeout_s: float | None = None) -> None:
        """Block until no transfer is in flight. Failures stay with their transfers. Raises TimeoutError."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._watch_all()
        with self._settled:
            if not self._settled.wait_for(lambda: not self._outstanding, limit_s):
                some = ", ".join(transfer.what for transfer in list(self._outstanding)[:3])
                raise TimeoutError(f"{self.describe()}, not idle after {format_s(limit_s)}: {some}")

    def close(self, *, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Finishes what was submitted (`cancel`: fails what has not begun with LaneClosed) and gives the slots back.

        TimeoutError when something stays in flight; the slots then stay leased, because they may still be written to.
        A second call does nothing."""
        with self._settled:
            self._closed = True
        if self._broken is not None:
            raise RuntimeError(f"{self.describe()} and is broken; its slots stay leased") from self._broken
        if all(lease.is_released for lease in self._leases):
            return
        if cancel:
            self._driver.cancel(lambda transfer: LaneClosed(f"{transfer.what} was cancelled: its lane was closed"))
        self.drain(timeout_s)
        self._driver.close(self.timeout_s)
        self._copier.close()
        for lease in self._leases:
            if not lease.is_released:
                lease.release()
        atexit.unregister(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(cancel=error is not None)

    # ------------------------------------------------------------------ submitting, on callers' threads

    def _submit_file(
        self, device_tensor: torch.Tensor, file: BlockFile, offset: int, after: After, label: str
    ) -> LaneTransfer:
        if self._engine is None:
            raise ValueError(f"{self.direction} lane {self.owner!r} was made without a storage engine")
        if offset < 0:
            raise ValueError(f"a file offset cannot be negative, got {offset}")
        flat = self._flat(device_tensor)
        what = f"{self.direction} of {_named(label)}{format_gib(flat.numel())} ({file.path} at offset {offset})"
        home = FileHome(self._engine, file, offset)
        transfer = LaneTransfer(self, what, flat, home, self._event(after, from_drive=True), label)
        self._register(transfer)
        self._driver.accept(transfer, direct=self.direct)
        return transfer

    def _submit_stored(
        self, device_tensor: torch.Tensor, store: TensorStore, name: str, offset_bytes: int, after: After, label: str
    ) -> LaneTransfer:
        flat = self._flat(device_tensor)
        home = StoreHome(store, name, offset_bytes, device_tensor, self.slot_bytes)
        if self.direct:
            _check_direct(store.engine)
        what = f"{self.direction} of {_named(label)}{format_gib(flat.numel())} ({name!r} in {store!r})"
        transfer = LaneTransfer(self, what, flat, home, self._event(after, from_drive=True), label)
        self._register(transfer)
        self._driver.accept(transfer, direct=self.direct)
        return transfer

    def _submit_host(
        self, device_tensor: torch.Tensor, host_tensor: torch.Tensor, after: After, label: str, *, aside: bool = False
    ) -> LaneTransfer:
        flat = self._flat(device_tensor)
        if host_tensor.device.type != "cpu" or not host_tensor.is_contiguous():
            kind = "contiguous" if host_tensor.is_contiguous() else "not contiguous"
            raise ValueError(f"the RAM end must be a contiguous CPU tensor, got {host_tensor.device}, {kind}")
        memory = host_tensor.detach().reshape(-1).view(torch.uint8)
        if memory.numel() != flat.numel():
            raise ValueError(f"the ends differ in size: {memory.numel()} bytes in RAM, {flat.numel()} on {self.device}")
        what = f"{self.direction} of {_named(label)}{format_gib(flat.numel())} (RAM)"
        if flat.numel() and self.streams.is_pinned(memory):
            transfer = LaneTransfer(self, what, flat, None, self._event(after), label)
            self._register(transfer)
            self._copy_pinned(transfer, flat, memory, aside=aside)
        else:
            home = RamHome(self._copier, memory)
            transfer = LaneTransfer(self, what, flat, home, self._event(after), label)
            self._register(transfer)
            self._driver.accept(transfer)
        return transfer

    def _copy_pinned(self, transfer: LaneTransfer, flat: torch.Tensor, memory: torch.Tensor, *, aside: bool) -> None:
        """Pinned RAM needs no slot: the copies are queued here and now, on the caller's thread, all on one stream (a
        direction has one copy engine, so a second stream would only add events to wait for). No thread watches them
        before somebody waits on the host: each wake-up takes the interpreter from the thread that feeds the GPU."""
        index = self.streams.count if aside else next(self._turns) % self.streams.count
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start_bytes in range(0, flat.numel(), HOME_COPY_BYTES):
            device_part = flat[start_bytes : start_bytes + HOME_COPY_BYTES]
            home_part = memory[start_bytes : start_bytes + HOME_COPY_BYTES]
            pieces.append((device_part, home_part) if self.direction == "upload" else (home_part, device_part))
        transfer.begin_chunk()
        try:
            copy = self.streams.copy_pieces(index, pieces, transfer.after_for(index))
        except Exception as error:
            self._driver.lose(transfer, error)
            return
        transfer.note_issued(flat.numel(), index, copy)
        n_bytes = flat.numel()
        transfer.leave_unwatched(
            Unwatched(
                copy,
                partial(self._driver.watch, index, copy, transfer, n_bytes, memory),
                partial(self._driver.ended, transfer, n_bytes, copy, memory, None),
            )
        )
        self._unwatched.append(transfer)
        with suppress(IndexError, ValueError):  # another thread may look, too
            while (first := self._unwatched[0]).done():
                self._unwatched.remove(first)

    def _watch_all(self) -> None:
        while self._unwatched:
            with suppress(IndexError):
                self._unwatched.popleft().have_watched()

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self.device:
            raise ValueError(f"{self.direction} lane {self.owner!r} serves {self.device}, not {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"a lane moves contiguous tensors; this one has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        return tensor.detach().reshape(-1).view(torch.uint8)

    def _event(self, after: After, *, from_drive: bool = False) -> Any:
        if isinstance(after, str):
            if after != AT_ONCE:
                raise ValueError(f"after must be an event, AT_ONCE or None, got {after!r}")
            return None
        if isinstance(after, Gate) and not (self.direction == "upload" and from_drive):
            raise ValueError("a gate is for uploads from a drive, which are read ahead of it; give an event or AT_ONCE")
        return self.streams.now() if after is None else after

    def _register(self, transfer: LaneTransfer) -> None:
        with self._settled:
            if not self._closed and self._broken is None:
                self._outstanding.add(transfer)
                return
        if self._broken is not None:
            raise RuntimeError(f"{self.describe()} and is broken: {self._broken!r}") from self._broken
        raise LaneClosed(f"{self.direction} lane {self.owner!r} is closed: submit before close()")

    # ------------------------------------------------------------------ called on the driver's thread

    def _settle(self, transfer: LaneTransfer) -> None:
        transfer.finish()
        with self._settled:
            self.moved_bytes += 0 if transfer.failure is not None else transfer.n_bytes
            self._outstanding.discard(transfer)
            self._settled.notify_all()

    def _break(self, error: BaseException) -> None:
        logger.error("%s and broke", self.describe(), exc_info=error)
        atexit.unregister(self._close_at_exit)
        with self._settled:
            self._broken = error
            lost = list(self._outstanding)
            self._outstanding.clear()
            self._settled.notify_all()
        for transfer in lost:
            transfer.fail(RuntimeError(f"{transfer.what} was lost, its lane broke: {error!r}"))
            transfer.finish()

    def _close_at_exit(self) -> None:
        has_been_told = self._closed  # `close` has waited in vain, and is not to do so again
        try:
            self.close(cancel=True, timeout_s=0.0 if has_been_told else EXIT_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:
            if not has_been_told:
                logger.error("at exit: %s", error)


def _check_direct(engine: StorageEngine) -> None:
    if not getattr(engine, "moves_device_memory", False):
        raise ValueError(
            f"direct=True needs a storage engine that moves device memory, and {engine.name!r} does not: open kvikio "
            "(outcore probe tells whether that is faster here), or leave direct off (staged)"
        )


def _lease_slots(pool: PinnedPool, settings: LaneSettings, owner: str) -> list[Lease]:
    leases: list[Lease] = []
    try:
        for i in range(settings.num_slots):
            leases.append(pool.lease(settings.slot_bytes, f"{owner} slot {i}", settings.write_combined))
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return leases


def _named(label: str) -> str:
    return f"{label}, " if label else ""


class UploadLane(Lane):
    """Drive or RAM to device. Its slots may be write-combined, because the CPU only ever writes them."""

    direction = "upload"

    def submit(
        self, file: BlockFile, offset: int, out: torch.Tensor, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Fills `out` (contiguous, on the lane's device, any dtype and shape) from `file` at byte `offset`.

        Returns at once. Raises ValueError for unsuitable arguments; I/O errors (StorageError) come from the transfer.
        """
        return self._submit_file(out, file, offset, after, label)

    def submit_stored(
        self,
        store: TensorStore,
        name: str,
        out: torch.Tensor,
        offset_bytes: int = 0,
        *,
        after: After = None,
        label: str = "",
    ) -> LaneTransfer:
        """Fills `out` from byte `offset_bytes` of the tensor `name`, over all drives of the store.

        ValueError for an unknown name, a range that does not fit, another dtype (uint8 always fits), and for a store
        with checksums on a lane that is write-combined (the CPU would read it) or has slots below 2 MiB."""
        return self._submit_stored(out, store, name, offset_bytes, after, label)

    def submit_host(
        self, src: torch.Tensor, out: torch.Tensor, *, after: After = None, label: str = "", aside: bool = False
    ) -> LaneTransfer:
        """Fills `out` from `src`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots).

        `aside`: pinned memory comes past copies that still wait for their `after`, though not past those under way."""
        return self._submit_host(out, src, after, label, aside=aside)


class DownloadLane(Lane):
    """Device to drive or RAM. Its slots are default memory: the CPU reads them."""

    direction = "download"

    def submit(
        self, src: torch.Tensor, file: BlockFile, offset: int, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Writes `src` (contiguous, on the lane's device) to `file` at byte `offset`; returns at once.

        `src` may be overwritten by work on a stream after `wait_stream(stream)`; the data is in the file after `wait`
        (durable after the file's `sync`)."""
        return self._submit_file(src, file, offset, after, label)

    def submit_stored(
        self,
        src: torch.Tensor,
        store: TensorStore,
        name: str,
        offset_bytes: int = 0,
        *,
        after: After = None,
        label: str = "",
    ) -> LaneTransfer:
        """Writes `src` to byte `offset_bytes` of the tensor `name`; durable after the store's `commit`.

        ValueError as for `UploadLane.submit_stored`."""
        return self._submit_stored(src, store, name, offset_bytes, after, label)

    def submit_host(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Writes `src` into `dst`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots)."""
        return self._submit_host(src, dst, after, label)
