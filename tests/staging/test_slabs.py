"""Slabs as granted, their fallbacks, and calls into a CUDA runtime made of Python."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.staging import PinnedGrant, PinnedPool
from outcore.staging.lanes.copy_streams import CudaStreams
from outcore.staging.pool import cuda_runtime, pinned_grant
from outcore.staging.pool import pool as pool_module
from outcore.staging.pool.cuda_runtime import CudaRuntime, PinRefused
from outcore.staging.pool.slab import MappedSlab, build_slabs
from tests.refused import failing, refused
from tests.staging.cuda_fakes import CUDA0, FakeRuntime


class StrictRuntime(FakeRuntime):
    """The same as `CudaRuntime` behaves: refusals are exceptions."""

    def register(self, address: int, n_bytes: int) -> Any:
        if text := super().register(address, n_bytes):
            raise PinRefused(text)

    def alloc_write_combined(self, n_bytes: int) -> Any:
        if not self.write_combined:
            raise PinRefused("no write-combined memory")
        return super().alloc_write_combined(n_bytes)[0]


# ---------------------------------------------------------------------- slabs


def build(grant: PinnedGrant, runtime: Any) -> tuple[list, list[str]]:
    slabs: list = []
    notes: list[str] = []
    build_slabs(slabs, notes, grant, runtime)
    return slabs, notes


def test_slabs_as_granted_pinned_and_aligned() -> None:
    runtime = StrictRuntime(32 * MIB)
    slabs, notes = build(PinnedGrant(8 * MIB + 4096, 2 * MIB, 16 * MIB), runtime)
    assert notes == [] and [(s.size_bytes, s.is_write_combined) for s in slabs] == [
        (2 * MIB, True),
        (8 * MIB + 4096, False),
    ]
    assert sum(runtime.pinned.values()) == 10 * MIB + 4096  # what is held is what was asked
    mapped = slabs[1]
    assert mapped.tensor.data_ptr() == mapped.address and mapped.address % (2 * MIB) == 0
    assert mapped.tensor.numel() == 8 * MIB + 4096 and int(mapped.tensor.sum()) == 0
    mapped.tensor.fill_(1)
    for slab in slabs:
        slab.close()
        slab.close()
    assert runtime.pinned == {} and runtime.memory == {}


def test_a_refused_slab_is_tried_in_halves_and_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.staging.pool.slab.MIN_SLAB_BYTES", 1 * MIB)
    slabs, notes = build(PinnedGrant(8 * MIB, 0, 8 * MIB), StrictRuntime(5 * MIB, piece_bytes=2 * MIB))
    assert [s.size_bytes for s in slabs] == [2 * MIB, 2 * MIB, 1 * MIB]
    assert notes == ["3.00 MiB less staging memory than planned: out of memory (CUDA error 2)"]


def test_refused_write_combined_memory_becomes_default_memory() -> None:
    slabs, notes = build(PinnedGrant(4 * MIB, 2 * MIB, 6 * MIB), StrictRuntime(32 * MIB, write_combined=False))
    assert [(s.size_bytes, s.is_write_combined) for s in slabs] == [(6 * MIB, False)]
    assert "default memory takes its place" in notes[0]


def test_pageable_memory_when_nothing_can_be_pinned() -> None:
    for grant in (PinnedGrant(4 * MIB, 0, 4 * MIB), PinnedGrant(0, 0, 0, pageable_bytes=4 * MIB)):
        slabs, notes = build(grant, StrictRuntime(0))
        assert [(s.size_bytes, s.is_pinned) for s in slabs] == [(4 * MIB, False)]
        assert "could not be pinned" in notes[-1]


def test_a_refused_mapping_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(MemoryError, "refused to map", lambda: MappedSlab(1 << 60, None))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory as Linux counts it")
def test_memory_is_real_at_once_unless_its_first_writer_makes_it_so() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size_bytes, before = 64 * MIB, resident_bytes()
    touched = MappedSlab(size_bytes, None)
    assert resident_bytes() - before > size_bytes * 0.9
    before = resident_bytes()
    lazy = MappedSlab(size_bytes, None, touch=False)
    assert resident_bytes() - before < size_bytes * 0.1
    touched.close()
    lazy.close()


def test_a_pool_on_a_faked_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = StrictRuntime(64 * MIB)
    monkeypatch.setattr(pool_module, "CudaRuntime", lambda device: runtime)
    pool = PinnedPool(8 * MIB, device="cuda", write_combined_bytes=2 * MIB, probe=False)
    assert pool.is_pinned and pool.write_combined_bytes == 2 * MIB
    assert pool.pinned_bytes == pool.capacity_bytes == 8 * MIB
    with pool.lease(4096, "up", write_combined=True) as lease:
        assert lease.write_combined and lease.is_pinned
        assert pool.largest_free_bytes(write_combined=True) == 2 * MIB - 4096
    pool.close()
    assert runtime.pinned == {} and runtime.log.index("synchronize") < runtime.log.index("unregister")
    everything = PinnedPool(2 * MIB, device="cuda", write_combined_bytes=2 * MIB, probe=False)
    with pytest.raises(RuntimeError, match="all of the pool is write-combined"):
        everything.lease(1, "down")
    del everything  # forgotten, not closed: collected pools unpin as well
    assert runtime.pinned == {}
    without = StrictRuntime(64 * MIB, write_combined=False)
    monkeypatch.setattr(pool_module, "CudaRuntime", lambda device: without)
    with PinnedPool(2 * MIB, device="cuda", write_combined_bytes=1 * MIB, probe=False) as pool:
        lease = pool.lease(4096, "up", write_combined=True)
        assert lease.is_pinned and not lease.write_combined
        lease.release()
    earlier = PinnedGrant(4 * MIB, 0, 4 * MIB, ("CUDA pins only 4.00 MiB",))
    grant = pinned_grant.settle_grant(CUDA0, 6 * MIB, 2 * MIB, earlier)
    assert (grant.pinned_bytes, grant.write_combined_bytes, grant.reasons) == (4 * MIB, 0, earlier.reasons)


# ---------------------------------------------------------------------- calls into CUDA


class FakeCudart:
    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert flags == 1
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return self.code


def fake_cuda(monkeypatch: pytest.MonkeyPatch, code: int, lib: Any) -> CudaRuntime:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(code))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_runtime, "load_libcudart", lambda: lib)
    monkeypatch.setitem(sys.modules, "cupy", None)
    return CudaRuntime(CUDA0)


def test_refusals_of_the_runtime_carry_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []

    def host_alloc(pointer: Any, n_bytes: int, flags: int) -> int:
        assert flags == 5
        pointer._obj.value = 8192 if n_bytes == 1 else None
        return 0 if n_bytes == 1 else 2

    lib = SimpleNamespace(
        cudaGetErrorString=lambda code: b"out of memory", cudaGetLastError=lambda: cleared.append(1) or 2,
        cudaHostAlloc=host_alloc, cudaFreeHost=lambda address: 0 if address == 8192 else 1,
    )  # fmt: skip
    runtime = fake_cuda(monkeypatch, 2, lib)
    runtime.synchronize()
    with pytest.raises(PinRefused, match=r"cudaHostRegister of 4096 bytes: out of memory \(CUDA error 2\)"):
        runtime.register(0, 4096)
    refused(PinRefused, "cudaHostUnregister", lambda: runtime.unregister(0))
    assert runtime.alloc_write_combined(1) == 8192
    refused(PinRefused, "write-combined", lambda: runtime.alloc_write_combined(2))
    runtime.free_write_combined(8192)
    refused(PinRefused, "cudaFreeHost", lambda: runtime.free_write_combined(1))
    assert len(cleared) == 4


@pytest.mark.parametrize("lib", [None, SimpleNamespace(cudaGetErrorString=lambda code: b"", cudaGetLastError=int)])
def test_write_combined_memory_comes_from_cupy_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, lib) -> None:
    runtime = fake_cuda(monkeypatch, 3, lib)
    refused(PinRefused, "CUDA error 3", lambda: runtime.register(0, 4096))
    if lib is None:
        refused(PinRefused, "cupy-cuda12x or cupy-cuda13x", lambda: runtime.alloc_write_combined(4096))
    freed: list[int] = []
    calls = SimpleNamespace(hostAlloc=lambda n_bytes, flags: n_bytes + flags, freeHost=freed.append)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=calls)))
    assert runtime.alloc_write_combined(4096) == 4101
    runtime.free_write_combined(4101)
    assert freed == [4101]
    calls.hostAlloc = lambda n_bytes, flags: {}["refused"]
    refused(PinRefused, "refused", lambda: runtime.alloc_write_combined(4096))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_pool_without_cuda_says_so() -> None:
    refused(RuntimeError, "sees none", lambda: PinnedPool(1 * MIB, device="cuda"))


def test_a_device_that_is_lost_does_not_hide_the_first_error(caplog, monkeypatch):
    runtime = StrictRuntime(64 * MIB)
    monkeypatch.setattr(pool_module, "CudaRuntime", lambda device: runtime)
    pool = PinnedPool(2 * MIB, device="cuda", probe=False)
    runtime.synchronize = failing(RuntimeError("CUDA error: unspecified launch failure"))  # type: ignore[method-assign]
    pool.close()
    assert "could not be unpinned: CUDA error: unspecified launch failure" in caplog.text


def test_cuda_copies_wait_for_after_and_are_bracketed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, **kind: bool) -> None:
            self.name = "end" if kind.get("blocking") else "begin" if kind else "now"

        def record(self, stream: Any) -> None:
            log.append(f"record {self.name}")

        def wait(self, stream: Any) -> None:
            log.append(f"{stream} waits for {self.name}")

        def synchronize(self) -> None:
            log.append(f"synchronize {self.name}")

    stream = SimpleNamespace(wait_event=lambda event: log.append("wait after"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    streams = CudaStreams(CUDA0, 2)
    target, source = torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)
    copy = streams.copy(1, target, source, streams.now())
    assert log == ["record now", "wait after", "record begin", "record end"] and torch.equal(target, source)
    copy.synchronize()
    streams.hold(None, copy)
    streams.hold("mine", copy)  # type: ignore[arg-type]
    assert log[4:] == ["synchronize end", "current waits for end", "mine waits for end"]
    assert not copy.is_over and not streams.is_pinned(target)
    streams.copy(0, target, source, None)
    assert "wait after" not in log[7:]
