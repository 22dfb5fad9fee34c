"""Stand-ins for the staging tests: a device whose copies happen later on its own threads, engines that fail, a program
that closes nothing."""

import contextlib
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from outcore.storage import BlockFile, PosixEngine, StorageError, Transfer


class LateEvent:
    """The end of a fake copy; `recorded` events of compute have the same shape."""

    is_over = False

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None

    def has_ended(self) -> bool:
        return self.passed.is_set() and self.error is None

    def synchronize(self) -> None:
        assert self.passed.wait(60), "the fake device hung"
        if self.error is not None:
            raise self.error


class LateStreams:
    """Each stream runs its copies in order on a thread, some time after they were queued, like a GPU does.

    A slot that is refilled before its copy ended therefore delivers wrong bytes, as it would on a GPU.
    """

    def __init__(self, count: int = 1, delay_s: float = 0.002, pinned: set[int] | None = None) -> None:
        self.count = count
        self.delay_s = delay_s
        self.pinned = pinned or set()
        self.fail_next: Exception | None = None
        self.copies = 0
        self.held: list[tuple[Any, LateEvent]] = []
        self.compute = LateEvent()
        self.compute.passed.set()
        self._random = random.Random(3)
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count + 1)]
        for stream in self._queues:
            threading.Thread(target=self._run, args=(stream,), daemon=True).start()

    def _run(self, stream: queue.SimpleQueue[Any]) -> None:
        while (job := stream.get()) is not None:
            target, source, after, event = job
            if after is not None:
                after.synchronize()
            time.sleep(self._random.random() * self.delay_s)
            if self.fail_next is not None:
                event.error, self.fail_next = self.fail_next, None
            else:
                target.copy_(source)
            event.passed.set()

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.data_ptr() in self.pinned

    def now(self) -> LateEvent:
        return self.compute

    def copy(self, index: int, target: torch.Tensor, source: torch.Tensor, after: Any) -> LateEvent:
        self.copies += 1
        event = LateEvent()
        self._queues[index].put((target, source, after, event))
        return event

    def copy_pieces(self, index: int, pieces: Any, after: Any) -> LateEvent:
        events = [
            self.copy(index, target, source, after if number == 0 else None)
            for number, (target, source) in enumerate(pieces)
        ]
        return events[-1]

    def hold(self, stream: Any, event: Any) -> None:
        self.held.append((stream, event))

    def ambient(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        for stream in self._queues:
            stream.put(None)


class TroubledEngine(PosixEngine):
    """A real engine that delays requests at random, and fails those that touch a bad byte of the file."""

    name = "troubled"

    def __init__(self, *, delay_s: float = 0.0, bad_offset: int | None = None, direct: bool = False) -> None:
        super().__init__(num_threads=4)
        self.delay_s = delay_s
        self.bad_offset = bad_offset
        self.moves_device_memory = direct
        self.short_by = 0
        self.refuse: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.requests: list[tuple[str, int, int]] = []
        self._random = random.Random(5)

    def submit_read(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        return self._troubled("read", super().submit_read, file, offset, buffer, priority)

    def submit_write(self, file: BlockFile, offset: int, buffer: Any, *, priority: int = 0) -> Transfer:
        return self._troubled("write", super().submit_write, file, offset, buffer, priority)

    def _troubled(self, kind: str, submit: Any, file: BlockFile, offset: int, buffer: Any, priority: int) -> Transfer:
        n_bytes = len(buffer)
        self.requests.append((kind, offset, n_bytes))
        if self.refuse is not None:
            raise self.refuse
        transfer = Transfer(n_bytes - self.short_by, f"{kind} of {n_bytes} bytes at {offset} of {file.path}")
        delay_s = self._random.random() * self.delay_s

        def run() -> None:
            self.hold.wait(60)
            time.sleep(delay_s)
            if self.bad_offset is not None and offset <= self.bad_offset < offset + n_bytes:
                transfer.finish(StorageError(kind, path=file.path, offset=offset, wanted=n_bytes, got=0, errno=5))
                return
            submit(file, offset, buffer, priority=priority).add_done_callback(
                lambda ended: transfer.finish(ended.error)
            )

        threading.Thread(target=run, daemon=True).start()
        return transfer


def random_bytes(n_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)


def file_with(path: Path, content: torch.Tensor) -> BlockFile:
    path.write_bytes(content.numpy().tobytes())
    return BlockFile(path, "rw")


def content_of(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


FORGETFUL = """
import sys, torch
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.storage import BlockFile, PosixEngine
device = torch.device(sys.argv[2])
pool = PinnedPool(4 << 20, device=device, probe=False)
up = UploadLane(pool, PosixEngine(), device, LaneSettings(1 << 20, timeout_s=30))
file = BlockFile(sys.argv[1])
out = torch.zeros(file.size_bytes, dtype=torch.uint8, device=device)
transfers = [up.submit(file, 0, out) for _ in range(20)]
transfers[0].wait()
print("left without closing anything")
"""


def leave_without_closing(path: Path, device: str) -> None:
    """A program of its own that uses a lane and ends."""
    command = [sys.executable, "-c", FORGETFUL, str(path), device]
    root = Path(__file__).parents[2]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=root, check=False)
    assert (child.returncode, child.stdout, child.stderr) == (0, "left without closing anything\n", "")
