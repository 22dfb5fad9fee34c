"""What benchmarks/drives/lanes.py measures of outcore itself: the drive, the link, and the lanes between them.

Every measure is a function that moves a known number of bytes and returns bytes per second; the caller interleaves
them. The test file is moved in pieces of `piece_bytes`, the device side is a small set of tensors used in turn, so that
a GPU of 8 GB can measure files of any size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outcore.common.quantities import MIB
from outcore.staging import DownloadLane, LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, PosixEngine

LINK_ROUNDS = 16
"""Copies per link measurement: with 4 (40 ms over PCIe 5) starting and ending the measurement cost 2 % of it."""
DRIVE_BLOCK_BYTES = 16 * MIB
LIMITED_SLOTS = 32


@dataclass
class Bench:
    """One file, one device, one pool; `close` (or leaving the `with` block) takes all of it away again."""

    path: Path
    size_bytes: int
    piece_bytes: int
    device: torch.device
    pool: PinnedPool
    slot_bytes: int
    num_slots: int
    limited_bytes: int
    io_threads: int
    file: BlockFile = field(init=False)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            stack.callback(self.path.unlink, missing_ok=True)
            self.engine = PosixEngine(num_threads=self.io_threads)
            stack.callback(self.engine.close)
            self.file = stack.enter_context(BlockFile(self.path, "create", size_bytes=self.size_bytes))
            self.pieces = [
                torch.randint(0, 256, (self.piece_bytes,), dtype=torch.uint8, device=self.device) for _ in range(4)
            ]
            home_bytes = min(512 * MIB, self.pool.largest_free_bytes() // 4)
            self.up_home = stack.enter_context(self.pool.lease(home_bytes, "link up")).tensor
            self.down_home = stack.enter_context(self.pool.lease(home_bytes, "link down")).tensor
            self.up_target = torch.zeros(home_bytes, dtype=torch.uint8, device=self.device)
            self.down_source = torch.zeros(home_bytes, dtype=torch.uint8, device=self.device)
            # A pool that was degraded to a small machine's size still holds the slots of two lanes.
            fitting_bytes = self.pool.largest_free_bytes() // (2 * self.num_slots) // 4096 * 4096
            slots = LaneSettings(min(self.slot_bytes, fitting_bytes), self.num_slots)
            lanes = (self.pool, self.engine, self.device)
            self.up = stack.enter_context(UploadLane(*lanes, slots, "up"))
            self.down = stack.enter_context(DownloadLane(*lanes, slots, "down"))
            # The limited pool is a grant of its own: half of it for each direction.
            self.limited = stack.enter_context(PinnedPool(self.limited_bytes, device=self.device, probe=False))
            slots = LaneSettings(self.limited_bytes // (2 * LIMITED_SLOTS) // 4096 * 4096, LIMITED_SLOTS)
            lanes = (self.limited, self.engine, self.device)
            self.limited_up = stack.enter_context(UploadLane(*lanes, slots, "limited up"))
            self.limited_down = stack.enter_context(DownloadLane(*lanes, slots, "limited down"))
            self.combined_up: UploadLane | None = None
            if self.pool.write_combined_bytes:
                slot_bytes = self.pool.write_combined_bytes // self.num_slots // 4096 * 4096
                slots = LaneSettings(slot_bytes, self.num_slots, True)
                lanes = (self.pool, self.engine, self.device)
                self.combined_up = stack.enter_context(UploadLane(*lanes, slots, "write-combined up"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(file offset, device tensor) for every piece of the file, the tensors used in turn."""
        for number, offset in enumerate(range(0, self.size_bytes, self.piece_bytes)):
            yield offset, self.pieces[number % len(self.pieces)]

    # ------------------------------------------------------------------ the drive by itself

    def drive(self, read: bool, write: bool) -> float:
        """The engine between file and pinned memory, nothing else; with both, alternating blocks."""
        memory, block_bytes = self.up_home, min(DRIVE_BLOCK_BYTES, self.up_home.numel())
        depth = max(1, min(2 * self.io_threads, memory.numel() // block_bytes))
        transfers: deque = deque()
        begin_s = time.perf_counter()
        for number, offset in enumerate(range(0, self.size_bytes, block_bytes)):
            if len(transfers) == depth:
                transfers.popleft().wait(600)
            block = memory[number % depth * block_bytes :][: min(block_bytes, self.size_bytes - offset)]
            reads = read and not (write and number % 2)
            submit = self.engine.submit_read if reads else self.engine.submit_write
            transfers.append(submit(self.file, offset, block))
        while transfers:
            transfers.popleft().wait(600)
        return self.size_bytes / (time.perf_counter() - begin_s)

    # ------------------------------------------------------------------ the link by itself

    def link(self, up: bool, down: bool, chunked: bool) -> float:
        """Pinned memory and device; one big copy each, or chunks of 16 MiB through the lanes."""
        n_bytes = LINK_ROUNDS * self.up_home.numel() * (up + down)
        streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.device.type == "cuda" else []
        self.synchronize()
        begin_s = time.perf_counter()
        transfers = []
        for _ in range(LINK_ROUNDS):
            if up and chunked:
                transfers.append(self.up.submit_host(self.up_home, self.up_target))
            elif up:
                self._copy(self.up_target, self.up_home, streams[:1])
            if down and chunked:
                transfers.append(self.down.submit_host(self.down_source, self.down_home))
            elif down:
                self._copy(self.down_home, self.down_source, streams[1:])
        for transfer in transfers:
            transfer.wait()
        self.synchronize()
        return n_bytes / (time.perf_counter() - begin_s)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, streams: list) -> None:
        if not streams:
            target.copy_(source)
            return
        with torch.cuda.stream(streams[0]):
            target.copy_(source, non_blocking=True)

    # ------------------------------------------------------------------ the lanes

    def lanes(self, up: UploadLane | None, down: DownloadLane | None) -> float:
        """The whole file through a lane, or alternating pieces through both at the same time."""
        self.synchronize()
        transfers = []
        begin_s = time.perf_counter()
        for number, (offset, piece) in enumerate(self.parts()):
            device_part = piece[: min(self.piece_bytes, self.size_bytes - offset)]
            if up is not None and not (down is not None and number % 2):
                transfers.append(up.submit(self.file, offset, device_part))
            elif down is not None:
                transfers.append(down.submit(device_part, self.file, offset))
        for transfer in transfers:
            transfer.wait()
        return self.size_bytes / (time.perf_counter() - begin_s)

    def measures(self) -> dict[str, Callable[[], float]]:
        """Name -> measure, in the order in which they are to run."""
        table: dict[str, Callable[[], float]] = {
            "drive read": lambda: self.drive(True, False),
            "drive -> GPU, lane": lambda: self.lanes(self.up, None),
            "drive -> GPU, lane, limited pinned": lambda: self.lanes(self.limited_up, None),
        }
        if self.combined_up is not None:
            table["drive -> GPU, lane, write-combined"] = lambda: self.lanes(self.combined_up, None)
        table |= {
            "drive write": lambda: self.drive(False, True),
            "GPU -> drive, lane": lambda: self.lanes(None, self.down),
            "GPU -> drive, lane, limited pinned": lambda: self.lanes(None, self.limited_down),
            "drive mixed": lambda: self.drive(True, True),
            "both lanes at once": lambda: self.lanes(self.up, self.down),
            "H2D, one big copy": lambda: self.link(True, False, False),
            "H2D, 16 MiB chunks, lane": lambda: self.link(True, False, True),
            "D2H, one big copy": lambda: self.link(False, True, False),
            "D2H, 16 MiB chunks, lane": lambda: self.link(False, True, True),
            "H2D + D2H at once, lanes": lambda: self.link(True, True, True),
        }
        return table

    def verify(self) -> None:
        """Writes known bytes through the download lanes and reads them back through the upload lanes and plainly."""
        ups = [lane for lane in (self.up, self.limited_up, self.combined_up) if lane is not None]
        for down in (self.down, self.limited_down):
            want = torch.randint(0, 256, (min(self.piece_bytes, self.size_bytes) - 4097,), dtype=torch.uint8)
            down.submit(want.to(self.device), self.file, 4095).wait()
            plain = torch.empty_like(want)
            self.file.read_into(plain, 4095)
            if not torch.equal(plain, want):
                raise RuntimeError(f"{down.describe()}: the file does not hold what was sent")
            for up in ups:
                out = torch.zeros(want.numel(), dtype=torch.uint8, device=self.device)
                up.submit(self.file, 4095, out).wait()
                if not torch.equal(out.cpu(), want):
                    raise RuntimeError(f"{up.describe()}: the device does not hold what the file does")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
