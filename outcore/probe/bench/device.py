"""Copies between host memory and a GPU: each way and both at once, by kind of host memory and chunk size; peer copies.

Kinds: 'default' pinned, 'write-combined' pinned, 'pageable'. A step issues at least 64 MiB of chunks and then waits
once, so small chunks show the cost of a launch and not of a wait. With a CPU device the same code measures plain
memory copies, which is how it is tested without a GPU. Cost: one cell per (direction, kind, chunk size)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from outcore.common.quantities import MIB
from outcore.probe.bench.budget import cell_time_s
from outcore.probe.bench.measurement import Measurement, timed

STEP_BYTES = 64 * MIB
PEER_BYTES = 256 * MIB


class DeviceClock:
    """Streams and waiting for one device; on the CPU both are nothing."""

    def __init__(self, device: torch.device, streams: int = 2) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(streams)] if self.is_cuda else []

    def on_stream(self, index: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[index]) if self.is_cuda else contextlib.nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on the current stream; on the CPU it is done at once, on this thread alone."""
        if self.is_cuda:
            target.copy_(source, non_blocking=True)
        else:  # torch's own copy waits for its whole thread pool, which a busy machine delays
            np.copyto(target.numpy(), source.numpy())

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def measure_copies(
    device: torch.device,
    host: Mapping[str, torch.Tensor],
    chunks_bytes: Sequence[int],
    stage_s: float,
    most_s: float,
) -> list[Measurement]:
    """h2d and d2h for every kind of memory in `host` (1-D uint8 tensors) and every chunk that fits; both_ways for the
    pinned kinds at the largest chunk.

    Write-combined memory is not measured downwards: the CPU would have to read it, which it must never do."""
    plan = [
        (link, kind, chunk_bytes)
        for kind, tensor in host.items()
        for link in ("h2d", "d2h")
        for chunk_bytes in chunks_bytes
        if chunk_bytes <= tensor.numel() and not (link == "d2h" and kind == "write-combined")
    ]
    two_way = [kind for kind, tensor in host.items() if kind == "default" and tensor.numel() >= 2]
    cell_s = cell_time_s(stage_s, len(plan) + len(two_way), most_s)
    clock = DeviceClock(device)
    found = []
    largest = max((tensor.numel() for tensor in host.values()), default=0)
    device_memory = torch.empty(largest, dtype=torch.uint8, device=device)
    for link, kind, chunk_bytes in plan:
        found.append(_one_way(clock, device_memory, host[kind], link, kind, chunk_bytes, cell_s))
    for kind in two_way:
        found.append(_both_ways(clock, device_memory, host[kind], kind, cell_s))
    return found


def _one_way(
    clock: DeviceClock,
    device_memory: torch.Tensor,
    host: torch.Tensor,
    link: str,
    kind: str,
    chunk_bytes: int,
    limit_s: float,
) -> Measurement:
    pairs = [
        (device_memory[at : at + chunk_bytes], host[at : at + chunk_bytes])
        for at in range(0, host.numel() - chunk_bytes + 1, chunk_bytes)
    ][: max(1, STEP_BYTES // chunk_bytes)]
    if link == "d2h":
        pairs = [(host_part, device_part) for device_part, host_part in pairs]

    def step() -> int:
        with clock.on_stream(0):
            for target, source in pairs:
                clock.copy(target, source)
        clock.wait()
        return len(pairs) * chunk_bytes

    step()  # pages touched, link awake, streams made
    moved_bytes, elapsed_s = timed(step, limit_s)
    return Measurement(link, str(clock.device), kind, chunk_bytes, 1, moved_bytes, elapsed_s)


def _both_ways(
    clock: DeviceClock, device_memory: torch.Tensor, host: torch.Tensor, kind: str, limit_s: float
) -> Measurement:
    half = min(host.numel() // 2, STEP_BYTES)

    def step() -> int:
        with clock.on_stream(0):
            clock.copy(device_memory[:half], host[:half])
        with clock.on_stream(1):
            clock.copy(host[half : 2 * half], device_memory[half : 2 * half])
        clock.wait()
        return 2 * half

    step()
    moved_bytes, elapsed_s = timed(step, limit_s)
    return Measurement("both_ways", str(clock.device), kind, half, 2, moved_bytes, elapsed_s)


def measure_peers(
    devices: Sequence[torch.device], limit_s: float, n_bytes: int = PEER_BYTES
) -> tuple[list[Measurement], list[str]]:
    """Copies between every ordered pair of devices, and notes for pairs without direct access (they go through RAM)."""
    found, notes = [], []
    for source in devices:
        for target in devices:
            if source == target:
                continue
            if source.type == "cuda" and not torch.cuda.can_device_access_peer(target, source):
                notes.append(
                    f"{target} cannot reach the memory of {source} directly: copies between them go through RAM"
                )
            data = torch.zeros(n_bytes, dtype=torch.uint8, device=source)
            place = torch.empty(n_bytes, dtype=torch.uint8, device=target)
            clocks = (DeviceClock(source, 0), DeviceClock(target, 0))

            def step(data: torch.Tensor = data, place: torch.Tensor = place, clocks: Any = clocks) -> int:
                place.copy_(data, non_blocking=True)
                for clock in clocks:
                    clock.wait()
                return n_bytes

            step()
            moved_bytes, elapsed_s = timed(step, limit_s)
            name = f"{source} -> {target}"
            found.append(Measurement("peer", name, "copy", n_bytes, 1, moved_bytes, elapsed_s))
    return found, notes
