"""Objects that the ranks of a host share for one engine: the group, homes, slots, and who updates which chunk of
states.

Updates of the ranks: each tells the others when its own chunks of a part are up to date, and knows when all are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.common.quantities import round_up
from outcore.engine.stream.gradients.arena import GradientArena, gradient_bytes_of
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import ModelParts, Part
from outcore.flow.tiles import free_device_bytes
from outcore.machine import usable_cores
from outcore.optim import OptimizerPool
from outcore.staging.pool import ALIGNMENT_BYTES, CudaRuntime, refusal_is_harmless
from outcore.staging.shared import Exchange, RankGroup, SharedHomes, SharedSegment, shared_bytes
from outcore.states import StateChunk

ARRIVED, REDUCED, UPDATED = range(3)
"""Kinds of progress, each with a counter for every part."""
NUM_KINDS = 3
SPARE_CORES = 2
"""Cores of a rank that its optimizer leaves to the threads that launch and copy. Where it had all, eight micro-batches'
embeddings took 120 ms on two H100s, not 16: probably a thread that lets go of the interpreter waits for a core."""


def _only_me(mine: Any) -> list[Any]:
    return [mine]


@dataclass(frozen=True)
class RankPlace:
    """This process among the ranks of its host, and how it reaches the others while the engine is built."""

    rank: int = 0
    world_size: int = 1
    exchange: Exchange = _only_me

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def owned(self, chunks: dict[int, list[StateChunk]]) -> dict[int, list[StateChunk]]:
        """Choose the chunks of states that this rank keeps and updates: every `world_size`-th one, so that ranks
        have the same work within a part and over the model."""
        found: dict[int, list[StateChunk]] = {}
        number = 0
        for index, of_part in chunks.items():
            found[index] = []
            for chunk in of_part:
                if number % self.world_size == self.rank:
                    found[index].append(chunk)
                number += 1
        return found

    def share(self, numel: int) -> tuple[int, int]:
        """[start, stop) of a part's gradient that this rank adds up."""
        grain = ALIGNMENT_BYTES
        cut = round_up(-(-numel // self.world_size), grain)
        return min(numel, self.rank * cut), min(numel, (self.rank + 1) * cut)


ALONE = RankPlace()


@dataclass(frozen=True)
class RankHost:
    """Made on every rank at once by `open_host`."""

    place: RankPlace
    group: RankGroup
    homes: SharedHomes
    slots_memory: torch.Tensor
    """uint8: the slots of all ranks; free between steps, and at least 4 B for each value of the largest part."""
    slots: GradientArena
    """Gradient slots of this rank."""

    def __enter__(self) -> RankHost:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """The other ranks hear what went wrong."""
        if error is not None:
            self.group.fail(error)
        self.group.close()
        self.homes.close()

    def counter(self, kind: int, part: Part) -> int:
        return kind + NUM_KINDS * part.index


def agreed(settings: StreamSettings, device: torch.device, place: RankPlace) -> StreamSettings:
    """Agree on the same device memory to plan for on all ranks, and a rank's share of the host's cores."""
    if place.is_alone:
        return settings
    device_bytes = free_device_bytes(device) if settings.device_bytes is None else settings.device_bytes
    found = [n_bytes for n_bytes in place.exchange(device_bytes) if n_bytes is not None]
    cores = max(1, usable_cores() // place.world_size)
    spare = min(SPARE_CORES, cores // 8)
    return replace(
        settings,
        device_bytes=min(found, default=None),
        optimizer_threads=settings.optimizer_threads or cores - spare,
    )


def open_host(
    place: RankPlace,
    units: ModelParts,
    weight_bytes: Sequence[int],
    own_bytes: int,
    pin_bytes: int,
    device: torch.device,
) -> RankHost:
    """`weight_bytes`: of each part's home of weights; `own_bytes`: of a rank's slots; `pin_bytes`: how much of all may
    be pinned, where a refusal does no harm. RuntimeError where ranks cannot share memory."""
    parts, pin_bytes = units.all, pin_bytes if refusal_is_harmless() else 0
    group = RankGroup(place.rank, place.world_size, place.exchange, NUM_KINDS * (max(p.index for p in parts) + 1))
    sizes = [*weight_bytes, *(gradient_bytes_of(part) for part in parts), place.world_size * own_bytes]
    segment = SharedSegment(shared_bytes(sizes), place.rank, place.exchange)
    homes = SharedHomes(segment, pin_bytes, CudaRuntime(device) if device.type == "cuda" else None)
    slots_memory = homes.take(place.world_size * own_bytes, "slots of gradients")
    region = _Region(slots_memory[place.rank * own_bytes : (place.rank + 1) * own_bytes])
    return RankHost(place, group, homes, slots_memory, GradientArena(parts, region, own_bytes))


class _Region:
    """Memory that was taken before, as an arena takes it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._used_bytes = memory, 0

    def take(self, n_bytes: int, owner: str, *, pinned: bool = True, touch: bool = True) -> torch.Tensor:
        start = self._used_bytes
        self._used_bytes += round_up(n_bytes, ALIGNMENT_BYTES)
        assert self._used_bytes <= len(self._memory), owner
        return self._memory[start : start + n_bytes]

    def which_pinned(self, sizes: Sequence[tuple[int, int]]) -> frozenset[int]:
        return frozenset()


POLL_S = 5e-3
"""Seconds between two looks of a rank at its updates under way, though no work of the optimizer has ended: their states
may have been on their way to the drive."""


class PublishedUpdates:
    """Called from one thread. `watch` starts an update on `pool`, `wait` ends when every rank's is over."""

    def __init__(self, host: RankHost, pool: OptimizerPool) -> None:
        self._host, self._group, self._pool = host, host.group, pool
        self._counts: dict[int, int] = {}
        self._open: list[tuple[Part, int, Callable[[], bool]]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._publish, name="published-updates", daemon=True)
        self._thread.start()

    def watch(self, part: Part, has_ended: Callable[[], bool]) -> None:
        """An update of `part` has been submitted here. `has_ended` tells of this rank's chunks, and raises what went
        wrong; it is called on another thread."""
        self._counts[part.index] = self._counts.get(part.index, 0) + 1
        with self._changed:
            self._open.append((part, self._counts[part.index], has_ended))
            self._changed.notify()

    def is_done(self, part: Part) -> bool:
        """Whether every rank's last update of `part` is over."""
        return self._group.has(self._host.counter(UPDATED, part), self._counts.get(part.index, 0))

    def wait(self, part: Part) -> None:
        """Wait until it is. RankEnded, TimeoutError."""
        count = self._counts.get(part.index, 0)
        self._group.wait(self._host.counter(UPDATED, part), count, f"update of {part.name}")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Publish nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _publish(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._closing)
                if self._closing:
                    return
                looked_at = sorted(self._open, key=lambda entry: entry[0].index)
            over: list[tuple[Part, int, Callable[[], bool]]] = []
            try:
                seen = self._pool.num_finished
                # In the order of the next forward, which is the optimizer's, so the first tells of all behind it.
                for entry in looked_at:
                    part, count, has_ended = entry
                    if not has_ended():
                        break
                    self._group.post(self._host.counter(UPDATED, part), count)
                    over.append(entry)
            except BaseException as error:  # the thread that waits here raises it too
                self._group.fail(error)
                return
            with self._changed:
                self._open = [entry for entry in self._open if entry not in over]
            # Not by looking often: who takes the interpreter's lock under an update, when all cores are busy, keeps
            # the training thread from it for milliseconds.
            self._pool.wait_for_more(seen, POLL_S)
