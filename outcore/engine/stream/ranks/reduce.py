"""Gradients of all ranks added up in RAM, part by part, while the next ones are computed.

When a rank's gradient of a part has arrived in its slot, the rank says where it lies. Once all have, each rank adds up
its own share of the values, in fp32 and in order of rank, rounds once and writes the part's home. So the sum does not
depend on timing, and equals what one rank adds up over as many micro-batches in the same order. One rank (another one
for each part) takes the norm of the whole sum, the same call on the same values as on one rank.

Cost: each gradient is read once per rank, its sum written once and read once more for the norm: (N + 2) x 2 B of DRAM
traffic per parameter and host, beside the update's 28 B.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from outcore.common.deadline import CLOSE_TIMEOUT_S
from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.gradients.arena import GradientArena
from outcore.engine.stream.gradients.download import GradientShipping, norm_of_values
from outcore.engine.stream.ranks.host import ARRIVED, NORMED, REDUCED, RankHost
from outcore.flow.parts import ModelParts, Part

PIECE_NUMEL = 1 << 20
"""Values added up at a time: their fp32 sum stays in a core's cache."""


class ReducedGradient:
    """A part's gradient on its way to the home that all ranks share; waited for as a `LaneTransfer` is."""

    def __init__(self, part: Part, transfer: Any, count: int) -> None:
        self.part, self.transfer, self.count = part, transfer, count
        self.error: BaseException | None = None
        self.reduced = threading.Event()
        """Every rank has read the slots."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> int:
        """Until it is at home; its bytes. Raises what went wrong, TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the ranks' gradients of {self.part.name} were not added up in time")
        if self.error is not None:
            raise self.error
        return self.part.layout.trainable_numel * self.part.layout.dtype.itemsize

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(fn)
                return
        fn(self)

    def end(self, error: BaseException | None = None) -> None:
        """Over, well or not."""
        with self._lock:
            self.error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        self.reduced.set()
        for fn in callbacks:
            fn(self)


class GradientReducer:
    """Adds up what the ranks ship. `homes`: shared, one for each part. `waits_for_norm`: a part is not done before its
    norm is known (immediate updates look at it). `part_numel`: pieces in which embedding's and head's are counted, as
    in `GradientDownload`."""

    def __init__(
        self, host: RankHost, units: ModelParts, homes: GradientArena, *, part_numel: int, waits_for_norm: bool
    ) -> None:
        self._host, self._group, self._homes = host, host.group, homes
        self._ends = {units.embed.index, units.head.index}
        self._part_numel, self._waits_for_norm = part_numel, waits_for_norm
        self._counts = dict.fromkeys((part.index for part in units.all), 0)
        self._held: list[ReducedGradient] = []
        """Gradients whose slots have not been given back, in order."""
        self._shipped: list[ReducedGradient] = []
        """Gradients of this step, in order."""
        self._queue: queue.SimpleQueue[ReducedGradient | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradient-reduce", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start a step. A part that is shipped in tiles takes its slot before it is submitted: those of the last step,
        which `norm` has waited for, must have been given back by then."""
        self._give_back()
        self._shipped = []

    def submit(self, part: Part, transfer: Any) -> ReducedGradient:
        """`transfer` brings this rank's gradient into its slot."""
        self._counts[part.index] += 1
        found = ReducedGradient(part, transfer, self._counts[part.index])
        self._held.append(found)
        self._shipped.append(found)
        self._give_back()
        self._queue.put(found)
        return found

    def make_room(self) -> None:
        """Wait until one slot more is free; raises what went wrong with its gradient."""
        if not self._give_back():
            assert self._held, "slots are full of gradients that nobody adds up"
            first = self._held[0]
            if not first.reduced.wait(self._group.timeout_s):
                raise TimeoutError(f"the ranks' gradients of {first.part.name} were not added up in time")
            if first.error is not None:
                raise first.error
            self._give_back()

    def _give_back(self) -> bool:
        over = [item for item in self._held if item.reduced.is_set()]
        for item in over:
            self._host.slots.give_back(item.part)
        self._held = [item for item in self._held if item not in over]
        return bool(over)

    def norm_of(self, part: Part) -> float | None:
        """L2 norm of a part's sum that is done; None where nobody waited for it."""
        if not self._waits_for_norm:
            return None
        return self._sumsq(part) ** 0.5

    def norm(self) -> torch.Tensor:
        """fp64 scalar: L2 norm of all sums of this step, once they are there. Raises what went wrong with one."""
        total = 0.0
        for item in self._shipped:
            item.wait(self._group.timeout_s)
            self._group.wait(
                self._host.counter(NORMED, item.part),
                item.count,
                f"norm of the gradient of {item.part.name}",
                (self._owner(item.part),),
            )
            total += self._sumsq(item.part)
        return torch.tensor(total, dtype=torch.float64).sqrt()

    def _owner(self, part: Part) -> int:
        return part.index % self._group.world_size

    def _sumsq(self, part: Part) -> float:
        return self._group.value(self._host.counter(NORMED, part), self._owner(part))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Add up nothing more. TimeoutError when a sum is still being written."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("gradients of several ranks are still being added up")

    # --- on the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._reduce(item)
                item.end()
            except BaseException as error:  # raised again on the thread that waits
                self._group.fail(error)
                item.end(error)
                return self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """After a failure: whoever waits for what comes is told."""
        while (item := self._queue.get()) is not None:
            item.end(error)

    def _reduce(self, item: ReducedGradient) -> None:
        group, host, part, count = self._group, self._host, item.part, item.count
        item.transfer.wait()
        own = host.slots[part]
        arrived, reduced = host.counter(ARRIVED, part), host.counter(REDUCED, part)
        group.post(arrived, count, float(host.homes.segment.offset_of(own)))
        group.wait(arrived, count, f"gradient of {part.name}")
        slots = [
            host.homes.segment.at(int(group.value(arrived, rank)), own.nbytes).view(own.dtype)
            for rank in range(group.world_size)
        ]
        home = self._homes[part]
        add_up(slots, home, *host.place.share(len(home)))
        group.post(reduced, count)
        group.wait(reduced, count, f"sum of the gradients of {part.name}")
        item.reduced.set()
        owner, normed = self._owner(part), host.counter(NORMED, part)
        if owner == group.rank:
            group.post(normed, count, self._count(part, home))
        if self._waits_for_norm:
            group.wait(normed, count, f"norm of the gradient of {part.name}", (owner,))

    def _count(self, part: Part, home: torch.Tensor) -> float:
        """Sum of squares of the rounded values, as `GradientDownload.count` takes it."""
        step = self._part_numel if part.index in self._ends else max(1, len(home))
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(home), step):
            total += norm_of_values(home[start : start + step]).double().square()
        return float(total)


@torch.no_grad()
def add_up(slots: list[torch.Tensor], home: torch.Tensor, start: int, stop: int) -> None:
    """`home[start:stop]` <- the sum over `slots` in their order, in fp32, rounded once."""
    for begin in range(start, stop, PIECE_NUMEL):
        end = min(stop, begin + PIECE_NUMEL)
        total = slots[0][begin:end].to(torch.float32, copy=True)
        for slot in slots[1:]:
            total += slot[begin:end].to(torch.float32)
        home[begin:end].copy_(total)


class ReducedDownload:
    """The `GradientShipping` of one rank of several: what `inner` brings into this rank's slots is added up there."""

    def __init__(self, inner: GradientShipping, reducer: GradientReducer) -> None:
        self._inner, self._reducer = inner, reducer

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes

    def begin(self) -> None:
        self._inner.begin()
        self._reducer.begin()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        return self._inner.accumulator(unit, only_once=only_once)

    def ship(self, unit: Part, accumulator: GradAccumulator) -> ReducedGradient:
        return self._reducer.submit(unit, self._inner.ship(unit, accumulator))

    def norm_of(self, unit: Part) -> float | None:
        return self._reducer.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._reducer.norm()
