"""Progress of the ranks of one host: counters in shared memory, which one rank writes and all read.

A rank *posts* that it has reached a number, others *wait* until every rank (or one) has. A wait ends with `RankEnded`,
within seconds, when a rank it waits for has died, failed or left, and names that rank with the reason; a rank that is
merely slow is named in the log after `SLOW_S`, and given up after the group's timeout. A thread ends this process for
good when a peer has been gone for `GRACE_S` and the main thread is still stuck somewhere else, for example in a
collective of another library. Cost: polling, 50 us to 1 ms late; one line of memory per rank and counter.

Memory that every rank of a host maps: one copy for all of them, pinned by each on its own GPU.

The segment is an anonymous file in RAM (memfd): it has no name, and is gone when the last rank is. Rank 0 makes it, the
others open it through rank 0's descriptor while that waits for them. Pages become real where they are first written."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from outcore.common.deadline import TIMEOUT_S
from outcore.common.errors import EngineError
from outcore.common.quantities import format_gib, format_s, round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES
from outcore.staging.pool.cuda_runtime import CudaRuntime, PinRefused
from outcore.staging.pool.pool import spread_pinned
from outcore.staging.pool.slab import HUGE_PAGE_BYTES

logger = logging.getLogger(__name__)

Exchange = Callable[[Any], list[Any]]
"""Gives each rank what every rank gave, in order of rank (an all-gather of plain values)."""


class SharedSegment:
    """`size_bytes` of zeros that all ranks map. Made on every rank at once; RuntimeError where the system has no memfd
    or a rank cannot open it."""

    def __init__(self, size_bytes: int, rank: int, exchange: Exchange) -> None:
        self.size_bytes = max(1, round_up(size_bytes, ALIGNMENT_BYTES))
        descriptor, error = -1, ""
        if rank == 0:
            try:
                descriptor = _make(self.size_bytes)
            except (OSError, AttributeError) as refused:
                error = f"{type(refused).__name__}: {refused}"
        pid, theirs, size, refused_0 = exchange((os.getpid(), descriptor, self.size_bytes, error))[0]
        try:
            if refused_0:
                raise RuntimeError(f"memory shared by ranks needs memfd_create (Linux): {refused_0}")
            if size != self.size_bytes:
                error = f"rank {rank} expected {self.size_bytes} shared bytes, rank 0 has {size}"
            elif rank:
                try:
                    descriptor = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as refused:
                    error = f"rank {rank} cannot open the memory of rank 0 (process {pid}): {refused}"
            mapping = mmap.mmap(descriptor, self.size_bytes) if not error else None
            problems = [found for found in exchange(error) if found]
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if problems or mapping is None:
            raise RuntimeError(f"the ranks of this host cannot share memory: {problems[0]}")
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # kernels without huge pages for shared memory: small pages hold the same bytes
        self._mapping = mapping
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=self.size_bytes)

    def at(self, offset_bytes: int, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes]."""
        return self.tensor[offset_bytes : offset_bytes + n_bytes]

    def offset_of(self, memory: torch.Tensor) -> int:
        """Offset where `memory`, a piece of it, begins: the same number on every rank."""
        offset = memory.data_ptr() - self.address
        assert 0 <= offset <= self.size_bytes, "not a piece of this segment"
        return offset


def _make(size_bytes: int) -> int:
    descriptor = os.memfd_create("outcore-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(sizes_bytes: Sequence[int]) -> int:
    """Room for pieces of these sizes, taken in whatever order."""
    return sum(_room(n_bytes) for n_bytes in sizes_bytes)


def _room(n_bytes: int) -> int:
    """Large pieces begin on huge pages."""
    return round_up(n_bytes, HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else ALIGNMENT_BYTES) + (
        HUGE_PAGE_BYTES if n_bytes >= HUGE_PAGE_BYTES else 0
    )


class SharedHomes:
    """Hands out pieces of a segment as `HostMemory` does of private RAM: the same pieces in the same order on every
    rank, so each finds the others' bytes where its own are. Nothing is given back before the end.

    `pin_bytes`: how much may be pinned, the same on all ranks; `runtime` None: nothing is. What CUDA refuses on a rank
    stays pageable there, and flows through its lanes' slots: slower, with the same bytes."""

    def __init__(self, segment: SharedSegment, pin_bytes: int, runtime: CudaRuntime | None) -> None:
        self.segment = segment
        self._runtime = runtime
        self._left_to_pin_bytes = pin_bytes if runtime is not None else 0
        self._used_bytes = 0
        self._registered: list[int] = []
        self._refused = False
        self.pinned_bytes = self.pageable_bytes = 0

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        """1-D uint8 of `n_bytes`, zero until a rank writes."""
        if n_bytes >= HUGE_PAGE_BYTES:
            self._used_bytes = round_up(self._used_bytes, HUGE_PAGE_BYTES)
        offset = self._used_bytes
        self._used_bytes += round_up(n_bytes, ALIGNMENT_BYTES)
        if self._used_bytes > self.segment.size_bytes:
            raise RuntimeError(
                f"{owner}: the shared memory of {format_gib(self.segment.size_bytes)} is too small by "
                f"{self._used_bytes - self.segment.size_bytes} bytes; its size was computed wrongly"
            )
        memory = self.segment.at(offset, n_bytes)
        room = round_up(n_bytes, ALIGNMENT_BYTES)
        is_pinned = False
        if pinned and n_bytes and room <= self._left_to_pin_bytes:
            self._left_to_pin_bytes -= room
            is_pinned = self._pin(offset, room, owner)
        if is_pinned:
            self.pinned_bytes += n_bytes
        else:
            self.pageable_bytes += n_bytes
        return memory

    def _pin(self, offset: int, n_bytes: int, owner: str) -> bool:
        assert self._runtime is not None
        if self._refused:
            return False
        try:
            self._runtime.register(self.segment.address + offset, n_bytes)
        except PinRefused as refusal:
            self._refused = True
            logger.warning("%s and what follows stay pageable on this rank: %s", owner, refusal)
            return False
        self._registered.append(self.segment.address + offset)
        return True

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Choose as `HostMemory.which_pinned`."""
        return spread_pinned(sizes, self._left_to_pin_bytes)

    def close(self) -> None:
        """Unpin. The memory goes with the last tensor over it, here and on the other ranks."""
        registered, self._registered = self._registered, []
        try:
            if registered and self._runtime is not None:
                self._runtime.synchronize()
                for address in registered:
                    self._runtime.unregister(address)
        except RuntimeError as error:  # after a fatal CUDA error nothing can be unpinned; the process is to end
            logger.warning("shared memory could not be unpinned: %s", error)


SLOW_S = 20.0
"""A rank that others have waited for so long at once is named."""
HEALTH_S = 0.25
GRACE_S = 20.0
EXIT_CODE = 1
WORDS_BYTES = 1024
NUM_SUMS = 16
"""Values that `sums` takes at most."""
_RUNNING, _FAILED, _LEFT = 1, 2, 3


class RankEnded(EngineError):
    """A rank that this one works with has died, failed or left."""


@dataclass(frozen=True)
class Peer:
    """One rank's process."""

    rank: int
    pid: int
    created_s: float
    """When the process began: another one may get its number later."""

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:  # it is there, and may not be looked at
            return True


class RankGroup:
    """The ranks of one host, this one among them. Made on every rank at once; methods from any thread, `barrier` and
    `sums` from one thread and in the same order on every rank.

    `num_counters`: how many kinds of progress are told apart. `leave` (or `close`) before the process ends well.
    """

    def __init__(
        self, rank: int, world_size: int, exchange: Exchange, num_counters: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.exchange = exchange
        me = psutil.Process()
        self.peers = [Peer(*found) for found in exchange((rank, me.pid, me.create_time()))]
        n, k = world_size, num_counters + 1
        words = [8 * n * k, 8 * n * k, 8 * 2 * n * NUM_SUMS, 8 * n, WORDS_BYTES * n, WORDS_BYTES * n]
        segment = SharedSegment(sum(words), rank, exchange)
        pieces, start = [], 0
        for n_bytes in words:
            pieces.append(segment.at(start, n_bytes))
            start += n_bytes
        self._counts = pieces[0].view(torch.int64).view(n, k).numpy()
        self._values = pieces[1].view(torch.float64).view(n, k).numpy()
        self._sums = pieces[2].view(torch.float64).view(2, n, NUM_SUMS).numpy()
        self._states = pieces[3].view(torch.int64).numpy()
        self._reasons = pieces[4].view(n, WORDS_BYTES).numpy()
        self._doings = pieces[5].view(n, WORDS_BYTES).numpy()
        self._segment = segment
        self._collective = k - 1
        self._collectives = 0
        self.waited_s = [0.0] * n
        """Seconds that this rank's main thread has waited for each rank."""
        self.collective_s: dict[str, float] = {}
        """Seconds of any of this rank's threads, by what they waited for (without the part's name) or did."""
        self._gone: RankEnded | None = None
        self._closed = threading.Event()
        self._states[rank] = _RUNNING
        exchange(None)
        self._watch = threading.Thread(target=self._watch_peers, name="rank-watch", daemon=True)
        self._watch.start()

    # --- progress

    def post(self, counter: int, count: int, value: float = 0.0) -> None:
        """Tell the others that this rank has reached `count`, with a value that they may read."""
        self._values[self.rank, counter] = value
        self._counts[self.rank, counter] = count

    def has(self, counter: int, count: int, ranks: Sequence[int] | None = None) -> bool:
        """Tell whether every rank (of `ranks`) has reached `count`."""
        counts = self._counts
        return all(counts[r, counter] >= count for r in (ranks if ranks is not None else range(self.world_size)))

    def late(self, counter: int, count: int) -> int | None:
        """Another rank that has not reached `count`, if there is one."""
        counts = self._counts[:, counter]
        return next((r for r in range(self.world_size) if r != self.rank and counts[r] < count), None)

    def value(self, counter: int, rank: int) -> float:
        """Value that a rank gave with its last `post`."""
        return float(self._values[rank, counter])

    def wait(
        self, counter: int, count: int, what: str, ranks: Sequence[int] | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Wait until `has` is true. Raises RankEnded or TimeoutError, which name the rank and `what`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wanted = tuple(ranks) if ranks is not None else tuple(range(self.world_size))
        if self.has(counter, count, wanted):
            return
        begin_s = looked_s = time.monotonic()
        kind = what.rpartition(" of ")[0] or what
        is_main = threading.current_thread() is threading.main_thread()
        slice_s, is_named = 5e-5 if is_main else 1e-3, False  # who looks often holds up the training thread
        missing = wanted
        while True:
            missing = tuple(r for r in missing if self._counts[r, counter] < count)
            now_s = time.monotonic()
            if not missing:
                return
            time.sleep(slice_s)
            # Who waits for long need not look so often.
            slice_s = min(1e-3 if not is_main or now_s - begin_s > 0.05 else 2e-4, 1.2 * slice_s)
            slept_s = time.monotonic() - now_s
            self.collective_s[kind] = self.collective_s.get(kind, 0.0) + slept_s
            if is_main:
                self.waited_s[missing[0]] += slept_s
            if now_s - looked_s > HEALTH_S:
                looked_s = now_s
                self.check(missing)
                if now_s - begin_s > SLOW_S and not is_named:
                    is_named = True
                    logger.warning("waiting for %s since %s: %s", self._who(missing), format_s(now_s - begin_s), what)
                if now_s - begin_s > timeout_s:
                    raise TimeoutError(f"{what}: {self._who(missing)} did not come within {format_s(timeout_s)}")

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Count the seconds within as `kind`: work for all ranks, or a wait for this rank's own threads."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.collective_s[kind] = self.collective_s.get(kind, 0.0) + time.monotonic() - begin_s

    def _who(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {r} (process {self.peers[r].pid}, at: {_text(self._doings[r]) or '?'})" for r in ranks)

    def doing(self, words: str) -> None:
        """Tell the others what this rank is doing, for their messages."""
        _write(self._doings[self.rank], words)

    # --- together

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has come here."""
        self._collectives += 1
        self.post(self._collective, self._collectives)
        self.wait(self._collective, self._collectives, what, timeout_s=timeout_s)

    def sums(self, values: Sequence[float], what: str) -> list[float]:
        """Each value summed over ranks in fp64, in order of rank: the same bits on all of them."""
        assert len(values) <= NUM_SUMS
        table = self._sums[self._collectives % 2]  # who is one ahead writes to the other one
        table[self.rank, : len(values)] = values
        self.barrier(what)
        found = [0.0] * len(values)
        for r in range(self.world_size):
            found = [total + float(value) for total, value in zip(found, table[r], strict=False)]
        return found

    # --- the ends of ranks

    def check(self, ranks: Sequence[int] = ()) -> None:
        """RankEnded when another rank has failed or died, or one of `ranks` (this one, too) posts no more."""
        if self._gone is not None:
            raise RankEnded(str(self._gone))
        others = [r for r in range(self.world_size) if r != self.rank]
        for r in others:  # whoever failed first is the reason, also where a rank that left because of it is missing
            state = int(self._states[r])
            if state == _FAILED:
                raise RankEnded(f"rank {r} failed: {_text(self._reasons[r])}")
            if state != _LEFT and not self.peers[r].is_alive():
                at = _text(self._doings[r]) or "its start"
                raise RankEnded(
                    f"rank {r} (process {self.peers[r].pid}) has ended without a word, at: {at}. It was killed or ran "
                    "out of memory: look at dmesg, and resume from the last checkpoint"
                )
        for r in ranks:
            if r == self.rank and int(self._states[r]) == _FAILED:  # in a thread of its own: it posts no more
                raise RankEnded(f"rank {r} failed: {_text(self._reasons[r])}")
            if r != self.rank and int(self._states[r]) == _LEFT:
                raise RankEnded(f"rank {r} has left the run while rank {self.rank} still works with it")

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context: report an exception within it to the other ranks, which ends their waits."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank will not go on, and why."""
        if self._states[self.rank] == _RUNNING and not isinstance(error, RankEnded):
            _write(self._reasons[self.rank], f"{type(error).__name__}: {error}")
            self._states[self.rank] = _FAILED

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if not self._closed.is_set():
            self._closed.set()
            if self._states[self.rank] == _RUNNING:
                self._states[self.rank] = _LEFT

    def _watch_peers(self) -> None:
        """Look after peers while the main thread may be anywhere."""
        since_s: float | None = None
        while not self._closed.wait(HEALTH_S * 2):
            try:
                self.check()
            except RankEnded as ended:
                self._gone = ended
                since_s = time.monotonic() if since_s is None else since_s
                if time.monotonic() - since_s > GRACE_S:
                    end_process(f"rank {self.rank} ends: {ended}")


def end_process(words: str) -> None:
    """Say so and end at once: the main thread does not come back."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"\n{words}\n")
        sys.stderr.flush()
    os._exit(EXIT_CODE)


def _write(row: np.ndarray, words: str) -> None:
    data = words.encode()[: WORDS_BYTES - 1]
    row[: len(data)] = list(data)
    row[len(data)] = 0


def _text(row: np.ndarray) -> str:
    data = bytes(row)
    return data[: data.index(0)].decode(errors="replace") if 0 in data else data.decode(errors="replace")


class Alone:
    """The group of a run with one rank: nothing to wait for."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.waited_s = [0.0]
        self.collective_s: dict[str, float] = {}

    def sums(self, values: Sequence[float], what: str) -> list[float]:
        return list(values)

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        return

    @contextmanager
    def failing(self) -> Iterator[None]:
        yield

    def doing(self, words: str) -> None:
        return

    def close(self) -> None:
        return


Ranks = RankGroup | Alone
"""The other ranks, as an engine sees them."""
