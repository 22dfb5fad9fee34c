"""The staging pool: all pinned memory of the process, of exact size, and who holds which part of it.

Purpose: one place that pins memory, so that nothing is rounded up, nothing fragments and a full pool can say why.
Algorithm: one slab per kind (default, write-combined) where the machine allows it, several where it only pins smaller
pieces; leases are cut best-fit from the slabs in 4 KiB steps and merge again on release. Where a refusal does harm the
amount is first probed in a child process (`pinned_grant`). Cost: about 0.5 s per GiB at the start, microseconds per
lease. Fallback, each said once in `notes` and in the log: less memory than asked where RAM or CUDA do not give it;
default memory where write-combined memory is refused; page-aligned pageable memory where nothing can be pinned or there
is no CUDA device.

RAM for homes: leased from the pinned pool while it lasts (less a reserve), pageable beyond it.

Pageable memory is mapped privately with huge pages asked for, and touched at once (or by its first writer). Pinned
homes are copied directly, pageable ones through the lanes' pinned slots, so results never depend on which it was.

If the pool cannot hold all homes of a kind, `which_pinned` spreads pinned ones evenly over the layers. The CPU copies a
pageable home several times slower than the link moves a pinned one, and one slow copy hides behind the compute of its
neighbours. Many in a row would slow the pass to the rate of the copies, and leave the CPU idle elsewhere.

Page-locked RAM that a GPU's kernels read where it is, and small tensors that go to the GPU that way.

A copy, however small, waits in the GPU's copy engine behind those that are queued before it: behind three layers of
weights for 20 ms and more. A kernel that reads page-locked RAM waits for nobody."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.common.quantities import KIB, format_gib, round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES, ExtentAllocator, Lease, PoolExtent
from outcore.staging.pool.cuda_runtime import CudaRuntime, load_libcudart
from outcore.staging.pool.pinned_grant import PinnedGrant, settle_grant
from outcore.staging.pool.slab import MappedSlab, Slab, build_slabs

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
        """Requests that were met in part only, a sentence each; logged as warnings once."""
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
        """Lines for people: each owner and the bytes that it holds."""
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
        """Keep the memory mapped and pinned until the process ends, instead of `close`: a transfer has not ended and
        may still write to it."""
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


class HomeMemory(Protocol):
    """Source of RAM for homes: private to this process (`HostMemory`) or shared with others."""

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor: ...
    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]: ...


class HostMemory:
    """Hands out byte tensors. `pool` None: everything pageable; `reserve_bytes` of it are left free."""

    def __init__(self, pool: PinnedPool | None = None, reserve_bytes: int = 0) -> None:
        self._pool = pool if pool is not None and pool.is_pinned else None
        self._reserve_bytes = reserve_bytes
        self._leases: dict[int, Lease] = {}
        """Leases by address."""
        self.pinned_bytes = 0
        self.pageable_bytes = 0

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        """1-D uint8 of `n_bytes`, all zero. `pinned` False: memory that never crosses to the device; `touch` False:
        the caller writes all of it at once, and so makes its pages real without a pass more."""
        if pinned and n_bytes and self._pool is not None and self._pool.free_bytes >= n_bytes + self._reserve_bytes:
            try:
                lease = self._pool.lease(n_bytes, owner)
            except PinnedPoolFull:
                logger.debug("%s: the pinned pool is too fragmented for it", owner)
            else:
                self._leases[lease.tensor.data_ptr()] = lease
                self.pinned_bytes += lease.tensor.nbytes
                return lease.tensor.zero_()
        self.pageable_bytes += n_bytes
        return pageable(n_bytes, touch=touch)

    def give_back(self, home: torch.Tensor) -> None:
        """Take back memory that `take` returned and nobody uses any more."""
        lease = self._leases.pop(home.data_ptr(), None)
        if lease is None:
            self.pageable_bytes -= home.nbytes  # freed with the last reference to it
        else:
            self.pinned_bytes -= home.nbytes
            lease.release()

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Choose of homes (unit's index, bytes) in order of need those that the pool has room for: the first and the
        last, embedding and head, which have no neighbour to hide behind, then an even spread of the layers."""
        if self._pool is None:
            return frozenset()
        return spread_pinned(sizes, self._pool.free_bytes - self._reserve_bytes)

    def close(self) -> None:
        """Give the leases back; nothing taken may be used any more."""
        for lease in self._leases.values():
            if not lease.is_released:
                lease.release()
        self._leases.clear()


def spread_pinned(sizes: Sequence[tuple[int, int]], left_bytes: int) -> frozenset[int]:
    """`HostMemory.which_pinned` for `left_bytes` of pinned memory."""
    left = max(0, left_bytes)
    rooms = [(index, round_up(n_bytes, ALIGNMENT_BYTES)) for index, n_bytes in sizes]
    chosen: set[int] = set()
    for index, room in (*rooms[:1], *rooms[1:][-1:]):
        if room <= left:
            chosen.add(index)
            left -= room
    layers = rooms[1:-1]
    share = min(1.0, left / max(1, sum(room for _, room in layers)))
    passed = taken = 0
    for index, room in layers:
        passed += room
        if taken + room <= left and taken < share * passed:
            chosen.add(index)
            taken += room
    return frozenset(chosen)


def pageable(n_bytes: int, *, touch: bool = True) -> torch.Tensor:
    """1-D uint8 of `n_bytes` zeros at the start of a page; with `touch` its pages are real from here on."""
    if n_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return MappedSlab(round_up(n_bytes, ALIGNMENT_BYTES), None, touch=touch).tensor[:n_bytes]


HALF_BYTES = 512 * KIB
ALIGNED_BYTES = 16


class SmallCopies:
    """Way of small tensors to one device. One thread; results are the current stream's.

    A ring of two halves: one is filled again once the stream has passed what was read from it. What exceeds a half
    goes by an ordinary copy, and so does everything where the GPU has no address for page-locked RAM.
    """

    def __init__(self, device: torch.device, half_bytes: int = HALF_BYTES) -> None:
        self.device, self._half_bytes = device, half_bytes
        self._view: torch.Tensor | None = None
        self._half, self._at = 0, 0
        self._passed: list[Any] = [None, None]
        if device.type == "cuda":
            self._host = torch.zeros(2 * half_bytes, dtype=torch.uint8, pin_memory=True)
            try:
                self._view = device_view(self._host, device)
            except MemoryError as error:
                logger.warning("small copies wait behind large ones: %s", error)

    def to(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a CPU's tensor to the device; on a GPU it may be changed at once, on a CPU it may not."""
        if self._view is None or not 0 < values.nbytes <= self._half_bytes:
            return values.to(self.device)
        return (self._mapped(values, self._view) | 0).view(values.dtype).view(values.shape)

    def into(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a CPU's tensor into one of the device's that is as large and of its type."""
        if self._view is None or not 0 < values.nbytes <= self._half_bytes:
            target.copy_(values)
            return
        found = self._mapped(values, self._view)
        torch.bitwise_or(found, 0, out=target.view(-1).view(torch.uint8))

    def _mapped(self, values: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Bytes of the values where the device reads them."""
        flat = values.contiguous().view(-1).view(torch.uint8)
        at = self._room(flat.numel())
        self._host[at : at + flat.numel()].copy_(flat)
        return view[at : at + flat.numel()]

    def _room(self, n_bytes: int) -> int:
        if self._at + n_bytes > self._half_bytes:
            self._passed[self._half] = torch.cuda.current_stream(self.device).record_event()
            self._half, self._at = 1 - self._half, 0
            if self._passed[self._half] is not None:
                self._passed[self._half].synchronize()
        at = self._half * self._half_bytes + self._at
        self._at += -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return at


class _Address:
    """A range of memory, told the way that torch takes from other libraries."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes of a page-locked uint8 tensor as a tensor of the GPU's. Keep `host` alive. MemoryError where the GPU
    has no address for them: the runtime is asked before any kernel could touch a wrong one."""
    assert host.is_pinned() and host.dtype == torch.uint8 and host.is_contiguous()
    return torch.as_tensor(_Address(_device_address(host.data_ptr()), host.nbytes), device=device)


def _device_address(address: int) -> int:
    lib = load_libcudart()
    if lib is None:
        raise MemoryError("the CUDA runtime library is not to be found, so pages in RAM have no address on the GPU")
    found = ctypes.c_void_p()
    lib.cudaHostGetDevicePointer.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint]
    code = int(lib.cudaHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(address), 0))
    if code or not found.value:
        lib.cudaGetLastError()  # or torch would report it at the next kernel
        raise MemoryError(f"the CUDA runtime gives pages in RAM no address on the GPU (error {code})")
    return int(found.value)
