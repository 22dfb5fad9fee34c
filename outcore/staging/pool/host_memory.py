"""RAM for homes: leased from the pinned pool while it lasts (less a reserve), pageable beyond it.

Pageable memory is mapped privately with huge pages asked for, and touched at once (or by its first writer). Pinned
homes are copied directly, pageable ones through the lanes' pinned slots, so results never depend on which it was.

Where the pool does not hold all homes of a kind, `which_pinned` spreads it evenly over the layers: copying a pageable
home takes the CPU several times as long as the link takes for a pinned one, which hides behind the compute of its
neighbours; were they all in a row, the pass would go at the copies' rate there and the CPU would idle elsewhere.

Page-locked RAM that a GPU's kernels read where it is, and small tensors that go to the GPU that way.

A copy, however small, waits in the GPU's copy engine behind those that are queued before it: behind three layers of
weights for 20 ms and more. A kernel that reads page-locked RAM waits for nobody."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.common.quantities import KIB, round_up
from outcore.staging.pool.allocator import ALIGNMENT_BYTES, Lease
from outcore.staging.pool.cuda_runtime import load_libcudart
from outcore.staging.pool.pool import PinnedPool, PinnedPoolFull
from outcore.staging.pool.slab import MappedSlab

logger = logging.getLogger(__name__)


class HomeMemory(Protocol):
    """Who has RAM for homes: private to this process (`HostMemory`) or shared with others."""

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
        """What `take` returned, and nobody uses any more."""
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
