"""The staging pool: all pinned memory of the process, of exact size, and who holds which part of it.

Purpose: one place that pins memory, so that nothing is rounded up, nothing fragments and a full pool can say why.
Algorithm: one slab per kind (default, write-combined) where the machine allows it, several where it only pins smaller
pieces; leases are cut best-fit from the slabs in 4 KiB steps and merge again on release. Where a refusal does harm the
amount is first probed in a child process (`pinned_grant`). Cost: about 0.5 s per GiB at the start, microseconds per
lease. Fallback, each said once in `notes` and in the log: less memory than asked where RAM or CUDA do not give it;
default memory where write-combined memory is refused; page-aligned pageable memory where nothing can be pinned or there
is no CUDA device."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque

import torch

from outcore.common.quantities import format_gib, round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES, ExtentAllocator, Lease, PoolExtent
from outcore.staging.pool.cuda_runtime import CudaRuntime
from outcore.staging.pool.pinned_grant import PinnedGrant, settle_grant
from outcore.staging.pool.slab import Slab, build_slabs

logger = logging.getLogger(__name__)


class PinnedPoolFull(RuntimeError):
    """No free extent is big enough; the message names the holders, the largest free extent and what was asked."""


class PinnedPool:
    """`capacity_bytes` of staging memory in all, `write_combined_bytes` of it write-combined.

    - `device`: a CUDA device pins the memory (for every device of the process); the CPU gives plain aligned memory.
    - `probe`: True asks a child process first what CUDA grants, where a refusal would do harm; a `PinnedGrant` uses
      what an earlier probe found; False relies on the RAM test alone.

    Sizes are rounded up to 4 KiB and never further. ValueError for impossible sizes, RuntimeError when the machine
    gives no memory at all. Thread-safe. Close it (or leave its `with` block) after its lanes."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        device: torch.device | str,
        write_combined_bytes: int = 0,
        probe: bool | PinnedGrant = True,
    ) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"a staging pool needs a positive capacity_bytes, got {capacity_bytes}")
        if not 0 <= write_combined_bytes <= capacity_bytes:
            raise ValueError(
                f"write_combined_bytes is the part of capacity_bytes ({capacity_bytes}) that is write-combined, "
                f"so it must lie between 0 and that, got {write_combined_bytes}"
            )
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"staging memory serves CUDA devices or the CPU, not {self.device.type!r}")
        self.asked_bytes = capacity_bytes
        self.notes: list[str] = []
        """What was not given as asked, a sentence each; logged as warnings once."""
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._leases: dict[Lease, tuple[int, PoolExtent]] = {}
        self._write_combined_asked = write_combined_bytes > 0
        self._slabs: list[Slab] = []
        self._allocators: list[ExtentAllocator] = []
        self._runtime = CudaRuntime(self.device) if self.device.type == "cuda" else None
        combined_bytes = round_up(write_combined_bytes, ALIGNMENT_BYTES)
        plain_bytes = max(0, round_up(capacity_bytes, ALIGNMENT_BYTES) - combined_bytes)
        self._finalizer = weakref.finalize(self, _close_slabs, self._slabs, self._runtime)
        build_slabs(
            self._slabs, self.notes, settle_grant(self.device, plain_bytes, combined_bytes, probe), self._runtime
        )
        self._allocators.extend(ExtentAllocator(slab.size_bytes) for slab in self._slabs)
        for note in self.notes:
            logger.warning("%s", note)
        if not self._slabs:
            raise RuntimeError(
                f"no staging memory: {format_gib(capacity_bytes)} were asked for and the machine gave none. "
                + " ".join(self.notes)
            )

    @property
    def capacity_bytes(self) -> int:
        """Bytes really held, all kinds together; `asked_bytes` is what was wanted."""
        return sum(slab.size_bytes for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the capacity that really are pinned; 0 on a machine without CUDA."""
        return sum(slab.size_bytes for slab in self._slabs if slab.is_pinned)

    @property
    def write_combined_bytes(self) -> int:
        """Bytes of the capacity that really are write-combined."""
        return sum(slab.size_bytes for slab in self._slabs if slab.is_write_combined)

    @property
    def is_pinned(self) -> bool:
        """True when every slab is pinned (never on a machine without CUDA)."""
        return bool(self._slabs) and all(slab.is_pinned for slab in self._slabs)

    @property
    def free_bytes(self) -> int:
        """Bytes not out on lease; a lease occupies steps of 4 KiB."""
        with self._changed:
            return sum(allocator.free_bytes for allocator in self._allocators)

    def largest_free_bytes(self, write_combined: bool = False) -> int:
        """The biggest lease of that kind that would be granted now."""
        with self._changed:
            return max((self._allocators[i].largest_free_bytes for i in self._kind(write_combined)), default=0)

    def lease(self, n_bytes: int, owner: str, write_combined: bool = False, *, timeout_s: float | None = None) -> Lease:
        """Exactly `n_bytes` for `owner`.

        Without `timeout_s` a pool that is too full raises PinnedPoolFull at once; with it the call waits that long for
        releases, served in the order of asking. A write-combined lease comes from default memory where the machine gave
        no write-combined memory (`Lease.write_combined` tells). What could never be granted is refused without waiting.
        """
        if n_bytes <= 0:
            raise ValueError(f"{owner!r} asked the staging pool for {n_bytes} bytes; a lease needs at least one")
        with self._changed:
            if not self._slabs:
                raise RuntimeError(f"{owner!r} asked a closed staging pool for memory")
            kind = self._kind(write_combined)
            biggest_bytes = max((self._slabs[i].size_bytes for i in kind), default=0)
            if n_bytes > biggest_bytes:
                raise PinnedPoolFull(
                    self._explain(n_bytes, owner, write_combined, "and no release could make room for it")
                )
            deadline_s = time.monotonic() + (timeout_s or 0.0)
            ticket = object()
            self._waiting.append(ticket)
            try:
                while True:
                    lease = None if self._waiting[0] is not ticket and timeout_s else self._take(n_bytes, owner, kind)
                    if lease is not None:
                        return lease
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        waited = f"after waiting {timeout_s:.1f} s for a release" if timeout_s else "now"
                        raise PinnedPoolFull(self._explain(n_bytes, owner, write_combined, waited))
                    self._changed.wait(left_s)
                    if not self._slabs:
                        raise RuntimeError(f"the staging pool was closed while {owner!r} waited for {n_bytes} bytes")
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _kind(self, write_combined: bool) -> list[int]:
        """Indices of the slabs that serve such a lease; default ones where write-combined memory was refused."""
        combined = [i for i, slab in enumerate(self._slabs) if slab.is_write_combined]
        plain = [i for i in range(len(self._slabs)) if i not in combined]
        if not write_combined:
            return plain
        return combined or (plain if self._write_combined_asked else [])

    def _take(self, n_bytes: int, owner: str, kind: list[int]) -> Lease | None:
        fits = [(fit, i) for i in kind if (fit := self._allocators[i].best_fit_bytes(n_bytes)) is not None]
        if not fits:
            return None
        i = min(fits)[1]
        slab, extent = self._slabs[i], self._allocators[i].take(n_bytes)
        assert extent is not None
        tensor = slab.tensor[extent.start_bytes : extent.start_bytes + n_bytes]
        lease = Lease(tensor, owner, slab.is_write_combined, slab.is_pinned, lambda: self._give_back(lease))
        self._leases[lease] = (i, extent)
        return lease

    def _give_back(self, lease: Lease) -> None:
        with self._changed:
            i, extent = self._leases.pop(lease)
            self._allocators[i].give_back(extent)
            self._changed.notify_all()

    def _explain(self, n_bytes: int, owner: str, write_combined: bool, when: str) -> str:
        kind = self._kind(write_combined)
        name = "write-combined" if write_combined else "default"
        if not kind and not write_combined:
            return f"{owner!r} asked for {format_gib(n_bytes)} of default memory, but all of the pool is write-combined"
        if not kind:
            return (
                f"{owner!r} asked for {format_gib(n_bytes)} of write-combined memory, but the pool has none: "
                "give PinnedPool a write_combined_bytes"
            )
        free_bytes = sum(self._allocators[i].free_bytes for i in kind)
        largest_bytes = max(self._allocators[i].largest_free_bytes for i in kind)
        total_bytes = sum(self._slabs[i].size_bytes for i in kind)
        return (
            f"the staging pool cannot give {owner!r} {format_gib(n_bytes)} ({n_bytes} bytes) of {name} memory {when}: "
            f"{format_gib(free_bytes)} of {format_gib(total_bytes)} are free, the largest free extent is "
            f"{format_gib(largest_bytes)}. Held by {self._holders()}. "
            "Raise the staging size, or use fewer or smaller slots"
        )

    def _holders(self) -> str:
        held: dict[str, list[int]] = {}
        for lease in self._leases:
            held.setdefault(lease.owner, []).append(lease.n_bytes)
        if not held:
            return "nobody"
        rows = sorted(held.items(), key=lambda item: -sum(item[1]))
        return ", ".join(f"{owner!r} {format_gib(sum(sizes))} in {len(sizes)}" for owner, sizes in rows)

    def report(self) -> str:
        """Who holds what, in a few lines for people."""
        with self._changed:
            free_bytes = sum(allocator.free_bytes for allocator in self._allocators)
            total_bytes = sum(slab.size_bytes for slab in self._slabs)
            pinned = "pinned" if self.is_pinned else "not pinned"
            lines = [f"staging pool: {format_gib(total_bytes)} {pinned}, {format_gib(free_bytes)} free"]
            for slab, allocator in zip(self._slabs, self._allocators):
                kind = "write-combined" if slab.is_write_combined else "default"
                lines.append(
                    f"  {kind} slab of {format_gib(slab.size_bytes)}: {format_gib(allocator.free_bytes)} free "
                    f"in {len(allocator.free_extents)} extents, largest {format_gib(allocator.largest_free_bytes)}"
                )
            lines.append(f"  held by {self._holders()}")
            lines.extend(f"  note: {note}" for note in self.notes)
            return "\n".join(lines)

    def close(self) -> None:
        """Unpins and frees. RuntimeError while leases are out, because a transfer could still be using them."""
        with self._changed:
            if self._leases:
                raise RuntimeError(
                    f"the staging pool cannot close while memory is on lease, held by {self._holders()}: "
                    "close the lanes and release the leases first"
                )
            self._allocators.clear()
            self._finalizer()
            self._changed.notify_all()

    def leave(self) -> None:
        """Instead of `close`, where a transfer does not end: the memory stays as it is until the process has ended, and
        is neither freed nor unpinned at its exit."""
        self._finalizer.detach()
        weakref.finalize(self, _keep, self).atexit = False  # what it is to be called with lives as long as the process

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not self._leases:
            self.close()


def _keep(pool: PinnedPool) -> None:
    """Never called."""


def _close_slabs(slabs: list[Slab], runtime: CudaRuntime | None) -> None:
    """Runs at close, when the pool is collected, or at exit while CUDA still lives (atexit): idle, unpin, unmap."""
    try:
        if runtime is not None and slabs:
            runtime.synchronize()
        while slabs:
            slabs[-1].close()
            slabs.pop()
    except RuntimeError as error:  # after a fatal CUDA error nothing can be unpinned any more; the process is to end
        slabs.clear()
        logger.warning("the staging pool could not be unpinned: %s", error)
